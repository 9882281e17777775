//! Grammars of requests: they are compiled when requests come in, and followed beside the steps.
//!
//! ```text
//! request ─► compile, replay ─► room ─► batch begins ─► threads: consume, mask ┐
//!            (in turns)                 │                                      ├─► logits ─► draw
//!                                       └────────────► forward pass ───────────┘
//! ```
//!
//! A room's place in its grammar follows from its tokens: answer tokens that came with the request, and tokens that the
//! executor gets in batches. A token that is computed again after a preemption does not move the place. A drafted token
//! moves it once the token was drawn. The mask behind a drafted token is worked out then.
//!
//! A step waits for its masks no longer than its [`Patience`]. It waits for a mask that was late before only if it has
//! nothing else to do. A sequence draws in the first step that finds its mask known.

mod lexers;
mod patience;
mod turns;

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use host_core::request::Request;
use host_core::{Batch, Room, Sequence, Undrawn};
use host_executor::Constraint;
use host_grammar::{Asked, Compiler, GrammarError, Limits, Source, Vocabulary};
use parking_lot::Mutex;
use tokio::task::spawn_blocking;

use crate::clock::Clock;

use self::lexers::Lexers;
pub use self::patience::Patience;
use self::patience::StepTime;
pub(crate) use self::turns::Followed;
use self::turns::{BatchPart, Looked, MaskThreads};

/// Most work of the lexers of all answers, in the engine's units, with the compiled grammars: about 1 GiB. A unit was 3 to 30 bytes with schemas of 3,000
/// properties, choices of 6,000 texts, and expressions whose automata grow without end.
const MOST_LEXERS: u64 = 1 << 25;

/// Reads a model's vocabulary. It is called when the first grammar comes.
pub type ReadVocabulary = Box<dyn Fn() -> Result<Vocabulary, String> + Send + Sync>;

/// The grammars of one worker's requests.
pub struct Grammars {
    read: ReadVocabulary,
    limits: Limits,
    compiler: OnceLock<Result<Compiler, String>>,
    rooms: Mutex<HashMap<Room, Arc<Followed>>>,
    clock: Clock,
    time: StepTime,
    threads: MaskThreads,
    lexers: Arc<Lexers>,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").field("rooms", &self.rooms.lock().len()).finish_non_exhaustive()
    }
}

/// A request's grammar, and how much of its prompt belongs to the answer already.
#[derive(Clone, Debug)]
pub struct Under {
    /// The grammar.
    pub source: Source,
    /// Tokens at the end of the prompt that an earlier try drew.
    pub answered: usize,
}

impl Grammars {
    /// The grammars of a worker that has no request yet.
    ///
    /// # Errors
    /// When threads cannot be started.
    pub fn new(read: ReadVocabulary, patience: Patience) -> Result<Self, rayon::ThreadPoolBuildError> {
        let threads = MaskThreads::new()?;
        let time = StepTime::new(patience);
        let clock = Clock::start();
        let lexers = Lexers::new(MOST_LEXERS);
        let (limits, compiler, rooms) = (Limits::default(), OnceLock::new(), Mutex::default());
        Ok(Self { read, limits, compiler, rooms, clock, time, threads, lexers })
    }

    /// Compiles a request's grammar in its client's turn, and follows the answer so far in it. `None` when the runtime is
    /// being shut down.
    ///
    /// # Errors
    /// When the grammar is refused, or the answer so far does not follow it.
    pub(crate) async fn follow(
        self: &Arc<Self>,
        request: Request,
        under: Under,
    ) -> Option<Result<(Request, Arc<Followed>), GrammarError>> {
        let grammars = Arc::clone(self);
        // Reads the model's vocabulary for the first grammar, and checks the grammar's text.
        let ask = move || grammars.ask(&request, &under).map(|asked| (request, under.answered, asked));
        let asked = spawn_blocking(ask).await.ok()?;
        let (request, answered, asked) = match asked {
            Ok(asked) => asked,
            Err(error) => return Some(Err(error)),
        };
        // Awaited, so that neither waiting nor compiling for others keeps a thread from other requests.
        let compiled = match asked.outcome().await {
            Ok(compiled) => compiled,
            Err(error) => return Some(Err(error)),
        };
        let lexers = Arc::clone(&self.lexers);
        let begin = move || {
            Followed::begin(compiled, &lexers, &request, answered).map(|followed| (request, followed))
        };
        spawn_blocking(begin).await.ok()
    }

