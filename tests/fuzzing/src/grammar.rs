//! Fuzzes grammars of clients: compiles them, and follows them through an answer.

use std::sync::LazyLock;

use host_grammar::{Compiler, GrammarError, Kind, Limits, Source, State, Vocabulary, ebnf};

use tokio::runtime::{Builder, Runtime};

use crate::reader::Decisions;

/// The byte that ends an answer.
const END: u32 = 0;
/// Most bytes of an answer.
const MOST: usize = 64;

static COMPILER: LazyLock<Compiler> = LazyLock::new(|| {
    Compiler::new(&Vocabulary::bytes(), Limits::default()).expect("a vocabulary of bytes can be used")
});

/// A runtime with timers, in which the target waits for compiled grammars.
static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_current_thread().enable_time().build().expect("a clock"));

/// Compiles a grammar and follows it. An input has a kind, whether thoughts come first, a grammar, and after a zero byte the
/// choices among allowed bytes. True when the grammar was compiled.
///
/// # Panics
/// When the compiler panics or is too slow, when a state refuses a byte that it allows, or when the same bytes lead to different
/// states.
#[must_use]
pub fn grammar(bytes: &[u8]) -> bool {
    let mut decisions = Decisions(bytes);
    let (kind, thoughts) = (decisions.below(5), decisions.below(3));
    let rest = decisions.0;
    let end = rest.iter().position(|byte| *byte == 0).unwrap_or(rest.len());
    let text = String::from_utf8_lossy(&rest[..end]).into_owned();
    let mut choices = Decisions(rest.get(end + 1..).unwrap_or_default());
    let source = match kind {
        0 => Ok(Source { kind: Kind::JsonSchema, text, compact: false }),
        1 => Ok(Source::regex(text)),
        2 => Ok(Source::lark(text)),
        3 => ebnf::source(&text),
        _ => Source::choice(&text.lines().map(str::to_owned).collect::<Vec<_>>()),
    };
    let Ok(source) = source else { return false };
    if source.check().is_err() {
        return false;
    }
    let source = match thoughts {
        0 => source,
        open => source.after_thoughts(open == 1),
    };
    let compiled = match RUNTIME.block_on(COMPILER.compile(0, &source)) {
        Ok(compiled) => compiled,
        Err(GrammarError::Compile { reason, .. }) if reason.contains("gave it up") => {
            panic!("the thread that compiles {source:?} ended")
        }
        Err(error @ (GrammarError::Slow { .. } | GrammarError::Busy(_) | GrammarError::Waited { .. })) => {
            panic!("{error}: {source:?}")
        }
        Err(_refused) => return false,
    };
    let answer = answered(compiled.begin(vec![END]), &mut choices);
    // `again` gets the same bytes without masks in between, as on another worker.
    let (mut again, mut state) = (compiled.begin(vec![END]), compiled.begin(vec![END]));
    for byte in answer {
        let _looked = state.mask();
        state.consume(byte).expect("it was taken before");
        again.consume(byte).expect("it was taken before");
    }
    if let (Ok(one), Ok(other)) = (state.mask(), again.mask()) {
        assert_eq!(one.tokens(), other.tokens(), "{source:?}");
    }
    true
}

/// The bytes of an answer, each chosen among those that are allowed.
fn answered(mut state: State, choices: &mut Decisions<'_>) -> Vec<u32> {
    let mut answer = Vec::new();
    while answer.len() < MOST {
        // An answer that would cost too much ends.
        let Ok(mask) = state.mask() else { break };
        let allowed = mask.tokens();
        assert!(!allowed.is_empty(), "nothing may come, and it is no error");
        let Some(choice) = choices.byte() else { break };
        let byte = allowed[usize::from(choice) % allowed.len()];
        if byte == END {
            assert!(state.may_end().expect("a mask was computed"), "it may end, and may not");
            break;
        }
        state.consume(byte).expect("what a mask allows is taken");
        answer.push(byte);
    }
    answer
}
