//! Decisions out of bytes: what is left of an input says what happens next.

/// An input from which one thing after the other is taken.
pub struct Decisions<'a>(pub &'a [u8]);

impl Decisions<'_> {
    /// The next byte, or `None` at the end.
    pub fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// A number below `bound`, or 0 at the end.
    pub fn below(&mut self, bound: u8) -> u8 {
        self.byte().unwrap_or(0) % bound
    }

    /// A small number mostly, sometimes one of those at the edge.
    pub fn number(&mut self) -> u32 {
        match self.byte().unwrap_or(0) {
            255 => u32::MAX,
            254 => u32::MAX - 1,
            253 => 1 << 31,
            252 => 1 << 16,
            small => u32::from(small),
        }
    }

    /// Some bytes of the input, fewer at its end.
    pub fn piece(&mut self, bytes: usize) -> &[u8] {
        let (piece, rest) = self.0.split_at(bytes.min(self.0.len()));
        self.0 = rest;
        piece
    }
}
