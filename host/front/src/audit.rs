//! The audit log: refused clients with the reasons. Its rate is limited, so that no client can fill a disk with it.
//!
//! A line has the reason in this server's words, the client and its address. Of the request it has the path and the id, and
//! nothing else of the headers or the body.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use host_wire::audit::AUDIT;
use host_wire::clock;
use host_wire::log_rate::LogRate;
use parking_lot::Mutex;

/// Shortest time between two lines with the same reason.
const EVERY: Duration = Duration::from_secs(1);

/// Why a request or a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The request is addressed to a name that is not this server's.
    Host,
    /// A web page of another origin sent the request.
    Origin,
    /// The body of the request is not JSON.
    ContentType,
    /// The request has no key.
    NoKey,
    /// The key of the request is not one of this server's.
    WrongKey,
    /// The gateway names no tenant.
    NoTenant,
    /// The request is for operators, and the caller is none.
    NotOperator,
    /// The request is for processes of this machine only.
    NotLocal,
    /// The client already has its share of the requests, or as many as its key allows.
    Requests,
    /// The server already has as many requests as it takes.
    AllRequests,
    /// The client already has its share of the bodies that are being received.
    Uploads,
    /// There is no room for another body.
    AllUploads,
    /// The client already has its share of the text that waits.
    Text,
    /// No more text may wait.
    AllText,
    /// As many grammars of the client as allowed already wait to be compiled.
    Grammars,
    /// Grammars of other clients take too long to compile.
    AllGrammars,
    /// The client already has its share of the answers that are not read.
    Answers,
    /// No more answers may wait.
    AllAnswers,
    /// The client already has its share of the connections.
    Connections,
    /// Its address already has its share of the HTTP/2 streams.
    Streams,
}

/// The number of reasons: the index of the last variant, plus 1.
const REASONS: usize = Refusal::Streams as usize + 1;

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
            Self::Streams => "the share of HTTP/2 streams that an address has",
        }
    }
}

/// Writes the lines of the audit log. All listeners of a router share one.
#[derive(Clone, Debug)]
pub(crate) struct Audit(Arc<Mutex<[LogRate; REASONS]>>);

impl Default for Audit {
    fn default() -> Self {
        Self(Arc::new(Mutex::new([LogRate::one_in(EVERY); REASONS])))
    }
}

impl Audit {
    /// Logs that a request was refused. `client` is absent where the request does not say which client sent it.
    pub(crate) fn request(&self, refusal: Refusal, client: Option<&str>, address: IpAddr) {
        if let Some(left_out) = self.due(refusal) {
            tracing::info!(target: AUDIT, client, %address, reason = refusal.reason(), left_out, "a request is refused");
        }
    }

    /// Logs that a connection, or a stream of one, was closed at once.
    pub(crate) fn connection(&self, refusal: Refusal, address: IpAddr) {
        if let Some(left_out) = self.due(refusal) {
            tracing::info!(target: AUDIT, %address, reason = refusal.reason(), left_out, "an HTTP connection is refused");
        }
    }

    fn due(&self, refusal: Refusal) -> Option<u64> {
        self.0.lock().get_mut(refusal as usize)?.line(clock::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_counted_apart() {
        let audit = Audit::default();
        for refusal in [Refusal::Host, Refusal::WrongKey, Refusal::Connections] {
            assert_eq!(audit.due(refusal), Some(0));
            assert_eq!(audit.due(refusal), None);
        }
    }
}
