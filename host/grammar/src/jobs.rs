//! The queue of grammars to compile, and the cache of those that were compiled.
//!
//! ```text
//!            its client's turn         the thread ends
//! Waiting ───────────────────► Compiling ───────────► Done ─► cache
//!    └ every request for it was dropped: forgotten
//! ```
//!
//! A grammar that several clients ask for is one job. It waits in the queue of each client, and is compiled at the first turn of any of
//! them. So no client waits behind the grammars of another.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::cache::{Cache, Outcome};
use crate::queue::Queue;
use crate::source::Source;
use crate::{GrammarError, Limits};

/// Size of the stack of a compiling thread: the engine recurses with the depth of a grammar. Untouched pages of it take no memory.
const STACK: usize = 64 << 20;

/// Compiles one grammar, on a thread of its own.
type Compile = Box<dyn Fn(&Source) -> Outcome + Send + Sync>;

/// Starts a thread for one grammar.
type Spawn = fn(Box<dyn FnOnce() + Send>) -> std::io::Result<()>;

fn on_a_thread(work: Box<dyn FnOnce() + Send>) -> std::io::Result<()> {
    std::thread::Builder::new().name("grammar".into()).stack_size(STACK).spawn(work).map(drop)
}

/// All grammars that wait or are compiled, and the cache.
pub(crate) struct Jobs {
    compile: Compile,
    spawn: Spawn,
    limits: Limits,
    state: Mutex<State>,
}

struct State {
    cache: Cache,
    /// Jobs that wait or are being compiled.
    under_way: HashMap<Source, Arc<Job>>,
    queue: Queue<Arc<Job>>,
}

/// A grammar to compile. All requests for it subscribe to its progress.
struct Job {
    source: Source,
    progress: watch::Sender<Progress>,
}

#[derive(Debug)]
enum Progress {
    Waiting,
    Compiling,
    Done(Outcome),
}

/// A request for a grammar. Dropping it gives up the wait.
#[derive(Debug)]
pub struct Asked(Answer);

#[derive(Debug)]
enum Answer {
    Known(Outcome),
    Later { progress: watch::Receiver<Progress>, kind: &'static str, limits: Limits },
}

impl std::fmt::Debug for Jobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let under_way = self.state.lock().under_way.len();
        f.debug_struct("Jobs").field("limits", &self.limits).field("under_way", &under_way).finish()
    }
}

impl Job {
    /// Whether it has not begun and a request still waits for it.
    fn waits(&self) -> bool {
        self.progress.receiver_count() > 0 && matches!(*self.progress.borrow(), Progress::Waiting)
    }
}

impl Jobs {
    pub(crate) fn new(compile: Compile, limits: Limits) -> Arc<Self> {
        Self::on(on_a_thread, compile, limits)
    }

    fn on(spawn: Spawn, compile: Compile, limits: Limits) -> Arc<Self> {
        let state = State {
            cache: Cache::new(limits.kept, limits.kept_bytes),
            under_way: HashMap::new(),
            queue: Queue::new(limits.compiling, limits.compiling_of_a_client),
        };
        Arc::new(Self { compile, spawn, limits, state: Mutex::new(state) })
    }

    /// Asks for a grammar on behalf of a client.
    ///
    /// # Errors
    /// When the client waits with too many.
    pub(crate) fn ask(self: &Arc<Self>, client: u64, source: &Source) -> Result<Asked, GrammarError> {
        let limits = self.limits;
        let answer = {
            let mut state = self.state.lock();
            match state.cache.find(source) {
                Some(outcome) => Answer::Known(outcome),
                None => {
                    let progress = state.follow(client, source, limits.waiting_of_a_client)?;
                    Answer::Later { progress, kind: source.kind.noun(), limits }
                }
            }
        };
        self.start();
        Ok(Asked(answer))
    }

