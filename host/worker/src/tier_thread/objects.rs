//! Requests to a storage tier, as objects: one per page and KV head.

use std::collections::VecDeque;

use host_core::hierarchy::PageEnd;
use host_core::radix::PageHash;
use host_plugin_api::Key;
use sha2::{Digest, Sha256};

/// The key of one head of a page: SHA-256 over the page's name, "kv-head" and the head's number as u32 LE.
pub(super) fn key(name: &PageHash, head: usize) -> Key {
    let mut hasher = Sha256::new();
    hasher.update(name.0);
    hasher.update(b"kv-head");
    hasher.update(u32::try_from(head).unwrap_or(u32::MAX).to_le_bytes());
    Key(hasher.finalize().into())
}

/// The operation on an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Ask,
    Read,
    Write,
    Remove,
}

impl Kind {
    /// The method of the plugin API.
    pub(super) fn method(self) -> &'static str {
        match self {
            Self::Ask => "exists",
            Self::Read => "get",
            Self::Write => "put",
            Self::Remove => "delete",
        }
    }
}

/// One object, and the page that it is part of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Object {
    pub key: Key,
    /// The page's place in the core's batch.
    pub page: u32,
    pub rank: usize,
    pub offset: u64,
    /// Whether its seal lies behind it, for an object that is to be written.
    pub sealed: bool,
}

/// One of the core's batches, as objects.
#[derive(Debug)]
pub(super) struct Request {
    pub kind: Kind,
    /// Objects that the plugin has not been given.
    pub queue: VecDeque<Object>,
    /// For each page: the number of objects that have not ended, and the worst end so far.
    pages: Vec<(usize, PageEnd)>,
    left: usize,
}

fn worse(one: PageEnd, other: PageEnd) -> PageEnd {
    let rank = |end| match end {
        PageEnd::Done => 0,
        PageEnd::Missing => 1,
        PageEnd::Refused => 2,
        PageEnd::Failed => 3,
        PageEnd::Damaged => 4,
    };
    if rank(other) > rank(one) { other } else { one }
}

impl Request {
    pub(super) fn new(kind: Kind, pages: usize, objects: VecDeque<Object>) -> Self {
        let mut counts = vec![(0, PageEnd::Done); pages];
        for object in &objects {
            counts[object.page as usize].0 += 1;
        }
        Self { kind, queue: objects, pages: counts, left: pages }
    }

    /// Records that an object has ended. Returns how its page has ended, if this was the page's last object.
    pub(super) fn ended(&mut self, page: u32, end: PageEnd) -> Option<PageEnd> {
        let (left, worst) = self.pages.get_mut(page as usize)?;
        *worst = worse(*worst, end);
        *left = left.checked_sub(1)?;
        if *left > 0 {
            return None;
        }
        self.left -= 1;
        Some(*worst)
    }

    /// Whether all pages have ended.
    pub(super) fn is_done(&self) -> bool {
        self.left == 0
    }

    /// Whether each page was found, for queries that have ended.
    pub(super) fn found(&self) -> Vec<bool> {
        self.pages.iter().map(|(left, worst)| *left == 0 && *worst == PageEnd::Done).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_ended_when_all_its_heads_have_and_is_as_good_as_the_worst() {
        let object = |page| Object { key: Key::default(), page, rank: 0, offset: 0, sealed: false };
        let objects = [object(0), object(0), object(1), object(1)].into();
        let mut request = Request::new(Kind::Read, 2, objects);
        assert_eq!(request.ended(1, PageEnd::Missing), None);
        assert_eq!(request.ended(0, PageEnd::Done), None);
        assert_eq!(request.ended(1, PageEnd::Done), Some(PageEnd::Missing));
        assert!(!request.is_done());
        assert_eq!(request.ended(0, PageEnd::Done), Some(PageEnd::Done));
        assert!(request.is_done());
        assert_eq!(request.found(), [true, false]);
        assert_eq!(request.ended(0, PageEnd::Failed), None, "a repeat");
    }

    #[test]
    fn keys_differ_by_page_and_by_head() {
        let names = [PageHash([1; 32]), PageHash([2; 32])];
        let keys: std::collections::BTreeSet<Key> =
            names.iter().flat_map(|name| (0..8).map(|head| key(name, head))).collect();
        assert_eq!(keys.len(), 16);
    }
}
