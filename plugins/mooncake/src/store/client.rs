//! The interface of both drivers to Mooncake Store, and the meaning of its numbers.

use host_plugin_api::ErrorCode;
use host_plugin_api::tier::{FOUND, MISSING, STORED};

/// Most keys of one call. More at once overflow Mooncake's queue of transfers to one peer.
pub const CALL_KEYS: usize = 1024;

/// A piece of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub address: u64,
    pub length: u64,
}

/// What a client is set up with. The names are Mooncake's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setup {
    pub local_hostname: String,
    pub metadata_server: String,
    pub global_segment_size: u64,
    pub protocol: String,
    pub device_name: String,
    pub master_server_address: String,
}

/// Bytes that a client has for values outside of registered memory. This tier has no such values. SGLang has the same number.
pub const LOCAL_BUFFER_BYTES: u64 = 16 << 20;

/// A way to Mooncake Store: its C library, or its Python module.
pub trait Library: Send + Sync {
    /// Makes a client and sets it up. Blocks, for minutes when no master answers.
    ///
    /// # Errors
    /// A sentence, when Mooncake refuses.
    fn connect(&self, setup: &Setup) -> Result<Box<dyn Client>, String>;

    /// Whether making or closing a client keeps all other calls of this process from Mooncake. It is then done only
    /// while the master answers.
    fn holds_others_up(&self) -> bool {
        false
    }

    /// What was found, and where.
    fn describe(&self) -> String;
}

/// A client that was set up. Every call may block, some for a minute, and may be made from any thread. A slice of
/// results has one number for each key. An error says that no result is known.
pub trait Client: Send + Sync {
    /// Asks for keys. A result is 1 for a key that is there, 0 for one that is not, or a code.
    ///
    /// # Errors
    /// When there was no answer for each key.
    fn exist(&self, names: &[String]) -> Result<Vec<i64>, String>;

    /// Stores values. A result is 0 or a code. A key that is there keeps its value.
    ///
    /// # Errors
    /// As above.
    fn put(&self, names: &[String], values: &[Span]) -> Result<Vec<i64>, String>;

    /// Reads values. A result is the bytes that were read, or a code.
    ///
    /// # Errors
    /// As above.
    fn get(&self, names: &[String], places: &[Span]) -> Result<Vec<i64>, String>;

    /// Removes values, also values that were just read. A result is 0 or a code.
    ///
    /// # Errors
    /// As above.
    fn remove(&self, names: &[String]) -> Result<Vec<i64>, String>;

    /// Registers memory that values may be in.
    ///
    /// # Errors
    /// When Mooncake refuses.
    fn register(&self, span: Span) -> Result<(), String>;

    /// Ends the registration of memory.
    ///
    /// # Errors
    /// When Mooncake refuses.
    fn unregister(&self, span: Span) -> Result<(), String>;

    /// Ends the client: its connections and threads, and its segment with the values in it. When it returns nothing of the
    /// host's memory is touched any more. To be called once, when no other call runs or follows.
    fn close(&self);
}

/// The meaning of a code of Mooncake Store. The table is `ErrorCode` in its `types.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// -704.
    Missing,
    /// -200: no segment has room, and no value in it may be evicted yet.
    NoRoom,
    /// -900 and -901: the master does not answer.
    MasterLost,
    /// All other codes. For a transfer (-800): the owner of the segment is gone, or did not answer for a minute.
    Failed,
}

/// The code for a key that is not there.
pub const GONE: i64 = -704;

pub fn verdict(code: i64) -> Verdict {
    match code {
        GONE => Verdict::Missing,
        -200 => Verdict::NoRoom,
        -900 | -901 => Verdict::MasterLost,
        _ => Verdict::Failed,
    }
}

impl Verdict {
    fn code(self) -> i32 {
        match self {
            Verdict::Missing => MISSING,
            Verdict::NoRoom => ErrorCode::NO_RESOURCE.0,
            Verdict::MasterLost => ErrorCode::PEER_LOST.0,
            Verdict::Failed => ErrorCode::IO.0,
        }
    }
}

/// How a page ended: a status, and the bytes of its value where they are known.
pub type End = (i32, u64);

/// How a page ended, from a result of [`Client::exist`].
pub fn existed(result: i64) -> End {
    match result {
        1 => (FOUND, 0),
        0 => (MISSING, 0),
        code => (verdict(code).code(), 0),
    }
}

/// How a page ended, from a result of [`Client::put`].
pub fn put(result: i64, length: u64) -> End {
    match result {
        0 => (STORED, length),
        // A put cannot miss its key, so this code is an error.
        code if verdict(code) == Verdict::Missing => (ErrorCode::IO.0, 0),
        code => (verdict(code).code(), 0),
    }
}

/// How a page ended, from a result of [`Client::get`].
pub fn got(result: i64, length: u64) -> End {
    match result {
        read if read >= 0 && read.unsigned_abs() == length => (FOUND, length),
        // A value of another length: a shorter one was read, a longer one (-600) was not.
        read if read >= 0 => (ErrorCode::IO.0, 0),
        -600 => (MISSING, 0),
        code => (verdict(code).code(), 0),
    }
}

/// How a page ended, from a result of [`Client::remove`].
pub fn removed(result: i64) -> End {
    match result {
        0 => (FOUND, 0),
        code => (verdict(code).code(), 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_mooncake_are_what_the_host_acts_on() {
        let (io, lost, full) = (ErrorCode::IO.0, ErrorCode::PEER_LOST.0, ErrorCode::NO_RESOURCE.0);
        for (result, exist, stored, read, gone) in [
            (0, MISSING, STORED, io, FOUND),
            (1, FOUND, io, io, io),
            (64, io, io, FOUND, io),
            (65, io, io, io, io),
            (-704, MISSING, io, MISSING, MISSING),
            (-200, full, full, full, full),
            (-600, io, io, MISSING, io),
            (-800, io, io, io, io),
            (-900, lost, lost, lost, lost),
            (-901, lost, lost, lost, lost),
            (i64::MIN, io, io, io, io),
        ] {
            let ends = [existed(result), put(result, 64), got(result, 64), removed(result)];
            assert_eq!(ends.map(|end| end.0), [exist, stored, read, gone], "{result}");
        }
        assert_eq!((got(64, 64).1, put(0, 64).1), (64, 64));
    }
}
