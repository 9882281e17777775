//! Errors that cross the boundary: a code that programs act on and a text that people act on.

use core::fmt;

/// What kind of failure it was. An open set: unknown codes are treated like [`ErrorCode::INTERNAL`].
///
/// Codes are negative, so that hot calls return counts and codes in one `i32`.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, abi_stable::StableAbi)]
pub struct ErrorCode(pub i32);

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal;)*) => {
        impl ErrorCode {
            $($(#[$doc])* pub const $name: ErrorCode = ErrorCode($value);)*

            /// The constant's name, or `UNKNOWN`.
            pub const fn name(self) -> &'static str {
                match self.0 { $($value => stringify!($name),)* _ => "UNKNOWN" }
            }
        }
    };
}

codes! {
    /// A defect in the plugin.
    INTERNAL = -1;
    /// The caller passed something that can never work: an unknown handle, a range outside its region.
    INVALID_ARGUMENT = -2;
    /// The plugin does not implement this.
    UNSUPPORTED = -3;
    /// Flow control: no room now, try again after a poll. Carries no text and is not logged.
    WOULD_BLOCK = -4;
    /// The plugin's configuration is wrong.
    CONFIG = -5;
    /// The plugin panicked, now or earlier. The instance refuses further calls.
    PANICKED = -6;
    /// The instance was shut down.
    CLOSED = -7;
    /// The operating system refused.
    IO = -8;
    /// A deadline passed.
    TIMEOUT = -9;
    /// A limit was reached: regions, peers, memory.
    NO_RESOURCE = -10;
    /// The peer is gone or was disconnected.
    PEER_LOST = -11;
    /// The operation was cancelled before it took effect.
    CANCELLED = -12;
    /// The other side speaks another version.
    VERSION = -13;
}

impl fmt::Debug for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.name(), self.0)
    }
}

/// An error with its code and a sentence that says what happened, to what, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// What programs act on.
    pub code: ErrorCode,
    /// What people act on: lower case, no full stop.
    pub message: String,
}

impl Error {
    /// An error of this kind with this text.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.name(), self.message)
    }
}

impl std::error::Error for Error {}

/// A result whose error crosses the boundary.
pub type Result<T> = std::result::Result<T, Error>;
