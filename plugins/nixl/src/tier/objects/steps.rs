//! Decides the next step for a page, from what is known of its object. [`run`](super::run) carries it out.
//!
//! Of a read that failed NIXL says only that it failed. So whether an object is there is a separate question, which
//! costs a request. A get reads at once, because it mostly follows an `exists`. It asks only when the read failed.

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::{ErrorCode, Key};

use super::format::{Header, header, value};
use crate::tier::queue::Work;

/// How a page ended: a status, and the bytes of its value.
pub type End = (i32, u64);

const IO: End = (ErrorCode::IO.0, 0);
const GONE: End = (MISSING, 0);

/// The next step for a page's object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Ask whether the object is there.
    Ask,
    /// Read the object's header.
    Head,
    /// Read all of the object.
    Read,
    /// Write the value.
    Write,
    /// Write a tombstone over it, and then end the page so.
    Bury(End),
    End(End),
}

/// A page's work, and what is known of it.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub work: Work,
    pub key: Key,
    /// Bytes of its value, where they are known.
    pub length: u64,
    /// Whether nothing may be written.
    pub read_only: bool,
}

impl Case {
    pub fn first(&self) -> Step {
        match self.work {
            Work::Put | Work::Delete if self.read_only => Step::End((ErrorCode::UNSUPPORTED.0, 0)),
            Work::Exists | Work::Put | Work::Delete => Step::Ask,
            Work::Get => Step::Read,
        }
    }

    /// The step after the question. The answer is unknown when the bucket gave none.
    pub fn answered(&self, there: Option<bool>) -> Step {
        match (self.work, there) {
            (_, None) => Step::End(IO),
            (Work::Put, Some(false)) => Step::Write,
            (_, Some(false)) => Step::End(GONE),
            // The object is there, but could not be read.
            (Work::Get, Some(true)) => Step::End(IO),
            (_, Some(true)) => Step::Head,
        }
    }

    /// The step after a read of a header. `bytes` is `None` when the read failed, as it does for an empty object.
    pub fn headed(&self, bytes: Option<&[u8]>) -> Step {
        let found = bytes.map(|bytes| header(&self.key, bytes));
        match (self.work, found) {
            // The object holds the value that was put first: a value never changes.
            (Work::Put, Some(Header::Value { length, .. })) if length == self.length => {
                Step::End((STORED, length))
            }
            (Work::Put, _) => Step::Write,
            (_, Some(Header::Gone)) => Step::End(GONE),
            (Work::Delete, Some(Header::Value { length, .. })) => Step::Bury((FOUND, length)),
            (Work::Delete, _) => Step::Bury((FOUND, 0)),
            (_, None) => Step::End(IO),
            (_, Some(Header::Value { length, .. })) => Step::End((FOUND, length)),
            // A put writes over the damaged object. A read-only tier reports the damage.
            (_, Some(Header::Damaged)) if self.read_only => Step::End(IO),
            (_, Some(Header::Damaged)) => Step::End(GONE),
        }
    }

    /// The step after a read of the whole object. An end with [`FOUND`] is for the bytes after the header.
    pub fn read(&self, bytes: Option<&[u8]>) -> Step {
        let Some(bytes) = bytes else { return Step::Ask };
        match header(&self.key, bytes) {
            Header::Gone => Step::End(GONE),
            Header::Value { length, .. } if length != self.length => Step::End(GONE),
            Header::Value { length, .. } if value(&self.key, bytes).is_some() => Step::End((FOUND, length)),
            Header::Value { .. } | Header::Damaged if self.read_only => Step::End(IO),
            Header::Value { .. } | Header::Damaged => Step::Bury(IO),
        }
    }

    /// The step after a write.
    pub fn written(&self, well: bool) -> Step {
        Step::End(if well { (STORED, self.length) } else { IO })
    }
}

/// The step after a tombstone, which ends the page with `end`.
pub fn buried(end: End, well: bool) -> Step {
    Step::End(if well { end } else { IO })
}

#[cfg(test)]
mod tests {
    use super::super::format::{object, tombstone};
    use super::*;

    const KEY: Key = Key([9; 32]);

    fn case(work: Work, read_only: bool) -> Case {
        Case { work, key: KEY, length: 4, read_only }
    }

    #[test]
    fn each_kind_of_object_leads_each_kind_of_work_to_its_end() {
        let (whole, gone, longer) = (object(&KEY, b"abcd"), tombstone(&KEY), object(&KEY, b"abcde"));
        let other = object(&Key([8; 32]), b"abcd");
        let head = |bytes: &[u8]| bytes[..32].to_vec();
        let write = case(Work::Put, false);
        let (exists, get) = (case(Work::Exists, false), case(Work::Get, false));
        let delete = case(Work::Delete, false);
        for (what, bytes, exists_step, put, deleted) in [
            (
                "whole",
                Some(head(&whole)),
                Step::End((FOUND, 4)),
                Step::End((STORED, 4)),
                Step::Bury((FOUND, 4)),
            ),
            ("gone", Some(head(&gone)), Step::End(GONE), Step::Write, Step::End(GONE)),
            (
                "another length",
                Some(head(&longer)),
                Step::End((FOUND, 5)),
                Step::Write,
                Step::Bury((FOUND, 5)),
            ),
            ("another's", Some(head(&other)), Step::End(GONE), Step::Write, Step::Bury((FOUND, 0))),
            ("unreadable", None, Step::End(IO), Step::Write, Step::Bury((FOUND, 0))),
        ] {
            let bytes = bytes.as_deref();
            assert_eq!(exists.headed(bytes), exists_step, "{what}");
            assert_eq!(write.headed(bytes), put, "{what}");
            assert_eq!(delete.headed(bytes), deleted, "{what}");
        }
        let mut flipped = whole.clone();
        flipped[34] ^= 1;
        // What a get of 4 bytes reads of each object, in a buffer that was zeros before.
        let mut short = gone.clone();
        short.resize(36, 0);
        for (what, bytes, end) in [
            ("whole", whole, Step::End((FOUND, 4))),
            ("gone", short, Step::End(GONE)),
            ("longer", longer[..36].to_vec(), Step::End(GONE)),
            ("flipped", flipped, Step::Bury(IO)),
            ("another's", other, Step::Bury(IO)),
            ("nothing", vec![0; 36], Step::Bury(IO)),
        ] {
            assert_eq!(get.read(Some(&bytes)), end, "{what}");
        }
        assert_eq!(get.read(None), Step::Ask);
    }

    #[test]
    fn a_read_only_instance_writes_nothing_and_says_what_is_damaged() {
        assert_eq!(case(Work::Put, true).first(), Step::End((ErrorCode::UNSUPPORTED.0, 0)));
        assert_eq!(case(Work::Delete, true).first(), Step::End((ErrorCode::UNSUPPORTED.0, 0)));
        assert_eq!(case(Work::Get, true).read(Some(&[0; 36])), Step::End(IO));
        assert_eq!(case(Work::Exists, true).headed(Some(&[0; 32])), Step::End(IO));
    }

    #[test]
    fn a_bucket_that_does_not_answer_is_an_error_and_never_a_miss() {
        for work in [Work::Exists, Work::Get, Work::Put, Work::Delete] {
            assert_eq!(case(work, false).answered(None), Step::End(IO), "{work:?}");
        }
        assert_eq!(case(Work::Get, false).answered(Some(true)), Step::End(IO));
        assert_eq!(case(Work::Get, false).answered(Some(false)), Step::End(GONE));
        assert_eq!(case(Work::Put, false).answered(Some(false)), Step::Write);
    }
}
