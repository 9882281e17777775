//! The handle through which a running worker is used.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use host_core::hierarchy::TierStats;
use host_core::radix::PageHash;
use host_core::request::{Failure, FailureCode, Request};
use host_core::scheduler::{Flushed, Stats};
use host_core::{Event, Instance, Room};
use host_grammar::{GrammarError, Kind};
use host_wire::Answer;
use host_wire::proto::WorkerInfo;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::cache_thread::CacheLog;
use super::channels::Input;
use super::grammars::{Followed, Grammars, Under};
use super::link::Links;
use super::tier_thread::Traffic;

/// The storage tiers' names, and their counters as of the scheduler's last turn.
#[derive(Debug, Default)]
pub(crate) struct Tiers {
    pub(super) names: Vec<String>,
    pub(super) stats: Mutex<Vec<TierStats>>,
    /// Bytes between the pools and host memory, and between host memory and each tier.
    pub(super) copied: Arc<Traffic>,
    pub(super) stored: Vec<Arc<Traffic>>,
}

/// Pages that one storage tier has not got, or has not confirmed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unwritten {
    /// Its plugin's name.
    pub tier: String,
    /// The number of pages.
    pub pages: usize,
}

/// Calls for answers, from before their requests are submitted until the last of their answers is taken.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// All of them.
    open: AtomicUsize,
    /// Those whose requests are on their way to the scheduler.
    submitting: AtomicUsize,
    /// No more requests are submitted.
    closed: AtomicBool,
}

