//! SentencePiece's byte-pair encoding: the two neighbours whose union has the highest score merge first, and of equal ones the
//! leftmost.
//!
//! Gemma's and Llama 2's vocabularies are of this kind. Spaces are written as `▁`. Text that no piece covers becomes tokens for
//! single bytes.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};

use super::vocabulary::{Kind, Vocabulary, same_length};
use crate::text::decode::{TextStream, Utf8Stream};
use crate::text::{Specials, TextError, Tokenizer};

/// SentencePiece's letter for a space.
const SPACE: char = '▁';

/// A SentencePiece model from a GGUF file.
pub(super) struct SentencePiece {
    vocabulary: Vocabulary,
    /// The score of each token. All are finite.
    scores: Vec<f64>,
    /// The pieces that merging can make: normal tokens, and unused tokens that are steps to larger ones.
    pieces: HashMap<Box<str>, u32>,
    /// Length of the longest piece in bytes.
    longest: usize,
    /// The token of each byte.
    bytes: Vec<Option<u32>>,
    /// Finds the tokens that are never split, wherever their text is. `whole` has their ids.
    finder: AhoCorasick,
    whole: Vec<u32>,
    /// Bytes of the longest piece or whole token, or `None` where a run of unknown text may be one token.
    longest_token: Option<usize>,
    /// Whether a space is put before a text.
    adds_space: bool,
}

impl SentencePiece {
    /// A model from a vocabulary and a score for each token.
    ///
    /// # Errors
    /// The key that cannot be used, and why.
    pub fn new(vocabulary: Vocabulary, scores: &[f64], adds_space: bool) -> Result<Self, String> {
        same_length("scores", scores.len(), vocabulary.tokens.len())?;
        if let Some(id) = scores.iter().position(|score| !score.is_finite()) {
            return Err(format!("tokenizer.ggml.scores of token {id} is no number"));
        }
        // Removes the sign of a negative zero, which would change the order of candidates.
        let scores = scores.iter().map(|score| score + 0.0).collect();
        let mut pieces: HashMap<Box<str>, u32> = HashMap::with_capacity(vocabulary.tokens.len());
        let mut bytes = vec![None; 256];
        let (mut texts, mut whole) = (Vec::new(), Vec::new());
        for (id, token, kind) in vocabulary.iter() {
            match kind {
                Kind::Byte => {
                    let byte = byte(token)
                        .ok_or_else(|| format!("token {id} is {token:?} and of the type for bytes, which are named <0x00> to <0xFF>"))?;
                    bytes[usize::from(byte)] = Some(id);
                }
                _ if token.is_empty() => {}
                Kind::Normal => {
                    pieces.insert(token.into(), id);
                }
                // A normal token with the same text takes precedence, wherever it is in the list.
                Kind::Unused => {
                    pieces.entry(token.into()).or_insert(id);
                }
                Kind::Control | Kind::Unknown | Kind::UserDefined => {
                    texts.push(escaped(token));
                    whole.push(id);
                }
            }
        }
        let finder =
            AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&texts).map_err(|error| {
                format!("the special tokens of tokenizer.ggml.tokens cannot be used: {error}")
            })?;
        let longest = pieces.keys().map(|piece| piece.len()).max().unwrap_or(0);
        let longest_whole = texts.iter().map(String::len).max().unwrap_or(0);
        let longest_token = bytes.iter().all(Option::is_some).then_some(longest.max(longest_whole).max(1));
        Ok(Self { vocabulary, scores, pieces, longest, bytes, finder, whole, longest_token, adds_space })
    }

    /// Appends the tokens of a text that has no special tokens in it.
    fn merge(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TextError> {
        let mut merging = Merging::new(self, text);
        merging.run();
        let mut unknown_before = false;
        for symbol in merging.pieces() {
            if let Some(&id) = self.pieces.get(symbol) {
                tokens.push(id);
                unknown_before = false;
                continue;
            }
            let start = tokens.len();
            tokens.extend(
                symbol.bytes().map_while(|byte| self.bytes.get(usize::from(byte)).copied().flatten()),
            );
            if tokens.len() - start == symbol.len() {
                unknown_before = false;
                continue;
            }
            tokens.truncate(start);
            let unknown = self.vocabulary.unknown.ok_or_else(|| {
                TextError::Encode(format!(
                    "{symbol:?} has no token, and the vocabulary has none for its bytes"
                ))
            })?;
            // A run of unknown text is one unknown token.
            if !unknown_before {
                tokens.push(unknown);
            }
            unknown_before = true;
        }
        Ok(())
    }
}

