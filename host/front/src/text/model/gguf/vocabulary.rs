//! The token list of a GGUF file, checked: the text of each id, and the ids that have a special use.

use std::collections::HashMap;

/// The use of a token, as numbered in `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A piece of text.
    Normal,
    /// Stands for text that the vocabulary cannot write.
    Unknown,
    /// Controls the model and never shows.
    Control,
    /// Text that is always one token, wherever it occurs.
    UserDefined,
    /// An id without a use.
    Unused,
    /// One byte, named `<0xNN>`.
    Byte,
}

impl Kind {
    fn from_number(number: i64) -> Option<Self> {
        Some(match number {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }
}

/// A file's fields about its tokens, unchecked.
#[derive(Clone, Debug, Default)]
pub(super) struct Fields {
    /// `tokens`: the text of each id.
    pub tokens: Vec<String>,
    /// `token_type`: a [`Kind`] for each id.
    pub kinds: Vec<i64>,
    /// `bos_token_id`.
    pub bos: Option<u64>,
    /// `eos_token_id`.
    pub eos: Option<u64>,
    /// `eot_token_id`: the end of a turn.
    pub end_of_turn: Option<u64>,
    /// `eom_token_id`: the end of a message that a tool's answer follows.
    pub end_of_message: Option<u64>,
    /// `unknown_token_id`.
    pub unknown: Option<u64>,
    /// `add_bos_token`.
    pub add_bos: Option<bool>,
    /// `add_eos_token`.
    pub add_eos: Option<bool>,
}

/// The tokens of a file. Texts are unique, except for the texts of [unused](Kind::Unused) tokens and empty texts.
#[derive(Clone, Debug)]
pub(super) struct Vocabulary {
    /// The text of each id, as the file writes it.
    pub tokens: Vec<String>,
    /// The use of each id. It has as many entries as `tokens`.
    pub kinds: Vec<Kind>,
    /// The token that begins a text, if the model has one.
    pub bos: Option<u32>,
    /// The token that ends a text, if the model has one.
    pub eos: Option<u32>,
    /// The token for text without tokens.
    pub unknown: Option<u32>,
    /// Whether a plain prompt begins with `bos`. If absent, the kind of tokenizer decides.
    pub add_bos: Option<bool>,
    /// Whether a plain prompt ends with `eos`.
    pub add_eos: bool,
    /// Tokens that end an answer, ascending.
    pub end: Vec<u32>,
}

/// Tokens that end a turn in every model that has them. Files name one or two ends by their ids, but models use more: a chat
/// model ends its turn with one of these and a text with `eos`. They are control tokens, whatever type the file gives them.
const ENDS: [&str; 11] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "<｜end▁of▁sentence｜>",
];

/// With this token in the vocabulary, `<|end|>` ends a message and not the turn.
const RETURN: &str = "<|return|>";

impl Vocabulary {
    /// Checks the fields of a file.
    ///
    /// # Errors
    /// The key that contradicts itself or another key, with the contradiction.
    pub fn new(fields: Fields) -> Result<Self, String> {
        let Fields { tokens, kinds, .. } = fields;
        if tokens.is_empty() {
            return Err("tokenizer.ggml.tokens is empty".to_owned());
        }
        let size = u32::try_from(tokens.len())
            .map_err(|_large| format!("tokenizer.ggml.tokens has {} tokens", tokens.len()))?;
        same_length("token_type", kinds.len(), tokens.len())?;
        let mut kinds = kinds
            .iter()
            .zip(0_u32..)
            .map(|(&number, id)| {
                Kind::from_number(number).ok_or_else(|| {
                    format!("tokenizer.ggml.token_type of token {id} is {number}, not one of 1 to 6")
                })
            })
            .collect::<Result<Vec<Kind>, String>>()?;

        let mut ids: HashMap<&str, u32> = HashMap::with_capacity(tokens.len());
        for ((token, kind), id) in tokens.iter().zip(&kinds).zip(0_u32..) {
            if token.is_empty() || *kind == Kind::Unused {
                continue;
            }
            if let Some(first) = ids.insert(token, id) {
                return Err(format!("tokenizer.ggml.tokens has {token:?} twice, as {first} and as {id}"));
            }
        }

        let given = |key: &str, id: Option<u64>| match id.map(u32::try_from) {
            None => Ok(None),
            Some(Ok(id)) if id < size => Ok(Some(id)),
            Some(_) => Err(format!(
                "tokenizer.ggml.{key} is {}, and token ids end at {}",
                id.unwrap_or_default(),
                size - 1
            )),
        };
        let bos = given("bos_token_id", fields.bos)?;
        let eos = given("eos_token_id", fields.eos)?;
        let unknown = given("unknown_token_id", fields.unknown)?;
        let end_of_turn = given("eot_token_id", fields.end_of_turn)?;
        let end_of_message = given("eom_token_id", fields.end_of_message)?;
        for (key, add, id_key, id) in [
            ("add_bos_token", fields.add_bos, "bos_token_id", bos),
            ("add_eos_token", fields.add_eos, "eos_token_id", eos),
        ] {
            if add == Some(true) && id.is_none() {
                return Err(format!("tokenizer.ggml.{key} is true, and there is no tokenizer.ggml.{id_key}"));
            }
        }

        let named = ENDS
            .iter()
            .filter(|name| **name != "<|end|>" || !ids.contains_key(RETURN))
            .filter_map(|name| ids.get(name).copied());
        let mut end: Vec<u32> = named.collect();
        for id in &end {
            if let Some(kind) = kinds.get_mut(*id as usize) {
                *kind = Kind::Control;
            }
        }
        end.extend([eos, end_of_turn, end_of_message].into_iter().flatten());
        end.sort_unstable();
        end.dedup();
        let add_eos = fields.add_eos.unwrap_or(false);
        Ok(Self { bos, eos, unknown, add_bos: fields.add_bos, add_eos, end, kinds, tokens })
    }

