//! The pages that the reading and writing threads get, and their answers.

use host_plugin_api::{ErrorCode, TierPage};

use crate::memory::Span;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Exists,
    Get,
    Put,
    Delete,
}

impl Kind {
    /// The line in which pages of this kind wait: pages without data, gets, puts.
    pub fn line(self) -> usize {
        match self {
            Self::Exists | Self::Delete => 0,
            Self::Get => 1,
            Self::Put => 2,
        }
    }
}

/// One page that a thread of the tier works on.
#[derive(Clone, Copy, Debug)]
pub struct Claimed {
    pub kind: Kind,
    pub slot: u32,
    pub page: u32,
    pub what: TierPage,
    /// The page's memory, for gets and puts.
    pub span: Option<Span>,
}

/// How a page ended.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    pub page: Claimed,
    pub status: i32,
    pub bytes: u64,
}

impl Claimed {
    pub fn ended(self, status: i32, bytes: u64) -> Ended {
        Ended { page: self, status, bytes }
    }

    pub fn failed(self, code: ErrorCode) -> Ended {
        self.ended(code.0, 0)
    }
}
