//! Sums over the data that one rank sends to another. Both sides compute them: prefill over each part when it sends the
//! part, decode over all data once it is there. Sums of parts, layers and ranks can be added in any order.

use std::ops::Range;

use host_core::PageId;

use host_executor::KvMemory;
use host_executor::digest::{self, PagePart};

/// The sum over some layers and heads (of the model) of pages, each with its place in the transfer.
///
/// # Errors
/// When the device that holds the pool fails.
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