/// A text in the form of the vocabulary.
fn escaped(text: &str) -> String {
    text.replace(' ', "▁")
}

/// The byte that a token of the form `<0xNN>` names.
fn byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// A part of the text that is one symbol so far, with its neighbours. An empty symbol was merged into its left neighbour.
struct Symbol {
    start: usize,
    end: usize,
    left: Option<usize>,
    right: Option<usize>,
}

/// Two neighbours whose union is a piece. The greatest merges first.
struct Candidate {
    score: f64,
    left: usize,
    right: usize,
    /// Length of the union in bytes. If it is not the present length, a neighbour has grown since.
    length: usize,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| Reverse(self.left).cmp(&Reverse(other.left)))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Candidate {}

/// A text that is being merged from characters into pieces.
struct Merging<'a> {
    model: &'a SentencePiece,
    text: &'a str,
    symbols: Vec<Symbol>,
    candidates: BinaryHeap<Candidate>,
    /// For a union that is an unused piece, the length of its left part in bytes. The union is split again unless it grows into a
    /// used piece.
    splits: HashMap<&'a str, usize>,
}

impl<'a> Merging<'a> {
    fn new(model: &'a SentencePiece, text: &'a str) -> Self {
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(index, (start, letter))| Symbol {
                start,
                end: start + letter.len_utf8(),
                left: index.checked_sub(1),
                right: Some(index + 1),
            })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.right = None;
        }
        Self { model, text, symbols, candidates: BinaryHeap::new(), splits: HashMap::new() }
    }

    fn run(&mut self) {
        for left in 0..self.symbols.len() {
            self.consider(Some(left), self.symbols[left].right);
        }
        while let Some(Candidate { left, right, length, .. }) = self.candidates.pop() {
            let (start, middle) = (self.symbols[left].start, self.symbols[left].end);
            let Symbol { start: right_start, end, right: after, .. } = self.symbols[right];
            if middle == start || end == right_start || end - start != length {
                continue;
            }
            self.symbols[left].end = end;
            self.symbols[left].right = after;
            self.symbols[right].end = right_start;
            if let Some(after) = after {
                self.symbols[after].left = Some(left);
            }
            self.consider(self.symbols[left].left, Some(left));
            self.consider(Some(left), after);
        }
    }

    fn consider(&mut self, left: Option<usize>, right: Option<usize>) {
        let (Some(left), Some(right)) = (left, right) else { return };
        let (start, end) = (self.symbols[left].start, self.symbols[right].end);
        if end - start > self.model.longest {
            return;
        }
        let union = &self.text[start..end];
        let Some(&id) = self.model.pieces.get(union) else { return };
        let score = self.model.scores[id as usize];
        self.candidates.push(Candidate { score, left, right, length: end - start });
        if self.model.vocabulary.kind(id) == Some(Kind::Unused) {
            self.splits.insert(union, self.symbols[left].end - start);
        }
    }

    /// The pieces of the merged text, in order.
    fn pieces(&self) -> Vec<&'a str> {
        let mut pieces = Vec::new();
        let mut next = (!self.symbols.is_empty()).then_some(0);
        while let Some(index) = next {
            let Symbol { start, end, right, .. } = self.symbols[index];
            let mut apart = vec![&self.text[start..end]];
            while let Some(piece) = apart.pop() {
                match self.splits.get(piece) {
                    Some(&middle) => apart.extend([&piece[middle..], &piece[..middle]]),
                    None => pieces.push(piece),
                }
            }
            next = right;
        }
        pieces
    }
}

impl Tokenizer for SentencePiece {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        let (bos, eos) = self.vocabulary.frame(true);
        let mut tokens: Vec<u32> = bos.filter(|_| add_special).into_iter().collect();
        let text = escaped(text);
        let plain = |stretch: &str, tokens: &mut Vec<u32>| match stretch {
            "" => Ok(()),
            _ if self.adds_space => self.merge(&format!("{SPACE}{stretch}"), tokens),
            _ => self.merge(stretch, tokens),
        };
        let mut done = 0;
        for found in self.finder.find_iter(&text) {
            plain(&text[done..found.start()], &mut tokens)?;
            tokens.extend(self.whole.get(found.pattern().as_usize()));
            done = found.end();
        }
        plain(&text[done..], &mut tokens)?;
        tokens.extend(eos.filter(|_| add_special));
        Ok(tokens)
    }

    fn token_bytes(&self, token: u32) -> Vec<u8> {
        let text = self.vocabulary.text(Some(token));
        match self.vocabulary.kind(token) {
            None | Some(Kind::Unused) => Vec::new(),
            Some(Kind::Byte) => byte(text).into_iter().collect(),
            Some(Kind::Normal) => text.replace(SPACE, " ").into_bytes(),
            Some(Kind::Control | Kind::Unknown | Kind::UserDefined) => text.as_bytes().to_vec(),
        }
    }

    fn is_special(&self, token: u32) -> bool {
        self.vocabulary.is_hidden(token)
    }

    fn vocabulary(&self) -> u32 {
        self.vocabulary.len()
    }

    fn least_tokens(&self, text: &str) -> Option<usize> {
        Some(text.len().div_ceil(self.longest_token?))
    }

    fn stream(self: Arc<Self>, specials: Specials) -> Box<dyn TextStream> {
        let adds_space = self.adds_space;
        let bytes = Utf8Stream::new(self, specials);
        if adds_space { Box::new(WithoutFirstSpace { bytes, begun: false }) } else { Box::new(bytes) }
    }
}

