//! Masks of requests, worked out by threads that clients share fairly.
//!
//! ```text
//! batch ─► waiting parts of a room ─► client's turn ─► thread: consume, mask ─► known ─► draw
//! ```
//!
//! A room has one turn at a time, in which all of its parts are worked off in their order. No lock that the executor
//! takes is held while a mask is worked out.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::Duration;

use host_core::request::Request;
use host_grammar::{Compiled, GrammarError, Mask, Queue, State};
use parking_lot::{Condvar, Mutex};

use super::lexers::{Lexer, Lexers};

/// The most threads that work out masks for one client.
const THREADS: usize = 4;

/// The mask behind a sequence's last token. `None` when it could not be worked out.
type Known = Option<Result<Mask, GrammarError>>;

/// The threads that work out masks.
#[derive(Debug)]
pub(super) struct MaskThreads {
    pool: rayon::ThreadPool,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// Rooms that wait for their turn. The queue does not keep a room that has ended.
    queue: Mutex<Queue<Weak<Followed>>>,
    /// How many times a room was worked off.
    done: Mutex<u64>,
    one_more: Condvar,
}

impl MaskThreads {
    /// Starts one thread for each core, four at most, and one more. A client with many rooms leaves one of them to
    /// others.
    pub(super) fn new() -> Result<Self, rayon::ThreadPoolBuildError> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let of_a_client = THREADS.min(cores);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(of_a_client + 1)
            .thread_name(|index| format!("grammar-{index}"))
            .build()?;
        let queue = Mutex::new(Queue::new(of_a_client + 1, of_a_client));
        Ok(Self {
            pool,
            shared: Arc::new(Shared { queue, done: Mutex::default(), one_more: Condvar::new() }),
        })
    }

    /// Queues one more part of a room. Does not wait.
    pub(super) fn work(&self, followed: &Arc<Followed>, part: BatchPart) {
        if !followed.take_part(part) {
            return;
        }
        let begun = {
            let mut queue = self.shared.queue.lock();
            queue.push(followed.client, Arc::downgrade(followed));
            queue.next()
        };
        if let Some(begun) = begun {
            let shared = Arc::clone(&self.shared);
            self.pool.spawn(move || shared.work_off(begun));
        }
    }

    /// Removes rooms that have ended from the queue.
    pub(super) fn forget_ended(&self) {
        self.shared.queue.lock().retain(|followed| followed.strong_count() > 0);
    }

    /// How many times a room was worked off, for [`wait`](Self::wait).
    pub(super) fn done(&self) -> u64 {
        *self.shared.done.lock()
    }

    /// Waits until a room was worked off since the count was `seen`, or for `most`. May return earlier.
    pub(super) fn wait(&self, seen: u64, most: Option<Duration>) {
        let mut done = self.shared.done.lock();
        if *done == seen {
            match most {
                None => self.shared.one_more.wait(&mut done),
                Some(most) => drop(self.shared.one_more.wait_for(&mut done, most)),
            }
        }
    }
}

impl Shared {
    /// Works on a room, and then on the rooms whose turns follow.
    fn work_off(&self, begun: (u64, Weak<Followed>)) {
        let mut next = Some(begun);
        while let Some((client, followed)) = next {
            if let Some(followed) = followed.upgrade() {
                // A fault of the engine ends the answer of its own request alone.
                if catch_unwind(AssertUnwindSafe(|| followed.work())).is_err() {
                    followed.give_up();
                }
                *self.done.lock() += 1;
                self.one_more.notify_all();
            }
            let mut queue = self.queue.lock();
            queue.end(client);
            next = queue.next();
        }
    }
}

/// One request's place in its grammar.
#[derive(Debug)]
pub struct Followed {
    client: u64,
    /// Held while a mask is worked out.
    progress: Mutex<Progress>,
    place: Mutex<RoomMask>,
}

/// The state of the grammar behind the tokens that were consumed.
#[derive(Debug)]
struct Progress {
    compiled: Arc<Compiled>,
    ends: Vec<u32>,
    /// Tokens of the answer that an earlier try drew.
    answered: Vec<u32>,
    /// Absent until the first part of the request is computed: requests that wait hold no lexer.
    state: Option<State>,
    lexer: Lexer,
    /// The position of the next token that is not consumed.
    next: usize,
}

/// The mask of a room, and the parts that are to be worked on.
#[derive(Debug, Default)]
struct RoomMask {
    /// The mask behind the last part.
    mask: Known,
    /// The position behind the last part, if a token is drawn there: its mask is known, or will be.
    draws_at: Option<usize>,
    /// Parts of batches that are not worked on yet, in their order.
    waiting: VecDeque<BatchPart>,
    /// Whether a thread works on the parts, or will.
    working: bool,
    /// Whether a step went on without the mask.
    late: bool,
    /// Whether the engine has failed, so that no more masks are worked out.
    broken: bool,
}

/// A sequence's part of a batch.
#[derive(Debug)]
pub(super) struct BatchPart {
    /// The position of its first token.
    pub(super) start: usize,
    pub(super) tokens: Vec<u32>,
    /// Whether a token is drawn behind it.
    pub(super) draws: bool,
}

