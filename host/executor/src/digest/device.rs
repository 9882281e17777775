//! Digests of pages in a GPU's memory, which are brought to the CPU for it.

use host_core::PageId;
use host_core::transfer::{KvSlice, Lane, copy_lane};
use host_kernels::copy::CopyError;
use host_kernels::xxh3::xxh3;

use super::{PagePart, Place, sum, term};
use crate::KvMemory;
use crate::memory::{DevicePool, PageCopyError};

/// Digests of parts of pages, in order.
///
/// # Errors
/// When the pool does not hold all of them, or the device fails.
pub(super) fn parts(kv: &KvMemory, pool: &DevicePool, parts: &[PagePart]) -> Result<Vec<u64>, PageCopyError> {
    let most = pool.looked_at();
    let alike = |a: &PagePart, b: &PagePart| (&a.layers, &a.heads) == (&b.layers, &b.heads);
    let mut digests = Vec::with_capacity(parts.len());
    for group in parts.chunk_by(alike) {
        let Some(PagePart { layers, heads, .. }) = group.first() else { continue };
        let bytes = kv.layout().shape.block_bytes() * layers.len() * heads.len();
        for some in group.chunks((most / bytes.max(1)).max(1)) {
            digests.extend(at_once(kv, pool, some, bytes)?);
        }
    }
    Ok(digests)
}

/// Digests of parts of the same layers and heads that fit into the buffer. Each has so many bytes.
fn at_once(
    kv: &KvMemory,
    pool: &DevicePool,
    parts: &[PagePart],
    bytes: usize,
) -> Result<Vec<u64>, PageCopyError> {
    let Some(PagePart { layers, heads, .. }) = parts.first().filter(|_| bytes > 0) else {
        return Ok(vec![0; parts.len()]);
    };
    let shape = kv.layout().shape;
    let source = KvSlice::pool(*kv.layout(), kv.heads().start);
    let target = KvSlice::dense(shape, parts.len(), heads.clone(), layers.clone());
    let pages: Vec<PageId> = parts.iter().map(|part| part.page).collect();
    let places: Vec<PageId> = (0..).take(parts.len()).map(PageId).collect();
    let lane = Lane { source, target, heads: heads.clone() };
    let refused = |error: host_core::transfer::PlanError| CopyError::Device(error.to_string());
    let copy = copy_lane(&lane, &pages, &places, layers.clone()).map_err(refused)?;
    let of_page = |(part, page): (&PagePart, &[u8])| {
        let blocks = page.chunks_exact(shape.block_bytes());
        let places = heads.clone().flat_map(|head| layers.clone().map(move |layer| (head, layer)));
        let terms = places.zip(blocks).map(|((head, layer), block)| {
            let place = Place { page: part.index, layer, head };
            term(place, first_tokens(block, &shape, part.tokens))
        });
        sum(terms)
    };
    let digest = |all: &[u8]| parts.iter().zip(all.chunks_exact(bytes)).map(of_page).collect();
    // SAFETY: the caller of a digest has pages that nothing writes, as for one in host memory.
    unsafe { pool.look(&copy, bytes * parts.len(), digest) }
}

/// Digest of the first tokens of a block, K and V.
fn first_tokens(block: &[u8], shape: &host_core::KvShape, tokens: usize) -> u64 {
    if tokens >= shape.page_tokens {
        return xxh3(block, 0);
    }
    let (keys, values) = block.split_at(shape.page_tokens * shape.row_bytes(0));
    let (keys, values) = (&keys[..tokens * shape.row_bytes(0)], &values[..tokens * shape.row_bytes(1)]);
    xxh3(&[keys, values].concat(), 0)
}