/// Removes the space that `adds_space` puts before a text.
struct WithoutFirstSpace {
    bytes: Utf8Stream<SentencePiece>,
    begun: bool,
}

impl WithoutFirstSpace {
    fn show(&mut self, text: String) -> String {
        if self.begun || text.is_empty() {
            return text;
        }
        self.begun = true;
        match text.strip_prefix(' ') {
            Some(rest) => rest.to_owned(),
            None => text,
        }
    }
}

impl TextStream for WithoutFirstSpace {
    fn push(&mut self, token: u32) -> String {
        let text = self.bytes.push(token);
        self.show(text)
    }

    fn finish(&mut self) -> String {
        let text = self.bytes.finish();
        self.show(text)
    }
}

#[cfg(test)]
mod tests {
    use super::super::vocabulary::Fields;
    use super::*;

    /// A model from tokens with their types and scores.
    fn model(tokens: &[(&str, i64, f64)], adds_space: bool) -> Result<SentencePiece, String> {
        let fields = Fields {
            tokens: tokens.iter().map(|(token, ..)| (*token).to_owned()).collect(),
            kinds: tokens.iter().map(|(_, kind, _)| *kind).collect(),
            bos: Some(0),
            unknown: tokens.iter().position(|(_, kind, _)| *kind == 2).map(|id| id as u64),
            ..Fields::default()
        };
        let scores: Vec<f64> = tokens.iter().map(|(.., score)| *score).collect();
        SentencePiece::new(Vocabulary::new(fields)?, &scores, adds_space)
    }

    /// The texts of the tokens into which a text is cut.
    fn cut(model: &SentencePiece, text: &str) -> Vec<String> {
        let tokens = model.encode(text, false).unwrap();
        tokens.into_iter().map(|token| model.vocabulary.text(Some(token)).to_owned()).collect()
    }

    const LETTERS: [(&str, i64, f64); 5] =
        [("<s>", 3, 0.0), ("<unk>", 2, 0.0), ("a", 1, -50.0), ("b", 1, -51.0), ("▁", 1, -52.0)];