    fn ask(&self, request: &Request, under: &Under) -> Result<Asked, GrammarError> {
        let compiler = self.compiler.get_or_init(|| {
            let vocabulary = (self.read)()?;
            Compiler::new(&vocabulary, self.limits).map_err(|error| error.to_string())
        });
        let compiler = compiler.as_ref().map_err(|reason| {
            GrammarError::Refused(format!("this server's workers take no grammars: {reason}"))
        })?;
        if request.stop_tokens.is_empty() {
            let reason = "an answer under a grammar needs a token that ends it, and the model names none: give stop_token_ids";
            return Err(GrammarError::Refused(reason.to_owned()));
        }
        compiler.ask(request.client, &under.source)
    }

    /// Begins to follow the grammar of a room's request.
    pub(crate) fn begin(&self, room: Room, followed: Arc<Followed>) {
        self.rooms.lock().insert(room, followed);
    }

    /// Ends a room's request.
    pub(crate) fn end(&self, room: Room) {
        if self.rooms.lock().remove(&room).is_some() {
            self.threads.forget_ended();
        }
    }

    /// Waits until the room's mask is known, or until the step's time is over.
    fn wait(&self, followed: &Followed) -> Result<(), Undrawn> {
        loop {
            let done = self.threads.done();
            if followed.look() == Looked::Known {
                return Ok(());
            }
            match self.time.left(self.clock.now(), false) {
                Some(Duration::ZERO) => {
                    followed.mark_late();
                    return Err(Undrawn::Late);
                }
                left => self.threads.wait(done, left),
            }
        }
    }

    fn room(&self, room: Room) -> Option<Arc<Followed>> {
        self.rooms.lock().get(&room).cloned()
    }
}

impl Constraint for Grammars {
    fn begins(&self, batch: &Batch) {
        let mut gains = false;
        for sequence in &batch.sequences {
            let followed = self.room(sequence.room);
            // The step computes a part of a prompt, or draws without a mask.
            gains |= sequence.sample.is_none() || followed.is_none();
            let Some(followed) = followed else { continue };
            let part = BatchPart {
                start: sequence.start as usize,
                tokens: sequence.tokens[..sequence.tokens.len() - sequence.draft().len()].to_vec(),
                draws: sequence.sample.is_some(),
            };
            self.threads.work(&followed, part);
        }
        self.time.begins(self.clock.now(), gains);
    }

    fn limits(&self, sequence: &Sequence) -> bool {
        self.rooms.lock().contains_key(&sequence.room)
    }

    fn known(&self, waiting: &[&Sequence]) -> Option<usize> {
        loop {
            let done = self.threads.done();
            let (mut unknown, mut all_late) = (Vec::new(), true);
            for (place, sequence) in waiting.iter().enumerate() {
                // A request that ended meanwhile needs no token.
                let followed = self.room(sequence.room);
                match followed.as_ref().map_or(Looked::Known, |followed| followed.look()) {
                    Looked::Known => {
                        self.time.draws();
                        return Some(place);
                    }
                    Looked::Unknown { late } => all_late &= late,
                }
                unknown.extend(followed);
            }
            let left = self.time.left(self.clock.now(), all_late);
            if left == Some(Duration::ZERO) {
                unknown.iter().for_each(|followed| followed.mark_late());
                return None;
            }
            self.threads.wait(done, left);
        }
    }

