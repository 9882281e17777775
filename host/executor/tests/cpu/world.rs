//! A worker's ranks with pools in which every byte is NaN until it is written, and again as soon as its page is given up.

use std::ops::Range;
use std::thread;

use host_core::heads::rank_heads;
use host_core::layout::KvOrder;
use host_core::window::{WindowPages, WindowShape, first_live};
use host_core::{Batch, Dtype, KvLayout, KvShape, PageId, Room, Sampled, Sampling, Sequence};
use host_executor::cpu::CpuExecutor;
use host_executor::group::{Seat, seats};
use host_executor::synthetic::Synthetic;
use host_executor::{Executor, KvMemory};

pub const GREEDY: Sampling = Sampling::GREEDY;

/// An executor whose results can be compared as numbers.
pub trait Computes: Executor {
    fn compute(&mut self, kv: &mut KvMemory, batch: &Batch) -> Vec<u32>;
}

impl Computes for CpuExecutor {
    /// The bits of all logits.
    fn compute(&mut self, kv: &mut KvMemory, batch: &Batch) -> Vec<u32> {
        self.forward_logits(kv, batch).unwrap().iter().map(|logit| logit.to_bits()).collect()
    }
}

impl Computes for Synthetic {
    /// The drawn tokens.
    fn compute(&mut self, kv: &mut KvMemory, batch: &Batch) -> Vec<u32> {
        let outputs = self.forward(kv, batch).unwrap();
        outputs.into_iter().flat_map(|output| output.sampled).map(|sampled| sampled.token).collect()
    }
}

/// The settings of a worker.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub ranks: usize,
    pub order: KvOrder,
    pub dtype: Dtype,
    pub page_tokens: usize,
    pub pages: usize,
}

impl Kind {
    pub const PLAIN: Kind = Kind {
        ranks: 1,
        order: KvOrder::PageHeadLayerKvTokenDim,
        dtype: Dtype::F32,
        page_tokens: 8,
        pages: 700,
    };
}

struct Rank<E> {
    executor: E,
    kv: KvMemory,
}

pub struct World<E> {
    ranks: Vec<Rank<E>>,
    pub window: WindowShape,
    kind: Kind,
    free: Vec<PageId>,
    random: fastrand::Rng,
    /// Whether window parts are kept when no later token sees them.
    keeps: bool,
}

/// The pages of one sequence.
#[derive(Clone, Debug, Default)]
pub struct Table {
    pub pages: Vec<PageId>,
    pub window: WindowPages,
    pub done: usize,
    /// Positions that are computed for their window alone.
    pub recompute: Range<u32>,
}

impl<E: Computes> World<E> {
    pub fn new(kind: Kind, load: impl Fn(Seat) -> E) -> Self {
        let rank = |(rank, seat)| {
            let executor = load(seat);
            let model = executor.shape();
            let heads = rank_heads(model.kv_heads, kind.ranks, rank);
            let shape = KvShape {
                pages: kind.pages,
                heads: heads.len(),
                layers: model.page_layers(),
                page_tokens: kind.page_tokens,
                head_dim: model.head_dim,
                value_dim: model.head_dim,
                dtype: kind.dtype,
            };
            let kv = KvMemory::for_heads(KvLayout::new(shape, kind.order), heads.start).unwrap();
            Rank { executor, kv }
        };
        let ranks: Vec<Rank<E>> = seats(kind.ranks).into_iter().enumerate().map(rank).collect();
        let none = WindowShape { tokens: u32::MAX, parts: 0, layers: 0 };
        let window = ranks[0].executor.shape().window().unwrap_or(none);
        let free = (0..kind.pages as u32).map(PageId).collect();
        let mut world = Self {
            ranks,
            window,
            kind,
            free,
            random: fastrand::Rng::with_seed(kind.pages as u64),
            keeps: false,
        };
        (0..kind.pages as u32).for_each(|page| world.spoil(PageId(page)));
        world
    }

    /// Any free page.
    fn take(&mut self) -> PageId {
        let index = self.random.usize(..self.free.len());
        self.free.swap_remove(index)
    }

