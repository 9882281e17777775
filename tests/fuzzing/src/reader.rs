//! Reads decisions from an input, byte by byte.

/// The rest of an input, from which decisions are taken.
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

    /// Mostly a number below 252, sometimes an edge value: 2^16, 2^31, or one of the two largest.
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