/// Whether the mask behind a room's last part is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Looked {
    Known,
    /// Not yet. `late` says that an earlier step went on without it.
    Unknown {
        late: bool,
    },
}

impl Followed {
    /// Follows the answer so far, whose `answered` tokens are at the prompt's end.
    pub(super) fn begin(
        compiled: Arc<Compiled>,
        lexers: &Arc<Lexers>,
        request: &Request,
        answered: usize,
    ) -> Result<Arc<Self>, GrammarError> {
        let (lexer, next) = (lexers.of(request.client, &compiled)?, request.prompt.len());
        let ends = request.stop_tokens.clone();
        let answered = request.prompt[next.saturating_sub(answered)..].to_vec();
        if !answered.is_empty() {
            // Checked now, so that a request that cannot go on ends before anything is computed for it.
            replayed(&compiled, &ends, &answered)?;
        }
        let progress = Progress { compiled, ends, answered, state: None, lexer, next };
        Ok(Arc::new(Self { client: request.client, progress: Mutex::new(progress), place: Mutex::default() }))
    }

    /// Adds a part that is computed. Returns whether the room has to wait for a turn.
    fn take_part(&self, part: BatchPart) -> bool {
        let mut place = self.place.lock();
        let draws_at = part.draws.then(|| part.start.saturating_add(part.tokens.len()));
        // The part is computed again, because its mask was too late for the last draw.
        if place.broken || draws_at.is_some() && place.draws_at == draws_at {
            return false;
        }
        place.draws_at = draws_at;
        place.waiting.push_back(part);
        !std::mem::replace(&mut place.working, true)
    }

    /// Works on all waiting parts.
    fn work(&self) {
        loop {
            let part = {
                let mut place = self.place.lock();
                let Some(part) = place.waiting.pop_front() else {
                    place.working = false;
                    return;
                };
                part
            };
            let mask = self.progress.lock().go_on(&part);
            self.place.lock().mask = mask;
        }
    }

    fn give_up(&self) {
        *self.place.lock() = RoomMask { broken: true, ..RoomMask::default() };
    }

    /// Whether the mask is known.
    pub(super) fn look(&self) -> Looked {
        let place = self.place.lock();
        if place.working { Looked::Unknown { late: place.late } } else { Looked::Known }
    }

    /// Records that a step goes on without the mask.
    pub(super) fn mark_late(&self) {
        self.place.lock().late = true;
    }

    /// Takes the mask behind the last part.
    pub(super) fn take(&self) -> Known {
        let mut place = self.place.lock();
        (place.draws_at, place.late) = (None, false);
        place.mask.take()
    }
}

impl Progress {
    /// Consumes the tokens of a part. Returns the mask behind them if a token is drawn there.
    fn go_on(&mut self, part: &BatchPart) -> Known {
        let BatchPart { start, ref tokens, draws } = *part;
        let end = start + tokens.len();
        let next = self.next;
        self.next = next.max(end);
        let state = match self.state() {
            Ok(state) => state,
            Err(error) => return Some(Err(error)),
        };
        let consumed = match next.checked_sub(start) {
            // All or some of the tokens were consumed before.
            Some(before) => tokens.iter().skip(before).try_for_each(|token| state.consume(*token)),
            None => Err(GrammarError::Stuck(format!("tokens {next} to {start} of it are missing"))),
        };
        if let Err(error) = consumed {
            return Some(Err(error));
        }
        if !draws {
            return None;
        }
        let (mask, work) = (state.mask(), state.lexer());
        Some(mask.and_then(|mask| self.lexer.has(work).map(|()| mask)))
    }

    /// The state, which begins with the first call.
    fn state(&mut self) -> Result<&mut State, GrammarError> {
        match &mut self.state {
            Some(state) => Ok(state),
            none => {
                // Counted first: the copy takes memory.
                self.lexer.has(self.compiled.lexer())?;
                Ok(none.insert(replayed(&self.compiled, &self.ends, &self.answered)?))
            }
        }
    }
}

/// The state behind the tokens of an answer so far.
fn replayed(compiled: &Compiled, ends: &[u32], answered: &[u32]) -> Result<State, GrammarError> {
    let mut state = compiled.begin(ends.to_vec());
    answered.iter().try_for_each(|token| state.consume(*token))?;
    Ok(state)
}

#[cfg(test)]
impl Followed {
    /// Holds the room as a thread does that works out a mask.
    pub(super) fn in_work(&self) -> impl Drop + '_ {
        self.progress.lock()
    }
}

#[cfg(test)]
mod tests {
    use host_grammar::{Compiler, Limits, Source, Vocabulary};
    use host_tests::wait::poll_until;

    use super::*;

