//! How a request can fail.

use host_wire::proto;

/// The failure that ended a request or a try, as a sentence for the client.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Failure {
    /// The prompt and the answer do not fit any worker.
    #[error("{}", too_long(*limit, *prompt, *answer, field))]
    TooLong {
        /// Tokens that the largest route holds.
        limit: u32,
        /// Tokens of the prompt.
        prompt: u64,
        /// Tokens of the answer that the request asks for, if it gives a number.
        answer: Option<u32>,
        /// The field in which the client gives that number.
        field: &'static str,
    },
    /// No worker has room for a prompt whose text is this long.
    #[error(
        "the model's context, as far as --max-model-len and the KV pools allow, holds {limit} tokens, but the prompt alone has at least {least}, which leaves no room for an answer; shorten the prompt"
    )]
    TooLongText {
        /// Tokens that the largest route holds.
        limit: u32,
        /// The least number of tokens of the prompt.
        least: u64,
    },
    /// A worker found the request wrong.
    #[error("{0}")]
    Refused(String),
    /// This router takes no more requests now.
    #[error("{0}")]
    Busy(String),
    /// This router takes no more requests of the client now.
    #[error("the client has as many requests under way as its share allows")]
    OverShare,
    /// No worker could serve the request in time. A later request may succeed.
    #[error("{0}")]
    Unavailable(String),
    /// The request took longer than the client's time limit.
    #[error("the request took longer than {} s, which its timeout allows", .0.as_secs_f64())]
    Late(std::time::Duration),
    /// A worker failed after the first token.
    #[error("the answer broke off: {0}")]
    Broken(String),
    /// A worker failed, and another try would too.
    #[error("{0}")]
    Internal(String),
}

fn too_long(limit: u32, prompt: u64, answer: Option<u32>, field: &str) -> String {
    match answer {
        Some(answer) => format!(
            "the model's context, as far as --max-model-len and the KV pools allow, holds {limit} tokens, but the prompt has {prompt} and {field} is {answer}, {} in all; shorten the prompt or lower {field}",
            prompt + u64::from(answer)
        ),
        None => format!(
            "the model's context, as far as --max-model-len and the KV pools allow, holds {limit} tokens, but the prompt alone has {prompt}, which leaves no room for an answer; shorten the prompt"
        ),
    }
}

impl Failure {
    /// Whether a new try may succeed.
    #[must_use]
    pub fn retryable(&self) -> bool {
        matches!(self, Failure::Unavailable(_))
    }

    /// The failure that a worker reported of its leg.
    pub(super) fn of_worker(worker: &str, failed: &proto::Failed) -> Self {
        let text = format!("worker {worker:?} failed: {} ({})", failed.message, failed.code);
        if failed.retryable {
            Failure::Unavailable(text)
        } else if failed.code.starts_with("invalid") {
            Failure::Refused(text)
        } else {
            Failure::Internal(text)
        }
    }

    /// The failure of a call, and whether the worker should be suspected for it.
    pub(super) fn of_call(worker: &str, status: &tonic::Status) -> (Self, bool) {
        use tonic::Code;
        let text = match status.code() {
            // The transport's message means nothing to a client, so it goes to the log.
            Code::Unknown | Code::Internal | Code::Cancelled => {
                tracing::debug!(worker, %status, "a call to a worker broke");
                format!("the connection to worker {worker:?} broke")
            }
            code => format!("call to worker {worker:?} failed: {} ({code})", status.message()),
        };
        match status.code() {
            Code::InvalidArgument | Code::OutOfRange => (Failure::Refused(text), false),
            Code::Unimplemented | Code::PermissionDenied | Code::Unauthenticated | Code::DataLoss => {
                (Failure::Internal(text), false)
            }
            // The worker answers, so it is alive. It only refuses this request now.
            Code::ResourceExhausted | Code::Aborted | Code::FailedPrecondition => {
                (Failure::Unavailable(text), false)
            }
            // The transport reports broken connections with one of the remaining codes.
            _ => (Failure::Unavailable(text), true),
        }
    }
}
