//! How much memory a compiled grammar takes. The engine tells numbers and not bytes, so this is an estimate. It is meant to be too
//! high, never too low, because the cache is bounded by it; `tests/memory.rs` compares it with what is allocated.
//!
//! | Part | Copies | Told by the engine |
//! | --- | --- | --- |
//! | symbols and their rules | one | symbols |
//! | lexemes: what stands at the ends of rules | the grammar's, the lexer's | lexemes |
//! | expressions of lexemes, as trees and as nodes | the grammar's, the lexer's, the automaton's | nodes and bytes |
//! | states of the automaton, and its tables | one | states, bytes, work |

use llguidance::TokenParser;

/// Bytes for a byte of text: the source itself, names, literals, and rules that take less text than a symbol. An alternative of four
/// letters (`"a"|`) is a rule and two elements, together about 100 bytes.
const TEXT: usize = 32;
/// Bytes of a symbol, with its name and the room for its first rules. By the engine's types these are 210, 30 and 120; the rest is
/// for elements of rules, 18 bytes each.
const SYMBOL: usize = 512;
/// Bytes of a lexeme in both copies. By the engine's types one is 220, with its name and its expression 300.
const LEXEME: usize = 768;
/// Bytes of a node of an expression beside those that the engine counts: its weight, and its part of the tree that it was read as.
const NODE: usize = 64;
/// Bytes of a state beside its set of lexemes, and beside those that the engine counts.
const STATE: usize = 256;
/// Bytes for a unit of the lexer's work in tables that the engine does not count, such as derivatives by sets of letters. A result
/// takes 8 bytes, in lists of up to twice the length.
const UNIT: usize = 16;

/// Bytes that a grammar takes once it is compiled. `symbols`: as many as it had when it was read; the engine makes no more of them.
pub(crate) fn estimate(text: usize, symbols: usize, parser: &TokenParser) -> usize {
    let lexer = parser.parser.lexer_stats();
    let expressions = parser.parser.grammar().lexer_spec().regex_builder.exprset();
    let of_expressions = 2 * (expressions.num_bytes() + expressions.len() * NODE);
    let of_states = lexer.num_states * (STATE + lexer.num_regexps / 8);
    let nodes = lexer.num_ast_nodes + lexer.num_derived;
    let of_automaton = lexer.num_bytes + nodes * NODE + lexer.total_fuel_spent * UNIT;
    text * TEXT + symbols * SYMBOL + lexer.num_regexps * LEXEME + of_expressions + of_states + of_automaton
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Compiler, Limits, Source, Vocabulary};

    #[tokio::test]
    async fn a_grammar_of_many_symbols_takes_more_than_one_of_few_with_as_much_text() {
        const RULES: usize = 1000;
        let hour = Duration::from_secs(3600);
        let limits = Limits { wait: hour, compile_time: hour, ..Limits::default() };
        let compiler = Compiler::new(&Vocabulary::bytes(), limits).unwrap();
        let rules: String = (0..RULES)
            .map(|rule| format!("r{rule}: \"a\" r{}? | /[a-z]+{rule}/\n", (rule + 1) % RULES))
            .collect();
        let rules = Source::lark(format!("start: r0\n{rules}"));
        let word = Source::lark(format!("start: \"{}\"", "a".repeat(rules.text.len() - 9)));
        assert_eq!(rules.text.len(), word.text.len());
        let many = compiler.compile(1, &rules).await.unwrap().memory();
        let few = compiler.compile(1, &word).await.unwrap().memory();
        let [many, few] = [many, few].map(|bytes| bytes - word.text.len() * TEXT);
        assert!(many > RULES * SYMBOL && many > 4 * few, "{many} and {few} bytes");
    }
}
