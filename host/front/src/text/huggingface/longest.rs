//! How much of a text one token can stand for.
//!
//! Tokenizers may drop parts of a text, or write a run of unknown text as one token. Then there is no limit. So this module knows
//! the parts of a tokenizer that do neither, and gives no limit for a tokenizer with other parts.

use std::collections::HashMap;

use serde_json::Value;
use tokenizers::models::bpe::BPE;
use tokenizers::{ModelWrapper, Tokenizer};

use super::letter_byte;

/// Most bytes that NFC turns into one: 7 bytes become the 2 of U+0390, by the decompositions of Unicode 14. Later versions never
/// change compositions.
const NFC: usize = 4;

/// The most text that one token can stand for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Longest {
    /// Bytes of a text, without the bytes that no token knows.
    pub bytes: usize,
    /// Bytes that no token knows, in ascending order. Any number of them may be dropped, or become one token.
    pub unknown: Vec<u8>,
}

impl Longest {
    /// The least number of tokens that a text has.
    pub fn least_tokens(&self, text: &str) -> usize {
        let known = match self.unknown.as_slice() {
            [] => text.len(),
            unknown => text.bytes().filter(|byte| unknown.binary_search(byte).is_err()).count(),
        };
        known.div_ceil(self.bytes)
    }
}

/// The most bytes of a text that one token can stand for, if there is a limit.
pub(super) fn longest_token(tokenizer: &Tokenizer) -> Option<Longest> {
    let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
    let json = |part: Option<serde_json::Result<Value>>| part.transpose().ok().map(Option::unwrap_or_default);
    let growth = growth(&json(tokenizer.get_normalizer().map(serde_json::to_value))?)?;
    let cut = json(tokenizer.get_pre_tokenizer().map(serde_json::to_value))?;
    let unknown = unknown(model, has(&cut, "ByteLevel"))?;
    // A normalizer could turn known bytes into unknown ones.
    if !keeps_all(&cut) || (growth > 1 && !unknown.is_empty()) {
        return None;
    }
    let added = tokenizer.get_added_tokens_decoder();
    // Some added tokens include the spaces beside them.
    if added.values().any(|token| token.lstrip || token.rstrip) {
        return None;
    }
    let own = model.get_vocab();
    let letters = has(&cut, "ByteLevel");
    let of_model = own.keys().map(|token| if letters { token.chars().count() } else { token.len() }).max();
    // Added tokens are searched in the text, or in the normalized text.
    let normalized = |id: &u32| tokenizer.id_to_token(*id).map_or(0, |token| token.len());
    let of_added = added.iter().map(|(id, token)| token.content.len().max(normalized(id))).max();
    Some(Longest { bytes: of_model.max(of_added)?.max(1) * growth, unknown })
}

/// The most bytes of a text that the normalizer turns into one byte.
fn growth(normalizer: &Value) -> Option<usize> {
    match normalizer["type"].as_str() {
        None if normalizer.is_null() => Some(1),
        Some("NFC") => Some(NFC),
        Some("Prepend") => Some(1),
        Some("Replace") => {
            let (from, to) = (normalizer["pattern"]["String"].as_str()?, normalizer["content"].as_str()?);
            (to.len() >= from.len()).then_some(1)
        }
        Some("Sequence") => normalizer["normalizers"].as_array()?.iter().map(growth).product(),
        _ => None,
    }
}

/// Whether the pieces that a text is cut into contain all of the text.
fn keeps_all(cut: &Value) -> bool {
    match cut["type"].as_str() {
        None => cut.is_null(),
        Some("ByteLevel" | "Metaspace" | "Digits") => true,
        Some("Split" | "Punctuation") => {
            cut["behavior"].as_str().is_some_and(|behavior| behavior != "Removed")
        }
        Some("Sequence") => cut["pretokenizers"].as_array().is_some_and(|all| all.iter().all(keeps_all)),
        _ => false,
    }
}

fn has(cut: &Value, kind: &str) -> bool {
    let in_sequence =
        || cut["pretokenizers"].as_array().is_some_and(|all| all.iter().any(|one| has(one, kind)));
    cut["type"] == kind || in_sequence()
}

