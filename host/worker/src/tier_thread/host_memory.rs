//! Host memory: slots for pages, in one piece of memory for each rank.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Context;
use host_core::PageId;
use host_core::heads::counted_heads;
use host_core::hierarchy::HostSlot;
use host_core::layout::KvShape;
use host_core::transfer::{KvSlice, Lane, copy_lane};
use host_executor::KvMemory;
use host_executor::memory::{PageBuffer, PageCopier};
use host_kernels::copy::Copier;
use host_plugin_api::{Address, Key, MemoryKind};

use super::seal::{SEAL_BYTES, object_bytes, seal};

/// Threads of a large copy.
const COPY_THREADS: usize = 2;

/// The pool and the slots of one rank.
struct Rank {
    kv: KvMemory,
    pool: KvSlice,
    slots: KvSlice,
    memory: PageBuffer,
    /// Copies between the pool and the slots. The thread that copies is its only caller.
    copier: PageCopier,
    /// The heads that this rank stores, so that each head is stored once.
    stored: Range<usize>,
}

/// The slots of all ranks.
pub(super) struct HostMemory {
    ranks: Vec<Rank>,
    /// Bytes of one head of a page: its KV, and the object that storage gets of it.
    kv_bytes: usize,
    object_bytes: usize,
}

/// Bytes from one head of a slot to the next. `alignment` is that of storage, if there is any.
pub(super) fn head_bytes(shape: &KvShape, alignment: Option<usize>) -> usize {
    let kv = shape.block_bytes() * shape.layers;
    alignment.map_or(kv, |alignment| object_bytes(kv, alignment))
}

/// One head of a page in one rank's slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    /// Counted over the whole model.
    pub head: usize,
    pub rank: usize,
    /// From the start of the rank's memory.
    pub offset: usize,
}

impl HostMemory {
    /// Allocates the memory. With storage, which gives the `alignment`, there is room behind each head for its seal.
    ///
    /// # Errors
    /// When the system has too little memory, or the device of a pool cannot reach it.
    pub(super) fn new(
        pools: &[KvMemory],
        slots: usize,
        kv_heads: usize,
        alignment: Option<usize>,
    ) -> anyhow::Result<Self> {
        let first = pools.first().map(|kv| kv.layout().shape);
        let object_bytes = first.map_or(0, |shape| head_bytes(&shape, alignment));
        let threads = Arc::new(Copier::new(COPY_THREADS)?);
        let of_rank = |(rank, kv): (usize, &KvMemory)| {
            let shape = kv.layout().shape;
            let mut share = KvSlice::dense(shape, slots, kv.heads(), 0..shape.layers);
            for side in &mut share.layout.sides {
                side.head = object_bytes;
                side.page = object_bytes * shape.heads;
            }
            let bytes = object_bytes * shape.heads * slots;
            let memory = PageBuffer::private(kv, bytes).with_context(|| {
                format!("no memory for {bytes} bytes of host cache: lower --hicache-memory")
            })?;
            let copier = kv.copier(&threads)?;
            let stored = counted_heads(kv_heads, pools.len(), rank);
            let pool = KvSlice::pool(*kv.layout(), kv.heads().start);
            // SAFETY: this value only lends its memory to copies, which the core keeps apart from all else (see `copy`).
            let kv = unsafe { kv.share() };
            Ok(Rank { kv, pool, slots: share, memory, copier, stored })
        };
        let ranks: anyhow::Result<Vec<Rank>> = pools.iter().enumerate().map(of_rank).collect();
        let kv_bytes = first.map_or(0, |shape| head_bytes(&shape, None));
        Ok(Self { ranks: ranks?, kv_bytes, object_bytes })
    }

    /// Bytes of one head of a page with its seal, as storage takes it.
    pub(super) fn object_bytes(&self) -> usize {
        self.object_bytes
    }

    /// Bytes of a page's KV, over all ranks.
    pub(super) fn page_bytes(&self) -> usize {
        self.ranks.iter().map(|rank| rank.kv.heads().len() * self.kv_bytes).sum()
    }