    /// Overwrites a page with NaN.
    fn spoil(&mut self, page: PageId) {
        self.rows(page, |row| row.fill(0xff));
    }

    fn rows(&mut self, page: PageId, mut change: impl FnMut(&mut [u8])) {
        for rank in &mut self.ranks {
            let shape = rank.kv.layout().shape;
            for at in 0..shape.heads * shape.layers * 2 * shape.page_tokens {
                let (head, rest) = (at % shape.heads, at / shape.heads);
                let (layer, rest) = (rest % shape.layers, rest / shape.layers);
                change(rank.kv.write_row(page, head, layer, rest % 2, rest / 2));
            }
        }
    }

    /// Changes all rows of one position in one page, on all ranks.
    pub fn change(&mut self, page: PageId, slot: usize, layer: usize, change: impl Fn(&mut [u8])) {
        for rank in &mut self.ranks {
            for head in 0..rank.kv.layout().shape.heads {
                (0..2).for_each(|side| change(rank.kv.write_row(page, head, layer, side, slot)));
            }
        }
    }

    /// Keeps all window parts from now on.
    pub fn keep_all(&mut self) {
        self.keeps = true;
    }

    /// Gives up the window parts that no position from `start` on sees, and takes pages for positions up to `end`.
    pub fn turn(&mut self, table: &mut Table, start: usize, end: usize) {
        let (parts, page_tokens) = (self.window.parts as usize, self.kind.page_tokens);
        let live = first_live(start, self.window.tokens as usize, page_tokens)..end.div_ceil(page_tokens);
        while table.pages.len() < end.div_ceil(page_tokens) {
            let page = self.take();
            table.pages.push(page);
        }
        if parts == 0 {
            return;
        }
        while (table.window.first as usize) < live.start && !self.keeps {
            for page in table.window.pages.drain(..parts.min(table.window.pages.len())).collect::<Vec<_>>() {
                self.spoil(page);
                self.free.push(page);
            }
            table.window.first += 1;
        }
        while (table.window.first as usize) + table.window.pages.len() / parts < live.end {
            let page = self.take();
            table.window.pages.push(page);
        }
    }

    /// A sequence for the next positions, whose pages must be there.
    pub fn sequence(&self, table: &Table, tokens: &[u32]) -> Sequence {
        Sequence {
            room: Room(1),
            tokens: tokens.to_vec(),
            start: table.done as u32,
            pages: table.pages.clone(),
            window: table.window.clone(),
            recompute: if table.done < table.recompute.end as usize { table.recompute.clone() } else { 0..0 },
            drafted: 0,
            sample: Some(GREEDY.into()),
            scored: None,
        }
    }

    /// The results of rank 0 for a batch.
    pub fn compute(&mut self, sequences: Vec<Sequence>) -> Vec<u32> {
        let batch = Batch { id: 1, sequences, layer_group: 0 };
        self.on_rank_0(|executor, kv| executor.compute(kv, &batch))
    }

    /// The tokens that a sequence draws, alone in a batch.
    pub fn draw(&mut self, sequence: Sequence) -> Vec<Sampled> {
        let batch = Batch { id: 1, sequences: vec![sequence], layer_group: 0 };
        let outputs = self.on_rank_0(|executor, kv| executor.forward(kv, &batch).unwrap());
        outputs.into_iter().flat_map(|output| output.sampled).collect()
    }

    /// Runs `work` on all ranks, and returns the answer of rank 0.
    fn on_rank_0<T: Send>(&mut self, work: impl Fn(&mut E, &mut KvMemory) -> Vec<T> + Sync) -> Vec<T> {
        thread::scope(|scope| {
            let work = &work;
            let work = |rank: &'_ mut Rank<E>| work(&mut rank.executor, &mut rank.kv);
            let threads: Vec<_> = self.ranks.iter_mut().map(|rank| scope.spawn(move || work(rank))).collect();
            let found: Vec<Vec<T>> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            assert!(found[1..].iter().all(Vec::is_empty), "only rank 0 answers");
            found.into_iter().next().unwrap()
        })
    }

