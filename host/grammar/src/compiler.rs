//! From text to what can be carried out, within limits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::{Logger, Matcher, ParserFactory};
use parking_lot::Mutex;
use serde_json::Value;
use toktrie::InferenceCapabilities;

use crate::cache::Cache;
use crate::compiled::Compiled;
use crate::source::{Kind, Source, with_white_space};
use crate::state::first_line;
use crate::{GrammarError, Vocabulary};

/// How much work and memory a grammar may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The longest wait for a grammar to be compiled.
    pub compile_time: Duration,
    /// Grammars that are compiled at once.
    pub compiling: usize,
    /// Compiled grammars that are kept, and bytes of their texts.
    pub kept: usize,
    /// See `kept`.
    pub kept_bytes: usize,
    /// Symbols of a compiled grammar.
    pub symbols: usize,
    /// States of a grammar's lexer, 1 to 2 kB each. An answer has its own.
    pub lexer_states: usize,
    /// Work on a lexer that is compiled. 50,000 take a millisecond.
    pub compile_fuel: u64,
    /// Work on the lexer for one mask. 14,000 take a millisecond.
    pub mask_fuel: u64,
    /// Items of the parser for one mask. 20,000 take a millisecond.
    pub mask_items: usize,
    /// Items of the parser at one place of an answer: several for each property that may come next.
    pub items: usize,
    /// The same under rules, which can be ambiguous: the work at a place grows with the square of its items.
    pub items_of_rules: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            compile_time: Duration::from_secs(10),
            compiling: 4,
            kept: 128,
            kept_bytes: 4 << 20,
            symbols: 200_000,
            lexer_states: 25_000,
            compile_fuel: 1_000_000,
            // The lexer of a request that goes on elsewhere is cold, so it needs more than that of one that ran through.
            mask_fuel: 500_000,
            mask_items: 100_000,
            items: 2000,
            items_of_rules: 500,
        }
    }
}

/// A stack for what recurses with the depth of a grammar. Pages of it that are not reached take no memory.
const STACK: usize = 64 << 20;

/// Compiles grammars over one vocabulary, and keeps them. All methods may be called from any thread. [`Compiler::compile`]
/// blocks.
pub struct Compiler {
    shared: Arc<Shared>,
    cache: Mutex<Cache>,
}

struct Shared {
    factory: ParserFactory,
    width: u32,
    limits: Limits,
    compiling: AtomicUsize,
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiler").field("limits", &self.shared.limits).finish_non_exhaustive()
    }
}

impl Compiler {
    /// For this vocabulary.
    ///
    /// # Errors
    /// When the engine cannot use it.
    pub fn new(vocabulary: &Vocabulary, limits: Limits) -> Result<Self, GrammarError> {
        let mut factory = ParserFactory::new_simple(vocabulary.environment()).map_err(|error| {
            GrammarError::Stuck(format!("the vocabulary cannot be used: {}", first_line(&error.to_string())))
        })?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            initial_lexer_fuel: limits.compile_fuel,
            step_lexer_fuel: limits.mask_fuel,
            step_max_items: limits.mask_items,
            max_lexer_states: limits.lexer_states,
            max_grammar_size: limits.symbols,
            // It would run each large expression over the whole vocabulary.
            precompute_large_lexemes: false,
            // Messages would repeat the answer so far.
            verbose_errors: false,
            ..ParserLimits::default()
        };
        let width = vocabulary.width();
        let shared = Shared { factory, width, limits, compiling: AtomicUsize::new(0) };
        let cache = Cache::new(limits.kept, limits.kept_bytes);
        Ok(Self { shared: Arc::new(shared), cache: Mutex::new(cache) })
    }

    /// Compiles a grammar, or finds it. Refused ones are kept too. Several requests for one grammar compile it once.
    ///
    /// # Errors
    /// When it is refused, is no grammar, or takes too long.
    pub fn compile(&self, source: &Source) -> Result<Arc<Compiled>, GrammarError> {
        source.check()?;
        let place = self.cache.lock().place(source);
        let outcome = place.get_or_init(|| self.compile_on_a_thread(source)).clone();
        if matches!(outcome, Err(GrammarError::Busy(_))) {
            self.cache.lock().forget(source);
        }
        outcome
    }

    /// One thread for each: with a stack of its own, and given up when it takes too long.
    fn compile_on_a_thread(&self, source: &Source) -> Result<Arc<Compiled>, GrammarError> {
        let (limits, kind) = (self.shared.limits, source.kind.noun());
        let busy = Busy::take(&self.shared).ok_or(GrammarError::Busy(limits.compiling))?;
        let (send, receive) = channel();
        let (shared, source) = (Arc::clone(&self.shared), source.clone());
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK);
        let started = thread.spawn(move || {
            let outcome = compile(&shared, &source);
            drop(busy);
            // The request may have given up.
            let _given_up = send.send(outcome).is_err();
        });
        let failed = |reason: String| GrammarError::Compile { kind, reason };
        started.map_err(|error| failed(format!("no thread to compile it on: {error}")))?;
        match receive.recv_timeout(limits.compile_time) {
            Ok(outcome) => outcome.map(Arc::new),
            Err(RecvTimeoutError::Timeout) => {
                Err(GrammarError::Slow { kind, seconds: limits.compile_time.as_secs() })
            }
            Err(RecvTimeoutError::Disconnected) => Err(failed("the engine gave it up".into())),
        }
    }
}

/// One of the grammars that are compiled at once.
struct Busy(Arc<Shared>);

impl Busy {
    fn take(shared: &Arc<Shared>) -> Option<Self> {
        let more = |now: usize| (now < shared.limits.compiling).then_some(now + 1);
        shared.compiling.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()?;
        Some(Self(Arc::clone(shared)))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.compiling.fetch_sub(1, Ordering::AcqRel);
    }
}

fn compile(shared: &Shared, source: &Source) -> Result<Compiled, GrammarError> {
    let failed = |reason: String| GrammarError::Compile { kind: source.kind.noun(), reason };
    let grammar = match source.kind {
        Kind::Regex => TopLevelGrammar::from_regex(&source.text),
        Kind::Lark => TopLevelGrammar::from_lark(source.text.clone()),
        Kind::JsonSchema => {
            let schema: Value =
                serde_json::from_str(&source.text).map_err(|error| failed(error.to_string()))?;
            TopLevelGrammar::from_json_schema(with_white_space(&schema, source.compact))
        }
    };
    let items = if source.kind == Kind::Lark { shared.limits.items_of_rules } else { shared.limits.items };
    let limits = ParserLimits { max_items_in_row: items, ..shared.factory.limits().clone() };
    let parser = shared.factory.create_parser_from_init_ext(
        GrammarInit::Serialized(grammar),
        Logger::new(0, 0),
        InferenceCapabilities::default(),
        limits,
    );
    let mut matcher = Matcher::new(parser);
    match matcher.get_error() {
        Some(error) => Err(failed(first_line(&error))),
        None => match matcher.is_accepting() {
            Ok(_) => Ok(Compiled::new(matcher, shared.width)),
            Err(error) => Err(failed(first_line(&error.to_string()))),
        },
    }
}
