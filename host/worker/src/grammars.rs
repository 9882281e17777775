//! Grammars of requests: compiled where requests come in, followed beside the steps.
//!
//! ```text
//! request ─► compile, replay ─► room ─► batch begins ─► threads: consume, mask ┐
//!            (in turns)                 │                                      ├─► logits ─► draw
//!                                       └────────────► forward pass ───────────┘
//! ```
//!
//! A room's place in its grammar follows from its tokens: those of the answer that came with the request, and those that the
//! executor is given in batches. A token that was computed before, and is computed again after a preemption, moves nothing. A
//! drafted token moves it once it was drawn: what may follow it is worked out then, on the thread that draws.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock};

use host_core::request::Request;
use host_core::{Batch, Room, Sequence};
use host_executor::Constraint;
use host_grammar::{Asked, Compiled, Compiler, GrammarError, Limits, Mask, Source, State, Vocabulary};
use parking_lot::{Condvar, Mutex};
use tokio::task::spawn_blocking;

/// Most threads that work masks out.
const THREADS: usize = 4;

/// Where a model's vocabulary comes from. It is read when the first grammar comes.
pub type ReadVocabulary = Box<dyn Fn() -> Result<Vocabulary, String> + Send + Sync>;

/// The grammars of one worker's requests.
pub struct Grammars {
    read: ReadVocabulary,
    compiler: OnceLock<Result<Compiler, String>>,
    rooms: Mutex<HashMap<Room, Arc<Followed>>>,
    threads: rayon::ThreadPool,
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

/// One request's place in its grammar.
#[derive(Debug)]
pub struct Followed {
    place: Mutex<Place>,
    known: Condvar,
}

#[derive(Debug)]
struct Place {
    state: State,
    /// The position of the next token that is not consumed.
    next: usize,
    /// What may follow the last sequence, once it is known.
    mask: Option<Result<Mask, GrammarError>>,
    /// Batches that are not worked on yet, in their order.
    waiting: VecDeque<Part>,
    /// A thread works on them, or will.
    working: bool,
}

/// A sequence's part of a batch.
#[derive(Debug)]
struct Part {
    /// The position of its first token.
    start: usize,
    tokens: Vec<u32>,
    /// A token is drawn behind it.
    draws: bool,
}

impl Grammars {
    /// None yet.
    ///
    /// # Errors
    /// When threads cannot be started.
    pub fn new(read: ReadVocabulary) -> Result<Self, rayon::ThreadPoolBuildError> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(THREADS.min(cores))
            .thread_name(|index| format!("grammar-{index}"))
            .build()?;
        Ok(Self { read, compiler: OnceLock::new(), rooms: Mutex::default(), threads })
    }

    /// A request's grammar, compiled in its client's turn, at the place where its answer is. `None` when the runtime is being shut
    /// down.
    ///
    /// # Errors
    /// When the grammar is refused, or the answer so far does not follow it.
    pub(crate) async fn follow(
        self: &Arc<Self>,
        request: Request,
        under: Under,
    ) -> Option<Result<(Request, Arc<Followed>), GrammarError>> {
        let grammars = Arc::clone(self);
        // Reads the model's vocabulary when the first comes, and checks the text.
        let ask = move || grammars.ask(&request, &under).map(|asked| (request, under.answered, asked));
        let asked = spawn_blocking(ask).await.ok()?;
        let (request, answered, asked) = match asked {
            Ok(asked) => asked,
            Err(error) => return Some(Err(error)),
        };
        // On no thread: neither waits nor what others compile keep one from other requests.
        let compiled = match asked.outcome().await {
            Ok(compiled) => compiled,
            Err(error) => return Some(Err(error)),
        };
        let begin =
            move || Followed::begin(&compiled, &request, answered).map(|followed| (request, followed));
        spawn_blocking(begin).await.ok()
    }

