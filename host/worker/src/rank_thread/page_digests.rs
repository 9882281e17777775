//! Digests of the pages that hold a prompt, for the log: sums over the pools of all ranks.

use host_core::heads::counted_heads;
use host_core::{PageId, Room};

use host_executor::KvMemory;
use host_executor::digest::{self, PagePart};
use parking_lot::Mutex;

/// One prompt's pages.
#[derive(Debug)]
pub(super) struct PageDigests {
    room: Room,
    tokens: usize,
    pages: Vec<PageId>,
    found: Mutex<Collected>,
}

#[derive(Debug)]
struct Collected {
    /// Ranks that have not added their digests.
    missing: usize,
    digests: Vec<u64>,
}

impl PageDigests {
    pub(super) fn new(ranks: usize, room: Room, tokens: usize, pages: Vec<PageId>) -> Self {
        let digests = vec![0; pages.len()];
        Self { room, tokens, pages, found: Mutex::new(Collected { missing: ranks, digests }) }
    }

    /// Adds the digests of a rank's heads of the pages. A head that several ranks hold counts once. The last rank logs.
    pub(super) fn add(&self, kv: &KvMemory, kv_heads: usize, ranks: usize, rank: usize) {
        let shape = kv.layout().shape;
        let part = |(index, page): (usize, &PageId)| {
            let tokens = self.tokens.saturating_sub(index * shape.page_tokens);
            let (layers, heads) = (0..shape.layers, counted_heads(kv_heads, ranks, rank));
            PagePart { page: *page, index, layers, heads, tokens }
        };
        let parts: Vec<PagePart> = self.pages.iter().enumerate().map(part).collect();
        let own = digest::parts(kv, &parts).unwrap_or_else(|error| {
            tracing::debug!(target: "host::pages", room = %self.room, rank, %error, "pages cannot be digested");
            Vec::new()
        });
        let mut found = self.found.lock();
        for (digest, own) in found.digests.iter_mut().zip(own) {
            *digest = digest::sum([*digest, own]);
        }
        found.missing = found.missing.saturating_sub(1);
        if found.missing == 0 {
            let digests: Vec<String> = found.digests.iter().map(|digest| format!("{digest:016x}")).collect();
            let (room, tokens) = (self.room, self.tokens);
            tracing::debug!(target: "host::pages", %room, tokens, digests = digests.join(","), "prompt ready");
        }
    }
}
