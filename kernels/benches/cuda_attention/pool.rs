//! Pools of K and V in the orders that workers have them, on the CPU and on the device.

use host_kernels::cuda::Array;
use host_kernels::cuda::batch::KvView;

use crate::Gpu;

/// A NaN in bf16. It fills all memory that no kernel may read.
pub const NAN: u16 = 0x7fff;

/// Order of the dimensions, the slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Page, head, layer, K or V, token.
    PageHead,
    /// Page, layer, head, K or V, token.
    PageLayer,
    /// Layer, K or V, page, token, head.
    Layer,
}

pub const ORDERS: [Order; 3] = [Order::PageHead, Order::PageLayer, Order::Layer];

/// Sizes of a pool.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub order: Order,
    pub pages: usize,
    pub page_tokens: usize,
    pub layers: usize,
    pub heads: usize,
    pub head_dim: usize,
}

impl Sizes {
    /// Distances in elements by page, head, layer, K or V, token.
    fn strides(&self) -> [usize; 5] {
        let &Self { order, pages, page_tokens: tokens, layers, heads, head_dim: dim } = self;
        let kv = tokens * dim;
        match order {
            Order::PageHead => [heads * layers * 2 * kv, layers * 2 * kv, 2 * kv, kv, dim],
            Order::PageLayer => [layers * heads * 2 * kv, 2 * kv, heads * 2 * kv, kv, dim],
            Order::Layer => {
                let page = tokens * heads * dim;
                [page, dim, 2 * pages * page, pages * page, heads * dim]
            }
        }
    }

    pub fn elements(&self) -> usize {
        self.pages * self.page_tokens * self.layers * self.heads * self.head_dim * 2
    }

    /// Index of a row's first element.
    pub fn index(&self, page: usize, head: usize, layer: usize, kv: usize, token: usize) -> usize {
        let by = self.strides();
        page * by[0] + head * by[1] + layer * by[2] + kv * by[3] + token * by[4]
    }

    /// One layer of the pool that begins at `address`.
    pub fn view(&self, address: u64, layer: usize) -> KvView {
        let by = self.strides().map(|elements| 2 * elements as u64);
        KvView {
            start: [0, 1].map(|kv| address + layer as u64 * by[2] + kv * by[3]),
            page: [by[0]; 2],
            head: [by[1]; 2],
            token: [by[4]; 2],
            page_tokens: self.page_tokens as u32,
            element: 2,
        }
    }
}

/// A pool with the pages of some sequences, in one of its layers.
pub struct Pool {
    pub sizes: Sizes,
    pub bits: Array<u16>,
    /// Where each sequence's pages begin.
    pub tables: Vec<u32>,
    pub pages: Vec<u32>,
}

/// The layer that tests use, of [`LAYERS`].
pub const LAYER: usize = 1;
pub const LAYERS: usize = 2;

impl Pool {
    /// A pool with pages drawn at random for sequences of these lengths. It holds the row that `fill` gives for sequence, K or V,
    /// position and head, and NaN everywhere else.
    pub fn new<'a>(
        gpu: &Gpu,
        mut sizes: Sizes,
        lengths: &[usize],
        seed: u64,
        fill: impl Fn(usize, usize, usize, usize) -> Option<&'a [u16]>,
    ) -> Self {
        let counts = lengths.iter().map(|length| length.div_ceil(sizes.page_tokens));
        // Some pages belong to no sequence.
        sizes.pages = counts.clone().sum::<usize>() + 3;
        let mut free: Vec<u32> = (0..sizes.pages as u32).collect();
        fastrand::Rng::with_seed(seed).shuffle(&mut free);
        let mut bits = vec![NAN; sizes.elements()];
        let (mut tables, mut pages) = (Vec::new(), Vec::new());
        for (sequence, (&length, count)) in lengths.iter().zip(counts).enumerate() {
            tables.push(pages.len() as u32);
            let own = free.split_off(free.len() - count);
            for (position, kv, head) in (0..length)
                .flat_map(|p| (0..2).flat_map(move |kv| (0..sizes.heads).map(move |head| (p, kv, head))))
            {
                let Some(row) = fill(sequence, kv, position, head) else { continue };
                let page = own[position / sizes.page_tokens] as usize;
                let at = sizes.index(page, head, LAYER, kv, position % sizes.page_tokens);
                bits[at..at + sizes.head_dim].copy_from_slice(row);
            }
            pages.extend(own);
        }
        Self { sizes, bits: gpu.array(&bits), tables, pages }
    }

    pub fn view(&self) -> KvView {
        self.sizes.view(self.bits.address(), LAYER)
    }
}