    /// Computes the rest of `tokens` in chunks and returns the results. The chunk sizes are used in turn, again and again.
    pub fn run(&mut self, table: &mut Table, tokens: &[u32], chunks: &[usize]) -> Vec<u32> {
        let mut answers = Vec::new();
        for chunk in chunks.iter().cycle() {
            let start = table.done;
            let end = tokens.len().min(start + chunk);
            if start == end {
                break;
            }
            self.turn(table, start, end);
            let sequence = self.sequence(table, &tokens[start..end]);
            answers.extend(self.compute(vec![sequence]));
            table.done = end;
        }
        answers
    }

    /// The error with which a worker of one rank refuses a batch.
    pub fn refusal(&mut self, sequence: Sequence) -> String {
        let batch = Batch { id: 1, sequences: vec![sequence], layer_group: 0 };
        let Rank { executor, kv } = &mut self.ranks[0];
        executor.forward(kv, &batch).unwrap_err().to_string()
    }

    /// Takes over a prompt that another worker has computed: its full part, and the part of its window that the next position sees.
    pub fn arrive(&mut self, other: &Self, computed: &Table) -> Table {
        let mut table = Table { done: computed.done, ..Table::default() };
        self.turn(&mut table, computed.done, computed.done);
        let parts = self.window.parts as usize;
        let skipped = (table.window.first - computed.window.first) as usize * parts;
        let pages = computed.pages.iter().zip(&table.pages);
        let window = computed.window.pages[skipped..].iter().zip(&table.window.pages);
        for (from, to) in pages.chain(window) {
            self.copy(other, *from, *to);
        }
        table
    }

    /// Takes over only the full part, to compute its last window again from position `start` on.
    pub fn arrive_without_window(&mut self, other: &Self, computed: &Table, start: usize) -> Table {
        let end = computed.done;
        let window = WindowPages { first: (start / self.kind.page_tokens) as u32, pages: Vec::new() };
        let mut table =
            Table { done: start, recompute: start as u32..end as u32, window, ..Table::default() };
        for from in &computed.pages[..end.div_ceil(self.kind.page_tokens)] {
            let page = self.take();
            self.copy(other, *from, page);
            table.pages.push(page);
        }
        table
    }

    /// Whether a page holds the same bytes as a page of another worker.
    pub fn same(&self, page: PageId, other: &Self, others: PageId) -> bool {
        let shape = self.ranks[0].kv.layout().shape;
        let rows = |world: &Self, page| {
            let mut rows = Vec::new();
            for head in 0..world.ranks[0].executor.shape().kv_heads {
                let rank = world.ranks.iter().find(|rank| rank.kv.heads().contains(&head)).unwrap();
                let row = head - rank.kv.heads().start;
                for at in 0..shape.layers * 2 * shape.page_tokens {
                    let (layer, side, slot) =
                        (at % shape.layers, at / shape.layers % 2, at / shape.layers / 2);
                    rows.extend_from_slice(rank.kv.read_row(page, row, layer, side, slot));
                }
            }
            rows
        };
        rows(self, page) == rows(other, others)
    }

    fn copy(&mut self, other: &Self, from: PageId, to: PageId) {
        for rank in &mut self.ranks {
            let (shape, held) = (rank.kv.layout().shape, rank.kv.heads());
            for (row, head) in held.enumerate() {
                let source = other.ranks.iter().find(|rank| rank.kv.heads().contains(&head)).unwrap();
                let source_row = head - source.kv.heads().start;
                for at in 0..shape.layers * 2 * shape.page_tokens {
                    let (layer, side, slot) =
                        (at % shape.layers, at / shape.layers % 2, at / shape.layers / 2);
                    let bytes = source.kv.read_row(from, source_row, layer, side, slot);
                    rank.kv.write_row(to, row, layer, side, slot).copy_from_slice(bytes);
                }
            }
        }
    }

    /// Most token pages that one position sees. It sees the most if it is the first of its own page.
    pub fn most_live(&self, page_tokens: usize) -> usize {
        (self.window.tokens as usize - 1).div_ceil(page_tokens) + 1
    }

    /// Pages in use.
    pub fn held(&self) -> usize {
        self.kind.pages - self.free.len()
    }
}
