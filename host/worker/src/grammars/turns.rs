//! Masks of requests, worked out by threads that clients share fairly.
//!
//! ```text
//! batch ─► waiting parts of a room ─► client's turn ─► thread: consume, mask ─► known ─► draw
//! ```
//!
//! A room has one turn at a time, in which all of its parts are worked off in their order. No lock is held while a mask is worked out
//! that the executor takes.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use host_core::request::Request;
use host_grammar::{Compiled, GrammarError, Mask, Queue, State};
use parking_lot::{Condvar, Mutex};

/// Most threads that work masks out.
const THREADS: usize = 4;

/// What may follow a sequence. `None` when it could not be worked out.
type Known = Option<Result<Mask, GrammarError>>;

/// The threads.
#[derive(Debug)]
pub(super) struct MaskThreads {
    pool: rayon::ThreadPool,
    queue: Arc<Mutex<Queue<Arc<Followed>>>>,
}

impl MaskThreads {
    /// As many as there are cores, and four at most.
    pub(super) fn new() -> Result<Self, rayon::ThreadPoolBuildError> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(THREADS.min(cores))
            .thread_name(|index| format!("grammar-{index}"))
            .build()?;
        let threads = pool.current_num_threads();
        // Masks are short, so a client that is alone has all threads.
        Ok(Self { pool, queue: Arc::new(Mutex::new(Queue::new(threads, threads))) })
    }

    /// A room has one more part to be worked on. Does not wait.
    pub(super) fn work(&self, followed: &Arc<Followed>, part: Part) {
        {
            let mut place = followed.place.lock();
            place.waiting.push_back(part);
            if std::mem::replace(&mut place.working, true) {
                return;
            }
        }
        let begun = {
            let mut queue = self.queue.lock();
            queue.push(followed.client, Arc::clone(followed));
            queue.next()
        };
        if let Some(begun) = begun {
            let queue = Arc::clone(&self.queue);
            self.pool.spawn(move || work_off(&queue, begun));
        }
    }
}

/// Works on a room, and then on those whose turn comes in its place.
fn work_off(queue: &Mutex<Queue<Arc<Followed>>>, begun: (u64, Arc<Followed>)) {
    let mut next = Some(begun);
    while let Some((client, followed)) = next {
        // A fault of the engine is that of its own request.
        if catch_unwind(AssertUnwindSafe(|| followed.work())).is_err() {
            followed.give_up();
        }
        let mut queue = queue.lock();
        queue.end(client);
        next = queue.next();
    }
}

/// One request's place in its grammar.
#[derive(Debug)]
pub struct Followed {
    client: u64,
    /// Held while a mask is worked out.
    progress: Mutex<Progress>,
    place: Mutex<Place>,
    known: Condvar,
}

/// Where its answer is.
#[derive(Debug)]
struct Progress {
    state: State,
    /// The position of the next token that is not consumed.
    next: usize,
}

/// What is known of it, and what is to be worked on.
#[derive(Debug, Default)]
struct Place {
    /// What may follow the last part.
    mask: Known,
    /// Parts of batches that are not worked on yet, in their order.
    waiting: VecDeque<Part>,
    /// A thread works on them, or will.
    working: bool,
}

/// A sequence's part of a batch.
#[derive(Debug)]
pub(super) struct Part {
    /// The position of its first token.
    pub(super) start: usize,
    pub(super) tokens: Vec<u32>,
    /// A token is drawn behind it.
    pub(super) draws: bool,
}

impl Followed {
    /// Where the answer is, of which so many tokens are at the prompt's end.
    pub(super) fn begin(
        compiled: &Compiled,
        request: &Request,
        answered: usize,
    ) -> Result<Arc<Self>, GrammarError> {
        let mut state = compiled.begin(request.stop_tokens.clone());
        let answer = request.prompt.len().saturating_sub(answered);
        for token in &request.prompt[answer..] {
            state.consume(*token)?;
        }
        Ok(Arc::new(Self {
            client: request.client,
            progress: Mutex::new(Progress { state, next: request.prompt.len() }),
            place: Mutex::default(),
            known: Condvar::new(),
        }))
    }

    /// Takes in what waits.
    fn work(&self) {
        loop {
            let (part, mask) = {
                let mut place = self.place.lock();
                let Some(part) = place.waiting.pop_front() else {
                    place.working = false;
                    self.known.notify_all();
                    return;
                };
                (part, place.mask.take())
            };
            let mask = self.progress.lock().go_on(&part, mask);
            self.place.lock().mask = mask;
        }
    }

    /// Nothing more is worked out for it.
    fn give_up(&self) {
        *self.place.lock() = Place::default();
        self.known.notify_all();
    }

    /// What may follow its last part, or `behind` it, a part that was drawn since. Waits for it as long as `left` says, without an end
    /// for `None`. `None` when that was not long enough.
    pub(super) fn mask(&self, behind: Option<&Part>, left: impl Fn() -> Option<Duration>) -> Option<Known> {
        let mut place = self.place.lock();
        while place.working {
            match left() {
                None => self.known.wait(&mut place),
                Some(Duration::ZERO) => return None,
                Some(left) => drop(self.known.wait_for(&mut place, left)),
            }
        }
        match behind {
            None => Some(place.mask.take()),
            Some(_) if left() == Some(Duration::ZERO) => None,
            // On this thread, which has nothing else to do until it is known.
            Some(part) => Some(self.progress.lock().go_on(part, None)),
        }
    }
}