    /// Every id with its text and its use.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &str, Kind)> {
        (0_u32..).zip(&self.tokens).zip(&self.kinds).map(|((id, token), kind)| (id, token.as_str(), *kind))
    }

    /// The number of ids.
    pub fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }

    /// The text of an id, as the file writes it. Empty for no id.
    pub fn text(&self, id: Option<u32>) -> &str {
        id.and_then(|id| self.tokens.get(id as usize)).map_or("", String::as_str)
    }

    /// The use of an id, or `None` outside the vocabulary.
    pub fn kind(&self, id: u32) -> Option<Kind> {
        self.kinds.get(id as usize).copied()
    }

    /// Whether the token never shows in an answer.
    pub fn is_hidden(&self, id: u32) -> bool {
        matches!(self.kind(id), Some(Kind::Control | Kind::Unknown | Kind::Unused))
    }

    /// The tokens before and after a plain prompt. Where the file does not say it, `add_bos` decides about `bos`.
    pub fn frame(&self, add_bos: bool) -> (Option<u32>, Option<u32>) {
        (self.bos.filter(|_| self.add_bos.unwrap_or(add_bos)), self.eos.filter(|_| self.add_eos))
    }
}

/// Checks that a list has one entry for each token.
///
/// # Errors
/// When it has not.
pub(super) fn same_length(key: &str, entries: usize, tokens: usize) -> Result<(), String> {
    if entries == tokens {
        return Ok(());
    }
    Err(format!("tokenizer.ggml.{key} has {entries} entries for {tokens} tokens"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(tokens: &[(&str, i64)]) -> Fields {
        Fields {
            tokens: tokens.iter().map(|(token, _)| (*token).to_owned()).collect(),
            kinds: tokens.iter().map(|(_, kind)| *kind).collect(),
            ..Fields::default()
        }
    }

    #[test]
    fn ends_are_those_that_the_file_names_and_those_known_by_name() {
        let tokens = [("a", 1), ("<eos>", 3), ("<|im_end|>", 4), ("<stop>", 3), ("<|end|>", 3)];
        let given = Fields { eos: Some(1), end_of_message: Some(3), ..fields(&tokens) };
        let vocabulary = Vocabulary::new(given.clone()).unwrap();
        assert_eq!(vocabulary.end, [1, 2, 3, 4]);
        assert!(vocabulary.is_hidden(2), "an end steers, whatever its type");
        let mut with_return = given;
        with_return.tokens.push("<|return|>".to_owned());
        with_return.kinds.push(3);
        assert_eq!(Vocabulary::new(with_return).unwrap().end, [1, 2, 3]);
    }

    #[test]
    fn html_in_a_vocabulary_ends_nothing() {
        let vocabulary = Vocabulary::new(fields(&[("<s>", 4), ("</s>", 4)])).unwrap();
        assert_eq!(vocabulary.end, [0_u32; 0]);
    }

    #[test]
    fn a_list_that_contradicts_itself_is_refused_by_its_key() {
        let good = || fields(&[("a", 1), ("b", 1)]);
        let with = |change: fn(&mut Fields)| {
            let mut fields = good();
            change(&mut fields);
            Vocabulary::new(fields)
        };
        assert!(with(|_| {}).is_ok());
        type Case = (fn(&mut Fields), &'static str);
        let cases: [Case; 9] = [
            (|fields| fields.tokens.clear(), "tokens is empty"),
            (|fields| fields.kinds.push(1), "token_type has 3 entries for 2 tokens"),
            (|fields| fields.kinds[1] = 7, "token_type of token 1 is 7"),
            (|fields| fields.kinds[1] = -1, "token_type of token 1 is -1"),
            (|fields| fields.tokens[1] = "a".into(), "\"a\" twice, as 0 and as 1"),
            (|fields| fields.bos = Some(2), "bos_token_id is 2, and token ids end at 1"),
            (|fields| fields.eos = Some(u64::MAX), "eos_token_id is 18446744073709551615"),
            (|fields| fields.add_bos = Some(true), "no tokenizer.ggml.bos_token_id"),
            (|fields| fields.add_eos = Some(true), "no tokenizer.ggml.eos_token_id"),
        ];
        for (change, named) in cases {
            let error = with(change).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn padding_may_repeat() {
        assert!(Vocabulary::new(fields(&[("a", 1), ("[PAD]", 5), ("[PAD]", 5), ("", 1), ("", 1)])).is_ok());
    }
}
