//! A small byte-level BPE tokenizer, learned from a text in this file, in Hugging Face's file format.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// Number of learned merges.
const MERGES: usize = 300;

/// Text that the merges are learned from.
const TEXT: &str = include_str!("text.txt");

/// Special tokens, in order of their ids, after the bytes and the merges.
pub const SPECIAL_TOKENS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// How text is cut before merging: words with their leading space, single digits, runs of other signs, white space.
const PATTERN: &str = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Number of all tokens.
pub(super) fn size() -> usize {
    256 + MERGES + SPECIAL_TOKENS.len()
}

/// Ids of [`SPECIAL_TOKENS`].
pub(super) fn special_ids() -> [usize; 3] {
    [256 + MERGES, 257 + MERGES, 258 + MERGES]
}

/// tokenizer.json.
pub(super) fn json() -> Value {
    let mut vocabulary = Map::new();
    for byte in 0..=255u8 {
        vocabulary.insert(letter(byte).to_string(), json!(byte));
    }
    let merges = learn();
    assert_eq!(merges.len(), MERGES, "the text is too short for this many merges");
    for (index, (left, right)) in merges.iter().enumerate() {
        vocabulary.insert(format!("{left}{right}"), json!(256 + index));
    }
    let added: Vec<_> = SPECIAL_TOKENS
        .iter()
        .zip(special_ids())
        .map(|(content, id)| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true,
            })
        })
        .collect();
    let bytes =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    let split =
        json!({ "type": "Split", "pattern": { "Regex": PATTERN }, "behavior": "Isolated", "invert": false });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [split, bytes] },
        "post_processor": bytes,
        "decoder": bytes,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocabulary,
            "merges": merges.iter().map(|(left, right)| json!([left, right])).collect::<Vec<_>>(),
        },
    })
}

/// Learns merges: always the most frequent neighbours, and among equals the first in alphabetical order.
fn learn() -> Vec<(String, String)> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for word in TEXT.split([' ', '\n']) {
        let word = word.trim_end_matches(|sign: char| !sign.is_alphabetic());
        *counts.entry(format!(" {word}")).or_default() += 1;
    }
    let mut words: Vec<(Vec<String>, usize)> = counts
        .into_iter()
        .map(|(word, count)| (word.bytes().map(|byte| letter(byte).to_string()).collect(), count))
        .collect();
    let mut merges = Vec::new();
    while merges.len() < MERGES {
        let mut pairs: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for (parts, count) in &words {
            for pair in parts.windows(2) {
                *pairs.entry((&pair[0], &pair[1])).or_default() += count;
            }
        }
        let best = pairs.iter().rev().max_by_key(|(_, count)| **count);
        let Some((&(left, right), _)) = best else { break };
        let merge = (left.to_owned(), right.to_owned());
        for (parts, _) in &mut words {
            let mut index = 0;
            while index + 1 < parts.len() {
                if parts[index] == merge.0 && parts[index + 1] == merge.1 {
                    parts[index].push_str(&merge.1);
                    parts.remove(index + 1);
                }
                index += 1;
            }
        }
        merges.push(merge);
    }
    merges
}

/// The letter that stands for a byte in byte-level BPE files: the byte's own if it is visible, else one from U+0100 on.
fn letter(byte: u8) -> char {
    let visible = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if visible(byte) {
        return char::from(byte);
    }
    let hidden = (0..byte).filter(|&before| !visible(before)).count() as u32;
    char::from_u32(0x100 + hidden).unwrap_or(char::REPLACEMENT_CHARACTER)
}