impl Progress {
    /// These tokens are computed, and `mask` was known before. What may follow them is wanted if a token is drawn.
    fn go_on(&mut self, part: &Part, mask: Known) -> Known {
        let Part { start, ref tokens, draws } = *part;
        let end = start + tokens.len();
        // Computed again, because it came too late for the last draw.
        if draws && end == self.next && mask.is_some() {
            return mask;
        }
        let consumed = match self.next.checked_sub(start) {
            // Computed before, all or in part.
            Some(before) => tokens.iter().skip(before).try_for_each(|token| self.state.consume(*token)),
            None => Err(GrammarError::Stuck(format!("tokens {} to {start} of it are missing", self.next))),
        };
        self.next = self.next.max(end);
        match consumed {
            Err(error) => Some(Err(error)),
            Ok(()) => draws.then(|| self.state.mask()),
        }
    }
}

#[cfg(test)]
impl Followed {
    /// As if a thread were in the middle of a mask.
    pub(super) fn in_work(&self) -> impl Drop + '_ {
        self.progress.lock()
    }

    /// Waits until all is worked off.
    pub(super) fn wait(&self) {
        let mut place = self.place.lock();
        while place.working {
            self.known.wait(&mut place);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use host_core::{Room, Sampling};
    use host_grammar::{Compiler, Limits, Source, Vocabulary};

    use super::super::patience::{Patience, StepTime};
    use super::*;

    const NO_TIME: fn() -> Option<Duration> = || Some(Duration::ZERO);
    const ALL_TIME: fn() -> Option<Duration> = || None;

    /// A request of which only the prompt and the stop tokens matter.
    pub(in crate::grammars) fn request() -> Request {
        Request {
            room: Room(1),
            prompt: Vec::new(),
            max_new_tokens: 1,
            stop_tokens: Vec::new(),
            ignore_stop: false,
            answered: 0,
            priority: 0,
            client: 0,
            sampling: Sampling::GREEDY,
            prefill: None,
            namespace: host_core::radix::NamespaceKey::default(),
            no_cache: false,
            names: Vec::new(),
        }
    }

    /// A room of a client, whose answer is to be "ab".
    fn followed(compiler: &Compiler, client: u64) -> Arc<Followed> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let compiled = runtime.block_on(compiler.compile(client, &Source::regex("ab"))).unwrap();
        let request = Request { client, prompt: vec![120], stop_tokens: vec![0], ..request() };
        Followed::begin(&compiled, &request, 0).unwrap()
    }

    fn compiler() -> Compiler {
        Compiler::new(&Vocabulary::bytes(), Limits::default()).unwrap()
    }

    fn part(start: usize, tokens: &str) -> Part {
        Part { start, tokens: tokens.bytes().map(u32::from).collect(), draws: true }
    }

    fn allowed(known: Known) -> String {
        let mut logits = vec![0.0; 256];
        known.unwrap().unwrap().apply(&mut logits);
        let allowed = (0..=u8::MAX).filter(|letter| logits[usize::from(*letter)] == 0.0);
        allowed.map(char::from).collect()
    }

    #[test]
    fn a_mask_that_was_late_is_not_worked_out_again() {
        let followed = followed(&compiler(), 1);
        let mut progress = followed.progress.lock();
        let known = |text: &str| Some(Err(GrammarError::Stuck(text.to_owned())));
        let kept = progress.go_on(&part(0, "x"), known("kept"));
        assert!(matches!(kept, Some(Err(GrammarError::Stuck(text))) if text == "kept"));
        // It would be wrong behind another token.
        assert_eq!(allowed(progress.go_on(&part(1, "a"), known("old"))), "b");
        let unread = Part { draws: false, ..part(1, "a") };
        assert!(progress.go_on(&unread, known("old")).is_none());
    }

    #[test]
    fn a_client_with_many_rooms_leaves_every_second_turn_to_another() {
        let (threads, compiler) = (MaskThreads::new().unwrap(), compiler());
        let many: Vec<_> =
            (0..threads.pool.current_num_threads() + 5).map(|_| followed(&compiler, 1)).collect();
        // Each thread is busy with a room of the first client, and more wait.
        let mut held: Vec<_> = many.iter().map(|followed| followed.progress.lock()).collect();
        many.iter().for_each(|followed| threads.work(followed, part(0, "x")));
        let other = followed(&compiler, 2);
        threads.work(&other, part(0, "x"));
        // Two of them come to an end, and all others of that client would take for ever.
        drop(held.drain(..2));
        let bound = Duration::from_secs(60);
        let time = StepTime::new(Patience::AsLongAgain { least: bound, most: bound });
        let known = other.mask(None, || time.left()).expect("the other client waited for a minute in vain");
        assert_eq!(allowed(known), "a");
        drop(held);
        many.iter().for_each(|followed| assert_eq!(allowed(followed.mask(None, ALL_TIME).unwrap()), "a"));
    }

    #[test]
    fn a_fault_of_the_engine_ends_its_own_answer_alone() {
        let (threads, compiler) = (MaskThreads::new().unwrap(), compiler());
        for _thread in 0..threads.pool.current_num_threads() + 1 {
            let broken = followed(&compiler, 1);
            threads.work(&broken, part(usize::MAX, "x"));
            assert!(broken.mask(None, ALL_TIME).unwrap().is_none());
        }
        let whole = followed(&compiler, 1);
        threads.work(&whole, part(0, "x"));
        assert_eq!(allowed(whole.mask(None, ALL_TIME).unwrap()), "a");
        // Behind a drafted token it is worked out by the thread that draws, while the step has time.
        assert!(whole.mask(Some(&part(1, "a")), NO_TIME).is_none());
        assert_eq!(allowed(whole.mask(Some(&part(1, "a")), ALL_TIME).unwrap()), "b");
    }
}
