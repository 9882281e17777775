//! Digests of pages in a GPU's memory, computed on the GPU.

use std::ops::Range;

use host_core::layout::Strides;
use host_kernels::copy::CopyError;
use host_kernels::cuda::digest::{self, Pool, Side};

use super::PagePart;
use crate::KvMemory;
use crate::memory::{DevicePool, PageCopyError};

/// Digests of parts of pages, in order.
///
/// # Errors
/// When the pool does not hold all of them, or the device fails.
pub(super) fn parts(kv: &KvMemory, pool: &DevicePool, parts: &[PagePart]) -> Result<Vec<u64>, PageCopyError> {
    let shape = kv.layout().shape;
    let lies_inside = |inner: &Range<usize>, outer: &Range<usize>| {
        inner.is_empty() || (outer.start <= inner.start && inner.end <= outer.end)
    };
    for part in parts {
        let inside = (part.page.0 as usize) < shape.pages
            && lies_inside(&part.layers, &(0..shape.layers))
            && lies_inside(&part.heads, &kv.heads());
        if !inside {
            return Err(PageCopyError::Outside);
        }
    }
    let side = |strides: &Strides| Side {
        start: pool.address() + strides.start as u64,
        page: strides.page as u64,
        head: strides.head as u64,
        layer: strides.layer as u64,
        token: strides.token as u64,
        row: strides.row,
    };
    let [keys, values] = &kv.layout().sides;
    let place = Pool {
        sides: [side(keys), side(values)],
        pages: shape.pages,
        page_tokens: shape.page_tokens,
        layers: shape.layers,
        heads: shape.heads,
        first_head: kv.heads().start,
    };
    let part = |part: &PagePart| digest::PagePart {
        page: part.page.0 as usize,
        index: part.index as u64,
        layers: part.layers.clone(),
        heads: part.heads.clone(),
        tokens: part.tokens,
    };
    let parts: Vec<digest::PagePart> = parts.iter().map(part).collect();
    pool.digests(&place, &parts).map_err(|error| CopyError::Device(error.to_string()).into())
}
