//! Text of an answer that a reader has not passed on. It is looked at once, in whatever pieces it comes.

use super::work::looked_at;

/// Held text, with a cursor that remembers how much of it was looked at.
///
/// ```text
///     <tool_call> {"name": "f"
///     └─ looked at ─┘└─ ahead ─┘
///     └──────── rest ──────────┘
/// ```
#[derive(Clone, Debug, Default)]
pub(crate) struct Held {
    text: String,
    /// Where the rest begins. Before it is text that was passed on or dropped.
    begin: usize,
    /// Where the text ahead begins.
    cursor: usize,
}

/// A marker in the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Marker {
    /// White space before it.
    pub space: String,
    pub marker: &'static str,
}

impl Held {
    /// Adds text at the end.
    pub fn push(&mut self, new: &str) {
        if self.begin > 0 {
            looked_at(self.text.len() - self.begin);
            self.text.drain(..self.begin);
            self.cursor -= self.begin;
            self.begin = 0;
        }
        self.text.push_str(new);
    }

    /// All held text.
    pub fn rest(&self) -> &str {
        &self.text[self.begin..]
    }

    /// The text after the cursor.
    pub fn ahead(&self) -> &str {
        &self.text[self.cursor..]
    }

    /// Bytes of held text before the cursor.
    pub fn seen(&self) -> usize {
        self.cursor - self.begin
    }

    /// Moves the cursor ahead.
    pub fn advance(&mut self, bytes: usize) {
        self.cursor += bytes;
    }

    /// Moves the cursor behind white space. Returns the text ahead.
    pub fn skip_space(&mut self) -> &str {
        let ahead = self.ahead();
        let space = ahead.len() - ahead.trim_start().len();
        looked_at(space + 1);
        self.advance(space);
        self.ahead()
    }

    /// Moves the cursor behind this text, if it is the next. Returns whether it is.
    pub fn skip(&mut self, text: &str) -> bool {
        looked_at(text.len());
        let is_next = self.ahead().starts_with(text);
        if is_next {
            self.advance(text.len());
        }
        is_next
    }

    /// Moves the cursor behind white space, and behind this text, if it is the next. Returns whether it is.
    pub fn skip_behind_space(&mut self, text: &str) -> bool {
        self.skip_space();
        self.skip(text)
    }

    /// Moves the cursor to the beginning of the held text.
    pub fn rewind(&mut self) {
        self.cursor = self.begin;
    }

    /// Drops the text before the cursor.
    pub fn drop_seen(&mut self) {
        self.begin = self.cursor;
    }

    /// Drops the text before the cursor, and so many bytes behind it.
    pub fn drop(&mut self, bytes: usize) {
        self.advance(bytes);
        self.drop_seen();
    }

    /// Takes the text before the cursor.
    pub fn take_seen(&mut self) -> String {
        let seen = self.text[self.begin..self.cursor].to_owned();
        looked_at(seen.len());
        self.drop_seen();
        seen
    }

    /// Takes all held text.
    pub fn take(&mut self) -> String {
        let Self { mut text, begin, .. } = std::mem::take(self);
        if begin > 0 {
            looked_at(text.len() - begin);
            text.drain(..begin);
        }
        text
    }

    /// Takes the text before the first of these markers. Returns the marker, too, with which the held text begins then. Without one,
    /// takes what certainly belongs to none. White space at the end of the text is held, or comes with the marker.
    ///
    /// The text before the cursor is white space, from the last call.
    pub fn take_until(&mut self, markers: &[&'static str]) -> (String, Option<Marker>) {
        let (mut found, mut end) = (None, self.text.len());
        let begins = |letter: char| markers.iter().any(|marker| marker.starts_with(letter));
        for (at, _) in self.ahead().match_indices(begins) {
            let here = &self.ahead()[at..];
            found = markers.iter().find(|marker| here.starts_with(**marker));
            if found.is_some() || markers.iter().any(|marker| marker.starts_with(here)) {
                end = self.cursor + at;
                break;
            }
        }
        looked_at(end - self.cursor + 1);
        match self.text[self.cursor..end].trim_end().len() {
            0 => self.rewind(),
            known => self.advance(known),
        }
        let text = self.take_seen();
        self.cursor = end;
        let marker = found.map(|marker| Marker { space: self.take_seen(), marker });
        (text, marker)
    }
}
