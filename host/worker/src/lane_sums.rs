//! Sums over what one rank sends to another, the same on both sides: prefill's over each part as it goes, decode's over
//! everything when all is there. Parts, layers and ranks add up in any order.

use std::ops::Range;

use host_core::PageId;

use host_executor::KvMemory;
use host_executor::digest::{self, PagePart};

/// The sum over some layers and heads (of the model) of pages, each with its place in the transfer.
///
/// # Errors
/// When the device fails that holds the pool.
pub(super) fn of(
    kv: &KvMemory,
    pages: impl Iterator<Item = (usize, PageId)>,
    layers: &Range<usize>,
    heads: &Range<usize>,
) -> Result<u64, String> {
    let tokens = kv.layout().shape.page_tokens;
    let part = |(index, page)| {
        let (layers, heads) = (layers.clone(), heads.clone());
        PagePart { page, index, layers, heads, tokens }
    };
    let parts: Vec<PagePart> = pages.map(part).collect();
    digest::parts(kv, &parts).map(digest::sum).map_err(|error| format!("pages cannot be digested: {error}"))
}
