//! The audit log: which client was refused, and why, in lines that no client can fill a disk with.
//!
//! A line says the reason in this server's words, the client and its address. Of a request it has its path and id, and nothing else of its headers or body.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use host_wire::clock::{self, Instant};
use parking_lot::Mutex;

/// A reason has a line this often at most.
const EVERY: Duration = Duration::from_secs(1);

/// Why a request or a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It is addressed to a name that is not this server's.
    Host,
    /// A web page of another origin sends it.
    Origin,
    /// Its body is no JSON.
    ContentType,
    /// It has no key.
    NoKey,
    /// Its key is not one of this server's.
    WrongKey,
    /// The gateway names no tenant.
    NoTenant,
    /// Only operators may send it.
    NotOperator,
    /// Only a process of this machine may send it.
    NotLocal,
    /// The client has its share of the requests, or as many as its key allows.
    Requests,
    /// All places are taken.
    AllRequests,
    /// The client has its share of the bodies on their way.
    Uploads,
    /// No more bodies find room.
    AllUploads,
    /// The client has its share of the text that waits.
    Text,
    /// No more text may wait.
    AllText,
    /// As many grammars of the client wait to be compiled as may.
    Grammars,
    /// Grammars of others take too long.
    AllGrammars,
    /// The client has its share of the answers that are not read.
    Answers,
    /// No more answers may wait.
    AllAnswers,
    /// The client has its share of the connections.
    Connections,
}

/// How many reasons there are: the last one's number, and one.
const REASONS: usize = Refusal::Connections as usize + 1;

impl Refusal {
    /// The reason, as logs say it.
    fn reason(self) -> &'static str {
        match self {
            Self::Host => "addressed to a name that is not this server's (--allowed-hosts)",
            Self::Origin => "sent by a web page of another origin (--allowed-hosts)",
            Self::ContentType => "the body is not JSON",
            Self::NoKey => "no API key",
            Self::WrongKey => "an API key that is not one of this server's",
            Self::NoTenant => "the gateway names no tenant, or a wrong one",
            Self::NotOperator => "only operators may send it",
            Self::NotLocal => "only a process of the router's machine may send it",
            Self::Requests => "the client's share of --max-requests, or all that its key allows",
            Self::AllRequests => "all of --max-requests",
            Self::Uploads => "the client's share of --max-uploads or --max-upload-bytes",
            Self::AllUploads => "all of --max-uploads or --max-upload-bytes",
            Self::Text => "the client's share of --max-text-bytes",
            Self::AllText => "all of --max-text-bytes",
            Self::Grammars => "as many grammars that wait to be compiled as a client may have",
            Self::AllGrammars => "grammars of others take too long to compile",
            Self::Answers => "the client's share of --max-answer-bytes",
            Self::AllAnswers => "all of --max-answer-bytes",
            Self::Connections => "the client's share of --max-connections",
        }
    }
}

/// Writes the lines. All listeners of a router have one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Audit(Arc<Mutex<[Told; REASONS]>>);

/// What was told of one reason.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    last: Option<Instant>,
    left_out: u64,
}

impl Told {
    /// How many had no line since the last, if this one is due for one.
    fn due(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.duration_since(last) < EVERY) {
            self.left_out += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

impl Audit {
    /// A request was refused. The client is absent where the request does not say whose it is.
    pub(crate) fn request(&self, refusal: Refusal, client: Option<&str>, address: IpAddr) {
        if let Some(left_out) = self.due(refusal) {
            tracing::info!(client, %address, reason = refusal.reason(), left_out, "a request is refused");
        }
    }

    /// A connection was closed at once.
    pub(crate) fn connection(&self, refusal: Refusal, address: IpAddr) {
        if let Some(left_out) = self.due(refusal) {
            tracing::info!(%address, reason = refusal.reason(), left_out, "an HTTP connection is refused");
        }
    }

    fn due(&self, refusal: Refusal) -> Option<u64> {
        self.0.lock().get_mut(refusal as usize)?.due(clock::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_has_a_line_a_second_and_the_others_are_counted() {
        let (mut told, now) = (Told::default(), clock::now());
        assert_eq!(told.due(now), Some(0));
        assert_eq!((told.due(now), told.due(now + EVERY / 2)), (None, None));
        assert_eq!(told.due(now + EVERY), Some(2));
        assert_eq!(told.due(now + EVERY * 2), Some(0));
    }

    #[test]
    fn reasons_are_counted_apart() {
        let audit = Audit::default();
        for refusal in [Refusal::Host, Refusal::WrongKey, Refusal::Connections] {
            assert_eq!(audit.due(refusal), Some(0));
            assert_eq!(audit.due(refusal), None);
        }
    }
}
