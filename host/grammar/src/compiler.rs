//! Compiles the texts of grammars, within limits.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::{Logger, Matcher, ParserFactory, panic_utils};
use serde_json::Value;
use toktrie::InferenceCapabilities;

use crate::compiled::Compiled;
use crate::jobs::{Asked, Jobs};
use crate::schema::for_engine;
use crate::source::{Kind, MAX_TEXT, Source};
use crate::state::first_line;
use crate::{GrammarError, Limits, Vocabulary, memory};

/// Compiles grammars over one vocabulary, and caches the outcomes. All methods may be called from any thread.
#[derive(Debug)]
pub struct Compiler {
    jobs: Arc<Jobs>,
}

impl Compiler {
    /// A compiler for one vocabulary.
    ///
    /// # Errors
    /// When the engine cannot use the vocabulary.
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
            // Precomputing would run each large expression over the whole vocabulary.
            precompute_large_lexemes: false,
            // Verbose messages would repeat the answer so far.
            verbose_errors: false,
            ..ParserLimits::default()
        };
        let engine = Engine { factory, width: vocabulary.width(), limits };
        let compile = move |source: &Source| engine.compile(source).map(Arc::new);
        Ok(Self { jobs: Jobs::new(Box::new(compile), limits) })
    }

    /// Asks for a grammar to be compiled for a client. Does not wait. Any number names a client, 0 too. A grammar is not compiled
    /// if all requests for it are dropped before its turn comes.
    ///
    /// # Errors
    /// When the grammar is too large or too deep, or too many grammars of the client wait.
    pub fn ask(&self, client: u64, source: &Source) -> Result<Asked, GrammarError> {
        // What is in the cache or under way was checked. A text that is too long is not looked for.
        if source.text.len() > MAX_TEXT || !self.jobs.knows(source) {
            source.check()?;
        }
        self.jobs.ask(client, source)
    }

    /// Grammars that wait for their turn. One that several clients wait for counts for each.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.jobs.waiting()
    }

    /// Compiles a grammar, or finds its outcome in the cache, which holds failures too. Several requests for one grammar compile it
    /// once. Blocks no thread. The runtime must have its timer enabled.
    ///
    /// # Errors
    /// When the text is refused or is no grammar, when its turn does not come in time, or when compiling takes too long.
    pub async fn compile(&self, client: u64, source: &Source) -> Result<Arc<Compiled>, GrammarError> {
        self.ask(client, source)?.outcome().await
    }
}

/// The engine's factory of parsers, with this crate's limits.
struct Engine {
    factory: ParserFactory,
    width: u32,
    limits: Limits,
}

impl Engine {
    fn compile(&self, source: &Source) -> Result<Compiled, GrammarError> {
        let failed = |reason: String| GrammarError::Compile { kind: source.kind.noun(), reason };
        let grammar = match source.kind {
            Kind::Regex => TopLevelGrammar::from_regex(&source.text),
            Kind::Lark => TopLevelGrammar::from_lark(source.text.clone()),
            Kind::JsonSchema => {
                let schema: Value =
                    serde_json::from_str(&source.text).map_err(|error| failed(error.to_string()))?;
                TopLevelGrammar::from_json_schema(for_engine(&schema, source.compact))
            }
        };
        let items = if source.kind == Kind::Lark { self.limits.items_of_rules } else { self.limits.items };
        let limits = ParserLimits { max_items_in_row: items, ..self.factory.limits().clone() };
        // The engine reads it in a step of its own here, because only then it tells the number of symbols.
        let (init, environment) = (GrammarInit::Serialized(grammar), self.factory.tok_env().clone());
        let read = AssertUnwindSafe(|| init.to_internal(Some(environment), limits.clone()));
        let (rules, lexemes) =
            panic_utils::catch_unwind(read).map_err(|error| failed(reason(&error.to_string())))?;
        let symbols = rules.num_symbols();
        let parser = self.factory.create_parser_from_init_ext(
            GrammarInit::Internal(rules, lexemes),
            Logger::new(0, 0),
            InferenceCapabilities::default(),
            limits,
        );
        let (lexer, memory) = parser.as_ref().map_or((0, 0), |parser| {
            let memory = memory::estimate(source.text.len(), symbols, parser);
            (parser.parser.stats().lexer_cost, memory)
        });
        let mut matcher = Matcher::new(parser);
        match matcher.get_error() {
            Some(error) => Err(failed(reason(&error))),
            None => match matcher.is_accepting() {
                Ok(_) => Ok(Compiled::new(matcher, self.width, lexer, memory)),
                Err(error) => Err(failed(reason(&error.to_string()))),
            },
        }
    }
}

/// Why a grammar is refused, from the engine's message.
fn reason(message: &str) -> String {
    let line = first_line(message);
    let Some((_, keywords)) = line.split_once("Unimplemented keys: [") else { return line };
    let keywords = keywords.split(']').next().unwrap_or_default();
    format!("it has keywords that cannot be enforced here ({keywords}): leave them out and check the answer")
}