    /// Seals one head of a page as the object of this key.
    pub(super) fn seal(&self, key: &Key, rank: usize, offset: usize) {
        let memory = &self.ranks[rank].memory;
        // SAFETY: the slot is being saved: it was filled, and the core lets nothing write it before storage has taken it. The
        // bytes behind it are given to storage only after this.
        unsafe { memory.write(offset + self.kv_bytes, &seal(key, memory.bytes_at(offset, self.kv_bytes))) };
    }

    /// Whether the bytes there are the whole object of this key.
    pub(super) fn is_sealed(&self, key: &Key, rank: usize, offset: usize) -> bool {
        let memory = &self.ranks[rank].memory;
        // SAFETY: storage has said that it read this slot, and the core lets nothing write it before this answer.
        let (found, kv) = unsafe {
            (memory.bytes_at(offset + self.kv_bytes, SEAL_BYTES), memory.bytes_at(offset, self.kv_bytes))
        };
        found == seal(key, kv)
    }

    /// Every head of a slot on every rank. With `stored`, only the heads that are stored.
    pub(super) fn blocks(&self, slot: HostSlot, stored: bool) -> impl Iterator<Item = Block> {
        let bytes = self.object_bytes;
        self.ranks.iter().enumerate().flat_map(move |(rank, own)| {
            let held = own.kv.heads();
            let heads = if stored { own.stored.clone() } else { held.clone() };
            let page = slot.0 as usize * held.len() * bytes;
            heads.map(move |head| Block { head, rank, offset: page + (head - held.start) * bytes })
        })
    }

    /// Every rank's memory, as it is registered with a plugin.
    pub(super) fn regions(&self) -> impl Iterator<Item = host_plugin_api::Memory> {
        self.ranks.iter().map(|rank| host_plugin_api::Memory {
            address: Address::of(rank.memory.address().as_ptr()),
            length: rank.memory.bytes() as u64,
            kind: MemoryKind::DRAM,
            device: 0,
            fd: -1,
            generation: 1,
            fd_offset: 0,
        })
    }