    /// A room of a client, whose answer is to be "ab".
    fn followed(compiler: &Compiler, client: u64) -> Arc<Followed> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let compiled = runtime.block_on(compiler.compile(client, &Source::regex("ab"))).unwrap();
        let request = Request { client, stop_tokens: vec![0], ..host_sim::request(1, &[120], 9) };
        Followed::begin(compiled, &Lexers::new(u64::MAX), &request, 0).unwrap()
    }

    fn compiler() -> Compiler {
        let hour = Duration::from_secs(3600);
        let limits = Limits { wait: hour, compile_time: hour, ..Limits::default() };
        Compiler::new(&Vocabulary::bytes(), limits).unwrap()
    }

    fn part(start: usize, tokens: &str) -> BatchPart {
        BatchPart { start, tokens: tokens.bytes().map(u32::from).collect(), draws: true }
    }

    fn allowed(known: Known) -> String {
        let mut logits = vec![0.0; 256];
        known.unwrap().unwrap().apply(&mut logits);
        let allowed = (0..=u8::MAX).filter(|letter| logits[usize::from(*letter)] == 0.0);
        allowed.map(char::from).collect()
    }

    /// Waits until a room is worked off.
    fn until_known(threads: &MaskThreads, followed: &Followed) {
        poll_until("a room to be worked off", || {
            let seen = threads.done();
            match followed.look() {
                Looked::Known => Ok(()),
                unknown => {
                    threads.wait(seen, Some(Duration::from_secs(1)));
                    Err(format!("{unknown:?} when {seen} were worked off"))
                }
            }
        });
    }

    /// As [`until_known`], and takes the mask.
    fn known(threads: &MaskThreads, followed: &Followed) -> Known {
        until_known(threads, followed);
        followed.take()
    }

    #[test]
    fn a_mask_that_is_known_or_under_way_is_not_worked_out_again() {
        let (threads, followed) = (MaskThreads::new().unwrap(), followed(&compiler(), 1));
        let in_work = followed.progress.lock();
        threads.work(&followed, part(0, "x"));
        followed.mark_late();
        for _step in 0..3 {
            threads.work(&followed, part(0, "x"));
            assert_eq!(followed.look(), Looked::Unknown { late: true });
        }
        assert!(followed.place.lock().waiting.len() <= 1, "one, if no thread has it yet");
        drop(in_work);
        until_known(&threads, &followed);
        threads.work(&followed, part(0, "x"));
        assert_eq!(followed.look(), Looked::Known, "no turn is needed for it");
        assert_eq!(allowed(followed.take()), "a");
        // Behind another token, and again when the same tokens are computed a second time.
        threads.work(&followed, part(1, "a"));
        assert_eq!(allowed(known(&threads, &followed)), "b");
        threads.work(&followed, BatchPart { draws: false, ..part(0, "x") });
        threads.work(&followed, part(1, "a"));
        assert_eq!(allowed(known(&threads, &followed)), "b");
    }

    #[test]
    fn a_client_with_many_rooms_leaves_a_thread_and_every_turn_beside_its_own_to_another() {
        let (threads, compiler) = (MaskThreads::new().unwrap(), compiler());
        let many: Vec<_> =
            (0..2 * threads.pool.current_num_threads()).map(|_| followed(&compiler, 1)).collect();
        // Rooms of the first client are held, so that none of them is worked off meanwhile.
        let held: Vec<_> = many.iter().map(|followed| followed.progress.lock()).collect();
        many.iter().for_each(|followed| threads.work(followed, part(0, "x")));
        for _again in 0..3 {
            let other = followed(&compiler, 2);
            threads.work(&other, part(0, "x"));
            assert_eq!(allowed(known(&threads, &other)), "a");
        }
        drop(held);
        many.iter().for_each(|followed| assert_eq!(allowed(known(&threads, followed)), "a"));
    }

    #[test]
    fn a_room_that_ended_is_gone_though_it_had_a_turn_to_come() {
        let (threads, compiler) = (MaskThreads::new().unwrap(), compiler());
        let many: Vec<_> =
            (0..2 * threads.pool.current_num_threads()).map(|_| followed(&compiler, 1)).collect();
        let held: Vec<_> = many.iter().map(|followed| followed.progress.lock()).collect();
        many.iter().for_each(|followed| threads.work(followed, part(0, "x")));
        let waiting = || threads.shared.queue.lock().of(1).len();
        let last = followed(&compiler, 1);
        threads.work(&last, part(0, "x"));
        let before = waiting();
        let gone = Arc::downgrade(&last);
        drop(last);
        threads.forget_ended();
        assert!(gone.upgrade().is_none());
        assert_eq!(waiting(), before - 1);
        drop(held);
    }

    #[test]
    fn a_fault_of_the_engine_ends_its_own_answer_for_good_and_no_other() {
        let (threads, compiler) = (MaskThreads::new().unwrap(), compiler());
        for _thread in 0..2 * threads.pool.current_num_threads() {
            let broken = followed(&compiler, 1);
            // More tokens than there can be.
            threads.work(&broken, part(usize::MAX, "x"));
            assert!(known(&threads, &broken).is_none());
            threads.work(&broken, part(0, "x"));
            assert_eq!(broken.look(), Looked::Known);
            assert!(broken.take().is_none(), "its state may be half of one");
        }
        let whole = followed(&compiler, 1);
        threads.work(&whole, part(0, "x"));
        assert_eq!(allowed(known(&threads, &whole)), "a");
    }
}
