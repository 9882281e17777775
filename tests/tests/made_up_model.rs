//! The made-up models are well-formed and reproducible.

#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

use std::collections::BTreeMap;
use std::path::Path;

use host_tests::model::{SPECIAL_TOKENS, TinyModel, tiny_qwen3};
use tokenizers::Tokenizer;

fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
        .collect()
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_seed_others() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, seed| {
        tiny_qwen3(&directory.path().join(name), seed).unwrap();
        files(&directory.path().join(name))
    };
    let (a, b, c) = (write("a", 7), write("b", 7), write("c", 8));
    assert!(a == b);
    assert!(a["model.safetensors"] != c["model.safetensors"]);
    assert!(a["tokenizer.json"] == c["tokenizer.json"]);
}

#[test]
fn the_tokenizer_loads_and_gives_every_text_back() {
    let directory = tempfile::tempdir().unwrap();
    tiny_qwen3(directory.path(), 1).unwrap();
    let tokenizer = Tokenizer::from_file(directory.path().join("tokenizer.json")).unwrap();
    assert_eq!(tokenizer.get_vocab_size(true), TinyModel::default().vocabulary());
    for text in
        ["The keeper counts the lamps.", "  two  spaces\n\tand 42 tabs\n", "äöü 日本語 🦀 \u{0}\u{7f}", ""]
    {
        let ids = tokenizer.encode(text, true).unwrap().get_ids().to_vec();
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
    }
    let words = tokenizer.encode("The keeper of the harbour", false).unwrap();
    assert!(words.get_ids().len() < 12, "merges are used: {:?}", words.get_tokens());
    for special in SPECIAL_TOKENS {
        assert_eq!(
            tokenizer.encode(special, false).unwrap().get_ids(),
            [tokenizer.token_to_id(special).unwrap()]
        );
    }
}