    /// Copies pages between the ranks' pools and their slots.
    ///
    /// # Errors
    /// When a page or slot does not exist, with nothing copied on that rank, or when a device fails.
    pub(super) fn copy(&self, load: bool, pages: &[(PageId, HostSlot)]) -> anyhow::Result<()> {
        let (pool, slots): (Vec<PageId>, Vec<PageId>) =
            pages.iter().map(|(page, slot)| (*page, PageId(slot.0))).unzip();
        for rank in &self.ranks {
            let heads = rank.kv.heads();
            let layers = rank.slots.layers();
            let (source, target, from, to) = match load {
                true => (rank.slots, rank.pool, &slots, &pool),
                false => (rank.pool, rank.slots, &pool, &slots),
            };
            let plan = copy_lane(&Lane { source, target, heads }, from, to, layers)?;
            let whole = 0..rank.memory.bytes();
            // SAFETY: the core keeps all other writers from pages and slots of a copy under way, and readers from its targets.
            unsafe {
                match load {
                    true => rank.copier.copy_in(&plan, &rank.memory, whole),
                    false => rank.copier.copy_out(&plan, &rank.memory, whole),
                }
            }?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use host_core::heads::rank_heads;
    use host_core::layout::KvOrder;
    use host_core::{Dtype, KvLayout};

    use super::*;
    use crate::gpu_pools;

    fn shape(heads: usize) -> KvShape {
        KvShape { pages: 4, heads, layers: 3, page_tokens: 2, head_dim: 4, value_dim: 4, dtype: Dtype::Bf16 }
    }

    /// A pool whose every row tells where in the model it belongs.
    fn pool(order: KvOrder, first_head: usize, heads: usize) -> KvMemory {
        let mut kv = KvMemory::for_heads(KvLayout::new(shape(heads), order), first_head).unwrap();
        for page in 0..4 {
            for (head, layer) in (0..heads).flat_map(|head| (0..3).map(move |layer| (head, layer))) {
                for (side, token) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    let value = [page, first_head + head, layer, side * 2 + token].map(|part| part as u8);
                    kv.write_row(PageId(page as u32), head, layer, side, token)
                        .copy_from_slice(&[value; 2].concat());
                }
            }
        }
        kv
    }

    fn object(memory: &HostMemory, block: Block) -> Vec<u8> {
        let mut bytes = vec![0; memory.kv_bytes];
        // SAFETY: this thread alone has the memory.
        unsafe { memory.ranks[block.rank].memory.read(block.offset, &mut bytes) };
        bytes
    }

    #[test]
    fn a_head_of_a_page_is_the_same_object_for_every_layout_and_number_of_ranks() {
        let pages = [(PageId(1), HostSlot(5)), (PageId(3), HostSlot(0))];
        let mut expected: Option<Vec<Vec<u8>>> = None;
        for order in KvOrder::ALL {
            for ranks in [1, 2, 3, 4, 8] {
                let of_rank = |rank| {
                    let heads = rank_heads(4, ranks, rank);
                    pool(order, heads.start, heads.len())
                };
                let pools: Vec<KvMemory> = (0..ranks).map(of_rank).collect();
                let on_gpu = pools.iter().map(gpu_pools::on_gpu).collect();
                for (pools, place) in [(pools, "host memory"), (on_gpu, "a GPU's memory")] {
                    let memory = HostMemory::new(&pools, 6, 4, Some(1)).unwrap();
                    memory.copy(false, &pages).unwrap();
                    let objects =
                        pages.iter().flat_map(|(_, slot)| memory.blocks(*slot, true).collect::<Vec<_>>());
                    let objects: Vec<Vec<u8>> = objects.map(|block| object(&memory, block)).collect();
                    assert_eq!(objects.len(), 8);
                    let before = expected.get_or_insert_with(|| objects.clone());
                    assert_eq!(*before, objects, "{order} over {ranks} ranks in {place}");
                }
            }
        }
    }

    #[test]
    fn pages_come_back_to_a_pool_on_a_gpu_as_to_one_in_host_memory() {
        let (out, back) = (
            [(PageId(1), HostSlot(2)), (PageId(2), HostSlot(0))],
            [(PageId(0), HostSlot(2)), (PageId(3), HostSlot(0))],
        );
        for order in KvOrder::ALL {
            let pools = [pool(order, 1, 3), gpu_pools::on_gpu(&pool(order, 1, 3))];
            let [host, gpu] = pools.map(|pool| {
                let memory = HostMemory::new(std::slice::from_ref(&pool), 3, 4, None).unwrap();
                memory.copy(false, &out).unwrap();
                memory.copy(true, &back).unwrap();
                assert!(memory.copy(true, &[(PageId(9), HostSlot(0))]).is_err(), "a page that is not there");
                gpu_pools::in_host_memory(&pool)
            });
            assert_eq!(gpu_pools::bytes(&host), gpu_pools::bytes(&gpu), "{order}");
            assert_eq!(host.read_row(PageId(0), 2, 1, 1, 1), host.read_row(PageId(1), 2, 1, 1, 1));
        }
    }

    #[test]
    fn what_is_saved_and_loaded_elsewhere_is_what_it_was() {
        let saved = pool(KvOrder::LayerKvPageTokenHeadDim, 0, 2);
        let memory = HostMemory::new(std::slice::from_ref(&saved), 3, 2, None).unwrap();
        memory.copy(false, &[(PageId(1), HostSlot(2)), (PageId(2), HostSlot(0))]).unwrap();
        memory.copy(true, &[(PageId(3), HostSlot(2))]).unwrap();
        for (head, layer) in [(0, 0), (1, 2)] {
            for (side, token) in [(0, 0), (1, 1)] {
                let row = saved.read_row(PageId(3), head, layer, side, token).to_vec();
                assert_eq!(row, saved.read_row(PageId(1), head, layer, side, token));
            }
        }
        assert!(memory.copy(true, &[(PageId(9), HostSlot(0))]).is_err(), "a page that is not there");
    }
}