impl Calls {
    async fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        while self.submitting.load(Ordering::SeqCst) > 0 {
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// A call for an answer. It counts as under way until it is dropped.
#[derive(Debug)]
pub struct Call(Arc<Calls>);

impl Drop for Call {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A request on its way to the scheduler.
struct Submitting<'a>(&'a Calls);

impl<'a> Submitting<'a> {
    /// `None` when no more requests are submitted. A request that is counted before that is seen by [`Handle::close`].
    fn begin(calls: &'a Calls) -> Option<Self> {
        calls.submitting.fetch_add(1, Ordering::SeqCst);
        let submitting = Self(calls);
        (!calls.closed.load(Ordering::SeqCst)).then_some(submitting)
    }
}

impl Drop for Submitting<'_> {
    fn drop(&mut self) {
        self.0.submitting.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A handle to a running worker, for any thread or task.
#[derive(Clone)]
pub struct Handle {
    pub(super) inputs: mpsc::Sender<Input>,
    pub(super) stats: Arc<Mutex<Stats>>,
    pub(super) tiers: Arc<Tiers>,
    pub(super) links: Arc<Links>,
    pub(super) cache: Option<Arc<CacheLog>>,
    pub(super) info: Arc<WorkerInfo>,
    pub(super) instance: Instance,
    pub(super) page_bytes: u64,
    /// Names prompts' pages for the offload tiers, if the worker has any.
    pub(super) naming: Option<Naming>,
    pub(super) grammars: Option<Arc<Grammars>>,
    pub(super) calls: Arc<Calls>,
}

/// Inputs of page names, beside the prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Naming {
    pub identity: PageHash,
    pub page_tokens: u32,
}

/// Time between two looks at what a worker that ends waits for.
const LOOK: Duration = Duration::from_millis(20);

/// Prompts of up to so many tokens are named on the caller's thread, which takes less time than a change of threads.
const NAMED_AT_ONCE: usize = 2048;

impl Handle {
    /// The description of this worker for others. The server that listens adds the address.
    #[must_use]
    pub fn info(&self) -> &WorkerInfo {
        &self.info
    }

    /// The instance that this process is.
    #[must_use]
    pub fn instance(&self) -> Instance {
        self.instance
    }

    /// Bytes of a KV page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Connections to other workers' memory.
    #[must_use]
    pub fn links(&self) -> &Arc<Links> {
        &self.links
    }

    /// The log of the radix cache's events, if the worker keeps one.
    #[must_use]
    pub fn cache(&self) -> Option<&Arc<CacheLog>> {
        self.cache.as_ref()
    }

    /// The scheduler's counters, as of its last turn.
    #[must_use]
    pub fn stats(&self) -> Stats {
        *self.stats.lock()
    }

    /// The storage tiers' names and counters, as of the scheduler's last turn.
    #[must_use]
    pub fn tiers(&self) -> Vec<(String, TierStats)> {
        let stats = self.tiers.stats.lock();
        self.tiers.names.iter().cloned().zip(stats.iter().copied()).collect()
    }

    /// Bytes that were copied from host memory to the pools, and from the pools to host memory.
    #[must_use]
    pub fn copied_bytes(&self) -> (u64, u64) {
        self.tiers.copied.up_and_down()
    }

    /// Bytes that were read from each storage tier, and that were written to it, by its name.
    #[must_use]
    pub fn stored_bytes(&self) -> Vec<(&str, (u64, u64))> {
        let stored = self.tiers.stored.iter().map(|traffic| traffic.up_and_down());
        self.tiers.names.iter().map(String::as_str).zip(stored).collect()
    }

    /// Pages on their way to each storage tier, as of the scheduler's last turn.
    #[must_use]
    pub fn unwritten(&self) -> Vec<Unwritten> {
        // Pages on their way to host memory go to all tiers from there.
        let saved = self.stats().hierarchy.host.filling;
        let of =
            |(tier, stats): (String, TierStats)| Unwritten { tier, pages: saved + stats.writes_under_way };
        self.tiers().into_iter().map(of).collect()
    }

    /// Counts a call for an answer, from before its request is submitted until the last of its answer is taken.
    #[must_use]
    pub fn call(&self) -> Call {
        self.calls.open.fetch_add(1, Ordering::SeqCst);
        Call(self.calls.clone())
    }

    /// Calls for answers that are under way. Their requests may not have reached the scheduler yet, or have ended there while
    /// the caller has not read all of the answer.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.calls.open.load(Ordering::SeqCst)
    }

    /// Refuses requests from now on, and returns when those that came before are with the scheduler. Their grammars may have to be
    /// compiled before.
    pub async fn close(&self) {
        self.calls.close().await;
    }

    /// Submits a request. The answer ends with [`Answer::Finished`] or [`Answer::Failed`]. A channel that closes without
    /// either means that the worker stopped.
    pub async fn submit(&self, request: Request) -> mpsc::UnboundedReceiver<Answer> {
        self.submit_under(request, None).await
    }

    /// Like [`submit`](Self::submit), for a request whose answer follows a grammar.
    pub async fn submit_under(
        &self,
        request: Request,
        under: Option<Under>,
    ) -> mpsc::UnboundedReceiver<Answer> {
        let (answers, receive) = mpsc::unbounded_channel();
        let Some(_submitting) = Submitting::begin(&self.calls) else {
            let failure = Failure::new(FailureCode::ShuttingDown, "the worker is shutting down");
            // The caller gets the receiver, so this cannot fail.
            let _gone = answers.send(Answer::Failed(failure)).is_err();
            return receive;
        };
        let (request, followed) = match self.followed(request, under).await {
            Some(Ok(followed)) => followed,
            Some(Err(failure)) => {
                // The caller gets the receiver, so this cannot fail.
                let _gone = answers.send(Answer::Failed(failure)).is_err();
                return receive;
            }
            None => return receive,
        };
        let Some(request) = self.named(request).await else {
            tracing::debug!("a request came while the process was ending");
            return receive;
        };
        if self.inputs.send(Input::Submit(request, answers, followed)).await.is_err() {
            tracing::debug!("a request came after the scheduler had stopped");
        }
        receive
    }

    /// The request, and its place in its grammar if it has one. `None` when the runtime is being shut down.
    async fn followed(
        &self,
        request: Request,
        under: Option<Under>,
    ) -> Option<Result<(Request, Option<Arc<Followed>>), Failure>> {
        let Some(under) = under else { return Some(Ok((request, None))) };
        let Some(grammars) = self.grammars.clone() else {
            let reason = "this worker takes no grammars: it computes without a model's vocabulary";
            return Some(Err(Failure::new(FailureCode::Invalid, reason)));
        };
        // The router has compiled grammars of all other kinds before it called this worker. So if one of these is slow, the worker is.
        let was_compiled = under.source.kind != Kind::Lark;
        Some(match grammars.follow(request, under).await? {
            Ok((request, followed)) => Ok((request, Some(followed))),
            Err(error) => {
                let code = match error {
                    GrammarError::Busy(_) | GrammarError::Waited { .. } => FailureCode::Busy,
                    GrammarError::Unable { .. } => FailureCode::Unable,
                    GrammarError::Slow { .. } if was_compiled => FailureCode::Busy,
                    _ => FailureCode::Invalid,
                };
                Err(Failure::new(code, error.to_string()))
            }
        })
    }

    /// Adds the names of a request's pages, if the scheduler will ask for them. All requests wait for the scheduler's
    /// thread, so it does not name pages itself. `None` when the runtime is being shut down.
    async fn named(&self, mut request: Request) -> Option<Request> {
        // A prompt that is too long is not named: the request is refused.
        let named = |_: &Naming| !request.no_cache && request.prompt.len() <= self.info.max_tokens as usize;
        let Some(Naming { identity, page_tokens }) = self.naming.filter(named) else { return Some(request) };
        if request.prompt.len() <= NAMED_AT_ONCE {
            request.name(&identity, page_tokens);
            return Some(request);
        }
        let named = tokio::task::spawn_blocking(move || {
            request.name(&identity, page_tokens);
            request
        });
        named.await.ok()
    }

    /// Empties the radix cache, if the worker keeps one. `None` when the worker has stopped.
    pub async fn flush_cache(&self) -> Option<Option<Flushed>> {
        let (flushed, receive) = oneshot::channel();
        self.inputs.send(Input::FlushCache(flushed)).await.ok()?;
        receive.await.ok()
    }

    /// Cancels a request. This has no effect if it has ended.
    pub async fn cancel(&self, room: Room) {
        self.event(Event::Cancel(room)).await;
    }

    /// Ends an answer that is complete. This has no effect if the request has ended.
    pub async fn end_answer(&self, room: Room) {
        self.event(Event::EndAnswer(room)).await;
    }

    /// Passes an event to the scheduler. Waits while the scheduler's inbox is full.
    pub async fn event(&self, event: Event) {
        if self.inputs.send(Input::Event(event)).await.is_err() {
            tracing::debug!("an event came after the scheduler had stopped");
        }
    }

    /// Passes an event to the scheduler if there is room. Returns false when the event was dropped.
    #[must_use]
    pub fn try_event(&self, event: Event) -> bool {
        self.inputs.try_send(Input::Event(event)).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_request_that_came_before_the_close_is_waited_for_and_later_ones_are_refused() {
        let calls = Calls::default();
        let early = Submitting::begin(&calls).expect("nothing is closed");
        let mut close = std::pin::pin!(calls.close());
        assert!(close.as_mut().now_or_never().is_none(), "it does not wait");
        assert!(Submitting::begin(&calls).is_none());
        drop(early);
        close.await;
        assert!(Submitting::begin(&calls).is_none());
        assert_eq!(calls.submitting.load(Ordering::SeqCst), 0);
    }
}