/// The bytes without a token: the letter for the byte is no token, or the byte tokens are not complete. In a published tokenizer
/// that was made from text, these are a few control characters, and bytes that begin no character.
fn unknown(model: &BPE, byte_level: bool) -> Option<Vec<u8>> {
    if model.continuing_subword_prefix.is_some() || model.end_of_word_suffix.is_some() {
        return None;
    }
    let vocabulary: HashMap<String, u32> = model.get_vocab();
    if byte_level {
        let letters =
            (0..0x200).filter_map(|code| Some((char::from_u32(code)?, letter_byte(char::from_u32(code)?)?)));
        let missing =
            letters.filter(|(letter, _)| !vocabulary.contains_key(letter.encode_utf8(&mut [0; 4]) as &str));
        let mut missing: Vec<u8> = missing.map(|(_, byte)| byte).collect();
        missing.sort_unstable();
        return Some(missing);
    }
    let knows = |byte: u8| vocabulary.contains_key(&format!("<0x{byte:02X}>"));
    (model.byte_fallback && (0..=u8::MAX).all(knows)).then(Vec::new)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn byte_level(change: impl FnOnce(&mut Value)) -> Tokenizer {
        let letters = (0..0x200).filter_map(char::from_u32).filter(|letter| letter_byte(*letter).is_some());
        let mut vocabulary: serde_json::Map<String, Value> =
            letters.enumerate().map(|(id, letter)| (letter.to_string(), id.into())).collect();
        assert_eq!(vocabulary.len(), 256);
        for (id, token) in [(256, "he"), (257, "Ġhe"), (258, "ðŁ")] {
            vocabulary.insert(token.into(), id.into());
        }
        let mut file = json!({
            "version": "1.0",
            "added_tokens": [{"id": 259, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": "\\d"}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]},
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": ["h e", "Ġ he", "ð Ł"]},
        });
        change(&mut file);
        file.to_string().parse().unwrap()
    }

    fn fallback(change: impl FnOnce(&mut Value)) -> Tokenizer {
        let mut vocabulary: serde_json::Map<String, Value> =
            (0..256_u32).map(|byte| (format!("<0x{byte:02X}>"), byte.into())).collect();
        for (id, token) in [(256, "<unk>"), (257, "▁"), (258, "h"), (259, "e"), (260, "he"), (261, "▁he")]
        {
            vocabulary.insert(token.into(), id.into());
        }
        let mut file = json!({
            "version": "1.0",
            "added_tokens": [],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": ["h e", "▁ he"], "unk_token": "<unk>",
                "fuse_unk": true, "byte_fallback": true},
        });
        change(&mut file);
        file.to_string().parse().unwrap()
    }

    #[test]
    fn a_text_has_at_least_so_many_tokens_as_its_bytes_say() {
        let nfc = byte_level(|file| file["normalizer"] = json!({"type": "NFC"}));
        let mut random = fastrand::Rng::with_seed(11);
        // Singletons and marks that compose, spaces, text without a token, and special tokens.
        let pieces =
            ["he", " he", "<|end|>", "🦀", "\u{1fbe}\u{344}", "\u{212a}", "e\u{301}", "  ", "\n", "漢", "\0"];
        for (tokenizer, longest) in [(byte_level(|_| ()), 7), (nfc, 28), (fallback(|_| ()), 6)] {
            assert_eq!(longest_token(&tokenizer), Some(Longest { bytes: longest, unknown: vec![] }));
            for _ in 0..200 {
                let text: String =
                    (0..random.usize(1..60)).map(|_| pieces[random.usize(..pieces.len())]).collect();
                let tokens = tokenizer.encode_fast(text.as_str(), false).unwrap().len();
                assert!(tokens * longest >= text.len(), "{tokens} tokens, {text:?}");
            }
            let text = "\u{1fbe}\u{344}".repeat(50);
            let tokens = tokenizer.encode_fast(text.as_str(), false).unwrap().len();
            assert!(tokens * longest >= text.len(), "{tokens}");
        }
    }

    #[test]
    fn bytes_that_no_token_knows_do_not_count() {
        // Like SmolLM2's tokenizer: it lacks tokens for some control characters, and for first bytes of characters that are not
        // assigned.
        let tokenizer = byte_level(|file| {
            let vocabulary = file["model"]["vocab"].as_object_mut().unwrap();
            for letter in ["Ā", "Ą", "ñ", "ÿ"] {
                vocabulary.remove(letter);
            }
        });
        let limit = longest_token(&tokenizer).unwrap();
        assert_eq!(limit, Longest { bytes: 7, unknown: vec![0, 4, 0xf1, 0xff] });
        let mut random = fastrand::Rng::with_seed(12);
        let pieces = ["he", "\0", "\u{4}", "\u{50000}", "🦀", " he", "\0\0\0", "<|end|>"];
        for _ in 0..300 {
            let text: String =
                (0..random.usize(1..60)).map(|_| pieces[random.usize(..pieces.len())]).collect();
            let tokens = tokenizer.encode_fast(text.as_str(), false).unwrap().len();
            assert!(tokens >= limit.least_tokens(&text), "{tokens} tokens, {text:?}");
        }
        assert_eq!(limit.least_tokens(&" ".repeat(700)), 100);
        assert_eq!(limit.least_tokens(&"\0".repeat(700)), 0);
    }

    #[test]
    fn nothing_is_said_of_tokenizers_that_drop_text_or_write_much_as_one_token() {
        let unlimited = [
            byte_level(|file| {
                file["normalizer"] = json!({"type": "Strip", "strip_left": true, "strip_right": true})
            }),
            byte_level(|file| file["normalizer"] = json!({"type": "NFKC"})),
            byte_level(|file| {
                let replaced = json!({"type": "Replace", "pattern": {"String": "hehe"}, "content": "h"});
                file["normalizer"] = replaced;
            }),
            byte_level(|file| file["pre_tokenizer"]["pretokenizers"][0]["behavior"] = json!("Removed")),
            byte_level(|file| file["pre_tokenizer"] = json!({"type": "WhitespaceSplit"})),
            byte_level(|file| file["added_tokens"][0]["rstrip"] = json!(true)),
            fallback(|file| file["model"]["byte_fallback"] = json!(false)),
            fallback(|file| {
                file["model"]["vocab"].as_object_mut().unwrap().remove("<0x7F>");
            }),
            fallback(|file| {
                file["model"] = json!({"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"});
            }),
        ];
        for (index, tokenizer) in unlimited.iter().enumerate() {
            assert_eq!(longest_token(tokenizer), None, "{index}");
        }
    }
}