    /// Whether a grammar is in the cache, waits or is being compiled.
    pub(crate) fn knows(&self, source: &Source) -> bool {
        let state = self.state.lock();
        state.cache.holds(source) || state.under_way.contains_key(source)
    }

    /// Grammars in the queues of all clients.
    pub(crate) fn waiting(&self) -> usize {
        self.state.lock().queue.waiting()
    }

    /// Starts all jobs whose turn has come.
    fn start(self: &Arc<Self>) {
        loop {
            let next = self.state.lock().next();
            let Some((client, job)) = next else { return };
            let (jobs, of_thread) = (Arc::clone(self), Arc::clone(&job));
            let kind = job.source.kind.noun();
            let started = (self.spawn)(Box::new(move || {
                let outcome = catch_unwind(AssertUnwindSafe(|| (jobs.compile)(&of_thread.source)));
                let gave_up =
                    |_panic| GrammarError::Compile { kind, reason: "the engine gave it up".to_owned() };
                jobs.end(client, &of_thread, outcome.map_err(gave_up));
                jobs.start();
            }));
            if let Err(error) = started {
                let reason = format!("no thread to compile it on: {error}");
                self.end(client, &job, Err(GrammarError::Unable { kind, reason }));
            }
        }
    }

    /// Ends a job and tells all requests for it. Caches the outcome, unless the engine itself failed.
    fn end(&self, client: u64, job: &Job, outcome: Result<Outcome, GrammarError>) {
        let mut state = self.state.lock();
        state.queue.end(client);
        state.under_way.remove(&job.source);
        let outcome = match outcome {
            Ok(outcome) => {
                state.cache.keep(client, job.source.clone(), outcome.clone());
                outcome
            }
            Err(failed) => Err(failed),
        };
        job.progress.send_replace(Progress::Done(outcome));
    }
}

impl State {
    /// Subscribes to a grammar that the cache does not have. Queues it for the client unless it is being compiled already.
    fn follow(
        &mut self,
        client: u64,
        source: &Source,
        most: usize,
    ) -> Result<watch::Receiver<Progress>, GrammarError> {
        let found = self.under_way.get(source).map(Arc::clone);
        let job = found.unwrap_or_else(|| {
            let progress = watch::Sender::new(Progress::Waiting);
            Arc::new(Job { source: source.clone(), progress })
        });
        let receiver = job.progress.subscribe();
        if !job.waits() || self.queue.of(client).any(|other| Arc::ptr_eq(other, &job)) {
            return Ok(receiver);
        }
        if self.queue.of(client).len() >= most {
            self.forget_abandoned();
        }
        if self.queue.of(client).len() >= most {
            return Err(GrammarError::Busy(most));
        }
        self.under_way.entry(source.clone()).or_insert_with(|| Arc::clone(&job));
        self.queue.push(client, job);
        Ok(receiver)
    }

    /// The job whose turn it is, and the client that has the turn.
    fn next(&mut self) -> Option<(u64, Arc<Job>)> {
        loop {
            let (client, job) = self.queue.next()?;
            if job.waits() {
                job.progress.send_replace(Progress::Compiling);
                return Some((client, job));
            }
            self.queue.end(client);
            self.forget_abandoned();
        }
    }

    /// Forgets waiting jobs that no request wants any more, and places in queues of jobs that have begun.
    fn forget_abandoned(&mut self) {
        self.queue.retain(|job| job.waits());
        self.under_way.retain(|_, job| job.waits() || !matches!(*job.progress.borrow(), Progress::Waiting));
    }
}