    fn apply(&self, sequence: &Sequence, before: usize, logits: &mut [f32]) -> Result<(), Undrawn> {
        let Some(followed) = self.room(sequence.room) else { return Ok(()) };
        if let Some(drawn) = before.checked_sub(1) {
            let tokens = sequence.draft()[drawn..before].to_vec();
            self.threads.work(&followed, BatchPart { start: sequence.known() + drawn, tokens, draws: true });
        }
        self.wait(&followed)?;
        match followed.take() {
            Some(Ok(mask)) => {
                mask.apply(logits);
                Ok(())
            }
            Some(Err(error)) => Err(Undrawn::Refused(error.to_string())),
            None => {
                Err(Undrawn::Failed("a fault: the grammar's next tokens could not be worked out".to_owned()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use host_core::Sampling;

    use super::*;

    const END: u32 = 0;

    fn request(prompt: &[u8], stop_tokens: Vec<u32>) -> Request {
        Request {
            prompt: prompt.iter().copied().map(u32::from).collect(),
            stop_tokens,
            ..host_sim::request(1, &[], 1)
        }
    }

    fn grammars() -> Arc<Grammars> {
        patient(Patience::All)
    }

    fn patient(patience: Patience) -> Arc<Grammars> {
        Arc::new(over_bytes(patience))
    }

    /// Grammars whose compilation no busy machine makes too long.
    fn over_bytes(patience: Patience) -> Grammars {
        let mut grammars = Grammars::new(Box::new(|| Ok(Vocabulary::bytes())), patience).unwrap();
        let hour = Duration::from_secs(3600);
        grammars.limits = Limits { wait: hour, compile_time: hour, ..Limits::default() };
        grammars
    }

    fn follow(
        grammars: &Arc<Grammars>,
        request: Request,
        under: Under,
    ) -> Result<Arc<Followed>, GrammarError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(grammars.follow(request, under)).unwrap().map(|(_request, followed)| followed)
    }

    fn batch(start: usize, tokens: &str, draws: bool) -> Batch {
        let sampling = Sampling::GREEDY;
        let sequence = Sequence {
            room: Room(1),
            tokens: tokens.bytes().map(u32::from).collect(),
            start: u32::try_from(start).unwrap(),
            pages: Vec::new(),
            window: host_core::window::WindowPages::default(),
            recompute: 0..0,
            drafted: 0,
            sample: draws.then(|| sampling.into()),
            scored: None,
        };
        Batch { id: 1, sequences: vec![sequence], layer_group: 0 }
    }

    /// The letters that may follow a batch.
    fn after(grammars: &Grammars, batch: &Batch) -> Result<String, String> {
        grammars.begins(batch);
        let sequence = &batch.sequences[0];
        assert_eq!(grammars.known(&[sequence]), Some(0));
        let mut logits = vec![0.0; 256];
        grammars.apply(sequence, 0, &mut logits).map_err(|why| format!("{why:?}"))?;
        Ok(allowed(&logits))
    }

    fn allowed(logits: &[f32]) -> String {
        let allowed = (0..=u8::MAX).filter(|letter| logits[usize::from(*letter)] == 0.0);
        allowed.map(char::from).collect()
    }

    #[test]
    fn a_place_follows_from_the_tokens_however_they_come() {
        let grammars = grammars();
        let under = |answered| Under { source: Source::regex("ab(cd|e)f"), answered };
        let begin = |prompt: &[u8], answered| {
            let followed = follow(&grammars, request(prompt, vec![END]), under(answered));
            grammars.begin(Room(1), followed.unwrap());
        };
        begin(b"xyz", 0);
        assert_eq!(after(&grammars, &batch(0, "xyz", true)).unwrap(), "a", "the prompt is no part of it");
        assert_eq!(after(&grammars, &batch(3, "a", true)).unwrap(), "b");
        assert_eq!(after(&grammars, &batch(4, "b", true)).unwrap(), "ce");
        // After a preemption all tokens are computed again in two pieces, with the token that had not been computed
        // before.
        grammars.begins(&batch(0, "xyza", false));
        assert_eq!(after(&grammars, &batch(4, "bc", true)).unwrap(), "d");
        // Another try, with the answer so far in its prompt, of which the first tokens are cached.
        begin(b"xyzab", 2);
        assert_eq!(after(&grammars, &batch(4, "b", true)).unwrap(), "ce");
        assert_eq!(after(&grammars, &batch(5, "e", true)).unwrap(), "f");
        assert_eq!(after(&grammars, &batch(6, "f", true)).unwrap(), "\0", "the end");
        grammars.end(Room(1));
        assert!(!grammars.limits(&batch(0, "x", true).sequences[0]));
    }

    #[test]
    fn a_drafted_token_moves_a_place_when_it_was_drawn_and_not_before() {
        let grammars = grammars();
        let under = Under { source: Source::regex("ab(cd|e)f"), answered: 0 };
        grammars.begin(Room(1), follow(&grammars, request(b"x", vec![END]), under).unwrap());
        let drafted = |start, tokens, count| {
            let mut batch = batch(start, tokens, true);
            batch.sequences[0].drafted = count;
            batch
        };
        let behind = |batch: &Batch, before| {
            let mut logits = vec![0.0; 256];
            grammars.apply(&batch.sequences[0], before, &mut logits).unwrap();
            allowed(&logits)
        };
        let first = drafted(0, "xabe", 3);
        assert_eq!(after(&grammars, &first).unwrap(), "a");
        assert_eq!([1, 2].map(|before| behind(&first, before)), ["b", "ce"]);
        // A "c" was drawn there instead of the "e", so the third drafted token was wrong.
        let next = drafted(3, "cdd", 2);
        assert_eq!(after(&grammars, &next).unwrap(), "d");
        assert_eq!(behind(&next, 1), "f");
        assert_eq!(after(&grammars, &batch(5, "f", true)).unwrap(), "\0", "the end");
    }

    /// This batch with another sequence, which has no grammar.
    fn beside(batch: &Batch) -> Batch {
        let mut batch = batch.clone();
        batch.sequences.insert(0, Sequence { room: Room(9), ..batch.sequences[0].clone() });
        batch
    }

    #[test]
    fn a_sequence_whose_mask_is_late_draws_in_a_later_step() {
        let grammars =
            patient(Patience::AsLongAgain { least: Duration::ZERO, most: Duration::from_secs(3600) });
        let under = Under { source: Source::regex("ab(cd|e)f"), answered: 0 };
        let followed = follow(&grammars, request(b"x", vec![END]), under).unwrap();
        grammars.begin(Room(1), Arc::clone(&followed));
        let first = batch(0, "x", true);
        {
            let _thread_is_slow = followed.in_work();
            for _step in 0..3 {
                let batch = beside(&first);
                grammars.begins(&batch);
                assert_eq!(grammars.known(&[&batch.sequences[1]]), None);
                assert_eq!(grammars.apply(&batch.sequences[1], 0, &mut [0.0; 256]), Err(Undrawn::Late));
            }
        }
        // A step without other work waits for the mask.
        assert_eq!(after(&grammars, &first).unwrap(), "a");
        assert_eq!(after(&grammars, &batch(1, "a", true)).unwrap(), "b");
        // A draw behind a drafted token can be late, too. Its mask is for the step that computes the token again.
        let mut drafted = batch(2, "bc", true);
        drafted.sequences[0].drafted = 1;
        assert_eq!(after(&grammars, &drafted).unwrap(), "ce");
        {
            let _thread_is_slow = followed.in_work();
            assert_eq!(grammars.apply(&drafted.sequences[0], 1, &mut [0.0; 256]), Err(Undrawn::Late));
        }
        assert_eq!(after(&grammars, &batch(3, "c", true)).unwrap(), "d");
    }

    #[test]
    fn a_mask_that_was_late_is_not_waited_for_and_one_that_is_known_comes_first() {
        let hour = Duration::from_secs(3600);
        let grammars = patient(Patience::AsLongAgain { least: hour, most: hour });
        let under = || Under { source: Source::regex("ab"), answered: 0 };
        let [slow, quick] = [1, 2].map(|room| {
            let request = Request { room: Room(room), ..request(b"x", vec![END]) };
            let followed = follow(&grammars, request, under()).unwrap();
            grammars.begin(Room(room), Arc::clone(&followed));
            followed
        });
        let mut batch = batch(0, "x", true);
        batch.sequences.push(Sequence { room: Room(2), ..batch.sequences[0].clone() });
        let both = [&batch.sequences[0], &batch.sequences[1]];
        let _thread_is_slow = slow.in_work();
        slow.mark_late();
        grammars.begins(&batch);
        assert_eq!(grammars.known(&both), Some(1), "whichever is known");
        quick.take();
        assert_eq!(grammars.known(&both[..1]), None);
    }

    #[test]
    fn an_answer_whose_lexer_takes_too_much_memory_ends_and_one_that_waits_has_none() {
        let mut grammars = over_bytes(Patience::All);
        // A client has half of it.
        grammars.lexers = Lexers::new(40_000);
        let grammars = Arc::new(grammars);
        let under = |text: &str| Under { source: Source::regex(text), answered: 0 };
        let waiting: Vec<_> =
            (0..50).map(|_| follow(&grammars, request(b"x", vec![END]), under("(a|b)*c")).unwrap()).collect();
        grammars.begin(Room(1), Arc::clone(&waiting[0]));
        assert_eq!(after(&grammars, &batch(0, "x", true)).unwrap(), "abc");
        drop(waiting);
        grammars.end(Room(1));
        let grows = r"(.*[a-q][^u-z]{13}x)*";
        grammars.begin(Room(1), follow(&grammars, request(b"x", vec![END]), under(grows)).unwrap());
        // Letters without a period, so that the lexer meets new text again and again.
        let (mut place, mut letters) = (0, 1_u32);
        let error = loop {
            letters = letters.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let next = if place == 0 { "x" } else { ["a", "b", "q", "r"][letters as usize >> 30] };
            match after(&grammars, &batch(place, next, true)) {
                Ok(_more) => place += 1,
                Err(error) => break error,
            }
            assert!(place < 10_000, "the lexer has no limit");
        };
        assert!(error.contains("Refused") && error.contains("take too much memory"), "{error}");
    }

    #[test]
    fn what_does_not_follow_the_grammar_ends_its_request_alone() {
        let grammars = grammars();
        let under = |text: &str, answered| Under { source: Source::regex(text), answered };
        let error = follow(&grammars, request(b"a", vec![]), under("a", 0)).unwrap_err().to_string();
        assert!(error.contains("stop_token_ids"), "{error}");
        let error = follow(&grammars, request(b"b", vec![END]), under("a", 1)).unwrap_err().to_string();
        assert!(error.contains("cannot go on under its grammar"), "{error}");
        let followed = follow(&grammars, request(b"x", vec![END]), under("ab", 0)).unwrap();
        grammars.begin(Room(1), followed);
        let error = after(&grammars, &batch(4, "b", true)).unwrap_err();
        assert!(error.contains("tokens 1 to 4 of it are missing"), "{error}");
        let none = Arc::new(Grammars::new(Box::new(|| Err("no tokenizer".into())), Patience::All).unwrap());
        let error = follow(&none, request(b"x", vec![END]), under("a", 0)).unwrap_err().to_string();
        assert!(error.ends_with("take no grammars: no tokenizer"), "{error}");
    }
}
