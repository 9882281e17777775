//! Limits on the work and memory of a grammar.

use std::time::Duration;

/// How much work and memory a grammar may take.
///
/// `kept` and `kept_bytes` limit what is kept of grammars that compiled. What is being compiled is added, `compiling` at once. An
/// answer under a grammar adds a lexer of up to `lexer_states`, and items of the parser for each of its tokens. A router begins no
/// answers. A worker counts the lexers of all answers that it runs.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The longest wait for a grammar's turn to be compiled.
    pub wait: Duration,
    /// The longest wait for a grammar to be compiled, counted from its turn.
    pub compile_time: Duration,
    /// Grammars that are compiled at once. A grammar that takes longer than `compile_time` counts until its thread ends.
    pub compiling: usize,
    /// Grammars of one client that are compiled at once.
    pub compiling_of_a_client: usize,
    /// Grammars of one client that wait for their turn.
    pub waiting_of_a_client: usize,
    /// Compiled grammars that are kept.
    pub kept: usize,
    /// Bytes of the compiled grammars that are kept, as of [`Compiled::memory`](crate::Compiled::memory). One that takes more than
    /// an eighth of them is not kept.
    pub kept_bytes: usize,
    /// Symbols of a grammar, before the engine leaves out those that it can do without.
    pub symbols: usize,
    /// States of a grammar's lexer, 1 to 2 kB each. An answer has its own: see [`State::lexer`](crate::State::lexer).
    pub lexer_states: usize,
    /// Work to compile a lexer, in the engine's units. 50,000 take a millisecond.
    pub compile_fuel: u64,
    /// Work of the lexer for one mask, in the engine's units. 14,000 take a millisecond.
    pub mask_fuel: u64,
    /// Items of the parser for one mask. 20,000 take a millisecond.
    pub mask_items: usize,
    /// Items of the parser at one place of an answer: several for each property that may come next.
    pub items: usize,
    /// As `items`, for rules. Rules can be ambiguous, and the work at one place grows with the square of its items.
    pub items_of_rules: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            wait: Duration::from_secs(30),
            compile_time: Duration::from_secs(10),
            compiling: 4,
            compiling_of_a_client: 2,
            waiting_of_a_client: 256,
            kept: 128,
            // A schema of some kilobytes takes about a megabyte, so usual ones meet the number first.
            kept_bytes: 256 << 20,
            // An optional property makes seven. So the longest text of nothing but short ones, of 26 bytes, makes 70,000. What the engine
            // cannot do without must be fewer than 65,525, since it numbers them with 16 bits.
            symbols: 100_000,
            lexer_states: 25_000,
            compile_fuel: 1_000_000,
            // A request that continues on another worker starts with a cold lexer there, which needs more work than a warm one.
            mask_fuel: 500_000,
            mask_items: 100_000,
            items: 2000,
            items_of_rules: 500,
        }
    }
}