impl Asked {
    /// Waits for the outcome. The limits on waiting count from this call.
    ///
    /// # Errors
    /// When the grammar is refused or invalid, when compiling takes too long, and when its turn does not come in time.
    pub async fn outcome(self) -> Outcome {
        let (mut progress, kind, limits) = match self.0 {
            Answer::Known(outcome) => return outcome,
            Answer::Later { progress, kind, limits } => (progress, kind, limits),
        };
        let begun = progress.wait_for(|now| !matches!(now, Progress::Waiting));
        if timeout(limits.wait, begun).await.is_err() {
            return Err(GrammarError::Waited { kind, seconds: limits.wait.as_secs() });
        }
        let done = progress.wait_for(|now| matches!(now, Progress::Done(_)));
        let Ok(done) = timeout(limits.compile_time, done).await else {
            return Err(GrammarError::Slow { kind, seconds: limits.compile_time.as_secs() });
        };
        match done.as_deref() {
            Ok(Progress::Done(outcome)) => outcome.clone(),
            _ => Err(GrammarError::Unable { kind, reason: "this process ends".to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use futures_util::FutureExt;

    use super::*;

    /// Jobs of which each ends when the test says so, refused with its own text. Begun ones are told in their order.
    fn gated(limits: Limits) -> (Arc<Jobs>, mpsc::Receiver<(String, mpsc::Sender<()>)>) {
        let (begun, all_begun) = mpsc::channel();
        let compile = move |source: &Source| {
            let (open, opened) = mpsc::channel();
            begun.send((source.text.clone(), open)).unwrap();
            // When the test has ended, the gate is open, too.
            let _closed = opened.recv().is_err();
            Err(GrammarError::Refused(source.text.clone()))
        };
        (Jobs::new(Box::new(compile), limits), all_begun)
    }

    fn ask(jobs: &Arc<Jobs>, client: u64, name: &str) -> Result<Asked, GrammarError> {
        jobs.ask(client, &Source::regex(name))
    }

    fn said(outcome: Outcome) -> String {
        outcome.err().unwrap().to_string()
    }

    #[tokio::test]
    async fn a_client_that_waits_with_many_keeps_no_other_waiting() {
        let (jobs, begun) = gated(Limits::default());
        let many: Vec<Asked> =
            (0..100).map(|number| ask(&jobs, 1, &format!("many {number}")).unwrap()).collect();
        let first: Vec<_> = begun.iter().take(2).collect();
        let one = ask(&jobs, 2, "one").unwrap();
        let (name, open) = begun.recv().unwrap();
        assert_eq!(name, "one", "none of the first client's has ended");
        open.send(()).unwrap();
        assert_eq!(said(one.outcome().await), "one");
        assert!(begun.try_recv().is_err(), "the first client has no more places");
        assert_eq!(said(ask(&jobs, 2, "one").unwrap().outcome().now_or_never().unwrap()), "one", "kept");
        drop((first, many));
    }

    #[tokio::test]
    async fn one_grammar_of_several_clients_is_compiled_once_in_the_first_turn_that_comes() {
        let limits = Limits { compiling: 1, ..Limits::default() };
        let (jobs, begun) = gated(limits);
        let running = ask(&jobs, 9, "running").unwrap();
        let (_, open) = begun.recv().unwrap();
        let queued: Vec<_> = ["a", "b", "shared"].map(|name| ask(&jobs, 1, name).unwrap()).into();
        let shared: Vec<_> = [2, 2, 3].map(|client| ask(&jobs, client, "shared").unwrap()).into();
        open.send(()).unwrap();
        drop(running);
        let mut order = Vec::new();
        for _ in 0..3 {
            let (name, open) = begun.recv().unwrap();
            order.push(name);
            open.send(()).unwrap();
        }
        assert_eq!(order, ["a", "shared", "b"]);
        for asked in shared {
            assert_eq!(said(asked.outcome().await), "shared");
        }
        for (asked, name) in queued.into_iter().zip(["a", "b", "shared"]) {
            assert_eq!(said(asked.outcome().await), name);
        }
        assert!(begun.try_recv().is_err());
        assert!(jobs.state.lock().under_way.is_empty());
    }

    #[tokio::test]
    async fn what_is_abandoned_is_not_compiled_and_takes_no_memory() {
        let limits = Limits { compiling: 1, waiting_of_a_client: 8, ..Limits::default() };
        let (jobs, begun) = gated(limits);
        let running = ask(&jobs, 1, "running").unwrap();
        let (_, open) = begun.recv().unwrap();
        for number in 0..1000 {
            drop(ask(&jobs, 1, &format!("abandoned {number}")).unwrap());
        }
        let state = || {
            let state = jobs.state.lock();
            (state.under_way.len(), state.queue.of(1).len())
        };
        assert!(state().0 <= 9 && state().1 <= 8, "{:?}", state());
        let waiting: Vec<_> =
            (0..8).map(|number| ask(&jobs, 1, &format!("waits {number}")).unwrap()).collect();
        let refused = ask(&jobs, 1, "one more").unwrap_err();
        assert_eq!(refused, GrammarError::Busy(8));
        assert!(ask(&jobs, 2, "another's").is_ok());
        drop(waiting);
        open.send(()).unwrap();
        assert_eq!(said(running.outcome().await), "running");
        let last = ask(&jobs, 1, "last").unwrap();
        let (name, open) = begun.recv().unwrap();
        assert_eq!(name, "last");
        open.send(()).unwrap();
        assert_eq!(said(last.outcome().await), "last");
        assert_eq!(state(), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn waits_have_an_end_and_what_takes_too_long_keeps_its_place_until_it_ends() {
        let limits = Limits { compiling: 1, ..Limits::default() };
        let (jobs, begun) = gated(limits);
        let slow = ask(&jobs, 1, "slow").unwrap();
        let (_, open) = begun.recv().unwrap();
        let error = slow.outcome().await.err().unwrap();
        assert_eq!(error, GrammarError::Slow { kind: "regular expression", seconds: 10 });
        let error = ask(&jobs, 2, "waits").unwrap().outcome().await.err().unwrap();
        assert_eq!(error, GrammarError::Waited { kind: "regular expression", seconds: 30 });
        assert!(begun.try_recv().is_err());
        let waits = ask(&jobs, 2, "waits again").unwrap();
        tokio::time::resume();
        open.send(()).unwrap();
        let (name, open) = begun.recv().unwrap();
        assert_eq!(name, "waits again");
        open.send(()).unwrap();
        assert_eq!(said(waits.outcome().await), "waits again");
    }

    #[tokio::test]
    async fn a_grammar_without_a_thread_is_not_called_wrong_and_not_remembered() {
        let refused = || Box::new(|_: &Source| Err(GrammarError::Refused("well".into())));
        let none = |_work: Box<dyn FnOnce() + Send>| Err(std::io::ErrorKind::WouldBlock.into());
        let jobs = Jobs::on(none, refused(), Limits::default());
        let asked = ask(&jobs, 1, "one").unwrap();
        let error = asked.outcome().await.err().unwrap();
        assert!(matches!(error, GrammarError::Unable { .. }), "{error}");
        assert!(!jobs.knows(&Source::regex("one")));
        let ended = {
            let jobs = Jobs::on(|_work| Ok(()), refused(), Limits::default());
            ask(&jobs, 1, "one").unwrap()
        };
        let error = ended.outcome().await.err().unwrap();
        assert!(matches!(error, GrammarError::Unable { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_panic_ends_its_own_grammar_alone() {
        let compile = |source: &Source| match source.text.as_str() {
            "bad" => panic!("a fault of the engine"),
            _ => Err(GrammarError::Refused("well".into())),
        };
        let limits = Limits { compiling: 1, ..Limits::default() };
        let jobs = Jobs::new(Box::new(compile), limits);
        let error = said(ask(&jobs, 1, "bad").unwrap().outcome().await);
        assert!(error.contains("the engine gave it up"), "{error}");
        assert_eq!(said(ask(&jobs, 1, "good").unwrap().outcome().await), "well");
    }
}