    fn ask(&self, request: &Request, under: &Under) -> Result<Asked, GrammarError> {
        let compiler = self.compiler.get_or_init(|| {
            let vocabulary = (self.read)()?;
            Compiler::new(&vocabulary, Limits::default()).map_err(|error| error.to_string())
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

    /// The room's request has come in.
    pub(crate) fn begin(&self, room: Room, followed: Arc<Followed>) {
        self.rooms.lock().insert(room, followed);
    }

    /// The room's request has ended.
    pub(crate) fn end(&self, room: Room) {
        self.rooms.lock().remove(&room);
    }

    fn room(&self, room: Room) -> Option<Arc<Followed>> {
        self.rooms.lock().get(&room).cloned()
    }
}

impl Constraint for Grammars {
    fn begins(&self, batch: &Batch) {
        for sequence in &batch.sequences {
            let Some(followed) = self.room(sequence.room) else { continue };
            let part = Part {
                start: sequence.start as usize,
                tokens: sequence.tokens[..sequence.tokens.len() - sequence.draft().len()].to_vec(),
                draws: sequence.sample.is_some(),
            };
            let worked_on = {
                let mut place = followed.place.lock();
                place.waiting.push_back(part);
                std::mem::replace(&mut place.working, true)
            };
            // One thread for a room: batches are told in their order.
            if !worked_on {
                self.threads.spawn(move || followed.work());
            }
        }
    }

    fn limits(&self, sequence: &Sequence) -> bool {
        self.rooms.lock().contains_key(&sequence.room)
    }

    fn apply(&self, sequence: &Sequence, before: usize, logits: &mut [f32]) -> Result<(), String> {
        // A request that ended meanwhile needs no token.
        let Some(followed) = self.room(sequence.room) else { return Ok(()) };
        let mut place = followed.place.lock();
        while place.working {
            followed.known.wait(&mut place);
        }
        if let Some(drawn) = before.checked_sub(1) {
            let token = &sequence.draft()[drawn..before];
            place.go_on(&Part { start: sequence.known() + drawn, tokens: token.to_vec(), draws: true });
        }
        match place.mask.take() {
            Some(Ok(mask)) => {
                mask.apply(logits);
                Ok(())
            }
            Some(Err(error)) => Err(error.to_string()),
            None => Err("the grammar's next tokens could not be worked out".to_owned()),
        }
    }
}

impl Followed {
    /// Where the answer is, of which so many tokens are at the prompt's end.
    fn begin(compiled: &Compiled, request: &Request, answered: usize) -> Result<Arc<Self>, GrammarError> {
        let mut state = compiled.begin(request.stop_tokens.clone());
        let answer = request.prompt.len().saturating_sub(answered);
        for token in &request.prompt[answer..] {
            state.consume(*token)?;
        }
        let place =
            Place { state, next: request.prompt.len(), mask: None, waiting: VecDeque::new(), working: false };
        Ok(Arc::new(Self { place: Mutex::new(place), known: Condvar::new() }))
    }

    /// Takes in what waits.
    fn work(&self) {
        let _panicked = Panicked(self);
        loop {
            let mut place = self.place.lock();
            match place.waiting.pop_front() {
                Some(part) => place.go_on(&part),
                None => {
                    place.working = false;
                    self.known.notify_all();
                    return;
                }
            }
        }
    }
}

/// Ends the work on a room's mask when it panics.
struct Panicked<'a>(&'a Followed);

impl Drop for Panicked<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut place = self.0.place.lock();
            (place.working, place.mask) = (false, None);
            place.waiting.clear();
            self.0.known.notify_all();
        }
    }
}

impl Place {
    /// These tokens are computed. What may follow them is wanted if a token is drawn.
    fn go_on(&mut self, part: &Part) {
        let Part { start, ref tokens, draws } = *part;
        self.mask = None;
        let end = start + tokens.len();
        let consumed = match self.next.checked_sub(start) {
            // Computed before, all or in part.
            Some(before) => tokens.iter().skip(before).try_for_each(|token| self.state.consume(*token)),
            None => Err(GrammarError::Stuck(format!("tokens {} to {start} of it are missing", self.next))),
        };
        self.next = self.next.max(end);
        match consumed {
            Err(error) => self.mask = Some(Err(error)),
            Ok(()) if draws => self.mask = Some(self.state.mask()),
            Ok(()) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u32 = 0;

    fn request(prompt: &[u8], stop_tokens: Vec<u32>) -> Request {
        Request { prompt: prompt.iter().copied().map(u32::from).collect(), stop_tokens, ..host_sim_request() }
    }

    /// A request of which only the prompt and the stop tokens matter.
    fn host_sim_request() -> Request {
        Request {
            room: Room(1),
            prompt: Vec::new(),
            max_new_tokens: 1,
            stop_tokens: Vec::new(),
            ignore_stop: false,
            answered: 0,
            priority: 0,
            client: 0,
            sampling: host_core::Sampling::GREEDY,
            prefill: None,
            namespace: host_core::radix::NamespaceKey::default(),
            no_cache: false,
            names: Vec::new(),
        }
    }

    fn grammars() -> Arc<Grammars> {
        Arc::new(Grammars::new(Box::new(|| Ok(Vocabulary::bytes()))).unwrap())
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
        let sampling = host_sim_request().sampling;
        let sequence = Sequence {
            room: Room(1),
            tokens: tokens.bytes().map(u32::from).collect(),
            start: u32::try_from(start).unwrap(),
            pages: Vec::new(),
            window: host_core::window::WindowPages::default(),
            recompute: 0..0,
            drafted: 0,
            sample: draws.then(|| sampling.into()),
        };
        Batch { id: 1, sequences: vec![sequence], layer_group: 0 }
    }

    /// The letters that may follow a batch.
    fn after(grammars: &Grammars, batch: &Batch) -> Result<String, String> {
        grammars.begins(batch);
        let mut logits = vec![0.0; 256];
        grammars.apply(&batch.sequences[0], 0, &mut logits)?;
        let allowed = (0..=u8::MAX).filter(|letter| logits[usize::from(*letter)] == 0.0);
        Ok(allowed.map(char::from).collect())
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
        // Preempted: all is computed again, in two pieces, and the token that had not been computed with it.
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
            (0..=u8::MAX)
                .filter(|letter| logits[usize::from(*letter)] == 0.0)
                .map(char::from)
                .collect::<String>()
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
        let none = Arc::new(Grammars::new(Box::new(|| Err("no tokenizer".into()))).unwrap());
        let error = follow(&none, request(b"x", vec![END]), under("a", 0)).unwrap_err().to_string();
        assert!(error.ends_with("take no grammars: no tokenizer"), "{error}");
    }
}