    fn with(more: &[(&'static str, i64, f64)]) -> Vec<(&'static str, i64, f64)> {
        LETTERS.iter().chain(more).copied().collect()
    }

    #[test]
    fn the_highest_score_merges_first_and_of_equals_the_leftmost() {
        let tokens = with(&[("ab", 1, -2.0), ("ba", 1, -1.0), ("aa", 1, -3.0), ("aba", 1, -1.5)]);
        let model = model(&tokens, false).unwrap();
        assert_eq!(cut(&model, "aba"), ["aba"]);
        assert_eq!(cut(&model, "abab"), ["aba", "b"], "ba, then a + ba");
        assert_eq!(cut(&model, "aaa"), ["aa", "a"]);
        assert_eq!(cut(&model, ""), [""; 0]);
    }

    #[test]
    fn spaces_are_letters_and_a_text_may_begin_with_one_that_is_not_there() {
        let tokens = with(&[("▁a", 1, -1.0), ("▁▁", 1, -2.0)]);
        assert_eq!(cut(&model(&tokens, false).unwrap(), "a a"), ["a", "▁a"]);
        let adding = model(&tokens, true).unwrap();
        assert_eq!(cut(&adding, "a  b<s>a"), ["▁a", "▁▁", "b", "<s>", "▁a"]);
        let mut stream = Arc::new(adding).stream(Specials::default());
        let text: String = [5, 0, 3, 5].map(|token| stream.push(token)).concat() + &stream.finish();
        assert_eq!(text, "ab a", "and it is taken back once");
    }

    #[test]
    fn special_tokens_stand_wherever_their_text_does_and_the_longest_wins() {
        let tokens = with(&[("\n", 4, 0.0), ("\n\n", 4, 0.0), ("   ", 4, 0.0), ("▁▁", 1, -1.0)]);
        let model = model(&tokens, false).unwrap();
        assert_eq!(cut(&model, "a\n\n\nb"), ["a", "\n\n", "\n", "b"]);
        assert_eq!(cut(&model, "a     b"), ["a", "   ", "▁▁", "b"], "three spaces, then two");
        assert_eq!(model.encode("a<s>", true).unwrap(), [0, 2, 0]);
        assert_eq!(model.token_bytes(7), b"   ");
        assert!(model.is_special(0) && !model.is_special(5), "a line break is text");
    }

    #[test]
    fn what_has_no_piece_is_written_in_bytes_or_is_unknown_once() {
        let mut tokens = with(&[]);
        assert_eq!(cut(&model(&tokens, false).unwrap(), "aéüa"), ["a", "<unk>", "a"]);
        tokens.remove(1);
        let error = model(&tokens, false).unwrap().encode("é", false).unwrap_err().to_string();
        assert!(error.contains('é'), "{error}");
        tokens.extend([("<0xC3>", 6, 0.0), ("<0xA9>", 6, 0.0), ("<0xE2>", 6, 0.0)]);
        let with_bytes = model(&tokens, false).unwrap();
        assert_eq!(cut(&with_bytes, "aé"), ["a", "<0xC3>", "<0xA9>"]);
        assert_eq!(with_bytes.token_bytes(5), [0xa9]);
        let mut stream = Arc::new(with_bytes).stream(Specials::default());
        let shown = [4, 5, 6, 1].map(|token| stream.push(token));
        assert_eq!(shown, ["", "é", "", "\u{fffd}a"], "a character comes out whole");
    }

    #[test]
    fn a_token_has_a_longest_text_where_nothing_is_unknown() {
        assert_eq!(model(&with(&[]), false).unwrap().longest_token, None);
        let names: Vec<String> = (0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>")).collect();
        let mut tokens = with(&[("▁a", 1, -1.0), ("<tool>", 4, 0.0)]);
        tokens.remove(1);
        let mut all: Vec<(&str, i64, f64)> = tokens.clone();
        all.extend(names.iter().map(|name| (name.as_str(), 6, 0.0)));
        let model = model(&all, true).unwrap();
        assert_eq!(model.longest_token, Some("<tool>".len()));
        for text in ["a a a", "<tool><tool>", "漢🦀é", "\0"] {
            assert!(model.encode(text, false).unwrap().len() * 6 >= text.len(), "{text}");
        }
        all.pop();
        assert_eq!(self::model(&all, true).unwrap().longest_token, None);
    }

    #[test]
    fn an_unused_piece_is_only_a_way_to_a_larger_one() {
        let tokens = with(&[("ab", 5, -1.0), ("aba", 1, -2.0)]);
        let model = model(&tokens, false).unwrap();
        assert_eq!(cut(&model, "aba"), ["aba"]);
        assert_eq!(cut(&model, "abb"), ["a", "b", "b"]);
        assert!(model.is_special(5) && model.token_bytes(5).is_empty());
    }

    #[test]
    fn lists_that_cannot_be_used_are_refused() {
        for (tokens, named) in [
            (with(&[("x", 1, f64::NAN)]), "scores of token 5"),
            (with(&[("<0x1>", 6, 0.0)]), "<0x1>"),
            (with(&[("<0x+1>", 6, 0.0)]), "<0x+1>"),
        ] {
            let error = model(&tokens, false).err().unwrap();
            assert!(error.contains(named), "{error}");
        }
        let vocabulary =
            Vocabulary::new(Fields { tokens: vec!["a".into()], kinds: vec![1], ..Fields::default() })
                .unwrap();
        let error = SentencePiece::new(vocabulary, &[], false).err().unwrap();
        assert!(error.contains("scores has 0 entries for 1 tokens"), "{error}");
    }

    #[test]
    fn a_long_text_of_one_letter_takes_no_quadratic_time() {
        let mut doubled: Vec<(String, i64, f64)> = vec![("a".into(), 1, -100.0)];
        for power in 1..18_i16 {
            doubled.push(("a".repeat(1 << power), 1, f64::from(power)));
        }
        let tokens: Vec<(&str, i64, f64)> =
            doubled.iter().map(|(token, kind, score)| (token.as_str(), *kind, *score)).collect();
        let model = model(&tokens, false).unwrap();
        assert_eq!(model.encode(&"a".repeat(1 << 19), false).unwrap(), [17; 4]);
    }
}
