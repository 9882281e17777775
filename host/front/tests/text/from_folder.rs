//! GGUF files that have only a tokenizer, as llama.cpp's converter writes them.

use std::collections::HashMap;
use std::path::Path;

use host_gguf::{Array, Metadata, Value};
use host_tests::gguf::GgufFile;
use serde_json::Value as Json;

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

fn json(folder: &Path, name: &str) -> Json {
    serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap()
}

/// The GGUF file for a folder with `tokenizer.json`. `model` is `gpt2`, whose text is cut by `pre`, or `llama`.
pub fn gguf_of(folder: &Path, model: &str, pre: Option<&str>) -> GgufFile {
    let (tokenizer, settings) = (json(folder, "tokenizer.json"), json(folder, "tokenizer_config.json"));
    let mut tokens: Vec<(u64, &str, i32)> = Vec::new();
    for (token, id) in tokenizer["model"]["vocab"].as_object().unwrap() {
        let is_byte = model == "llama" && token.starts_with("<0x");
        tokens.push((id.as_u64().unwrap(), token, if is_byte { BYTE } else { NORMAL }));
    }
    for added in tokenizer["added_tokens"].as_array().unwrap() {
        let (id, token) = (added["id"].as_u64().unwrap(), added["content"].as_str().unwrap());
        let kind = match added["special"].as_bool().unwrap() {
            true if token == "<unk>" => UNKNOWN,
            true => CONTROL,
            false => USER_DEFINED,
        };
        tokens.retain(|(known, ..)| *known != id);
        tokens.push((id, token, kind));
    }
    tokens.sort_unstable();
    assert!(tokens.iter().zip(0..).all(|((id, ..), place)| *id == place), "ids without gaps");

    let mut file = GgufFile::default();
    file.text("general.architecture", "llama").text("tokenizer.ggml.model", model);
    file.texts("tokenizer.ggml.tokens", tokens.iter().map(|(_, token, _)| *token));
    file.integers("tokenizer.ggml.token_type", &tokens.iter().map(|(.., kind)| *kind).collect::<Vec<i32>>());
    let merges: Vec<String> = tokenizer["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
    if let Some(pre) = pre {
        file.text("tokenizer.ggml.pre", pre);
        file.texts("tokenizer.ggml.merges", merges.iter().map(String::as_str));
    } else {
        // Tokens have scores in the order of the merges that make them. The score of a token that no merge makes is never read.
        let mut ranks: HashMap<String, f32> = HashMap::new();
        for (rank, merge) in merges.iter().enumerate() {
            ranks.entry(merge.replace(' ', "")).or_insert(-(rank as f32));
        }
        let score = |token: &str| ranks.get(token).copied().unwrap_or(f32::MIN);
        file.numbers(
            "tokenizer.ggml.scores",
            &tokens.iter().map(|(_, token, _)| score(token)).collect::<Vec<f32>>(),
        );
    }
    for (name, key) in
        [("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"), ("unk_token", "unknown_token_id")]
    {
        let named = settings[name].as_str().or_else(|| settings[name]["content"].as_str());
        if let Some((id, ..)) = named.and_then(|named| tokens.iter().find(|(_, token, _)| *token == named)) {
            file.u32(&format!("tokenizer.ggml.{key}"), u32::try_from(*id).unwrap());
        }
    }
    let adds_bos = tokenizer["post_processor"].to_string().contains("SpecialToken");
    file.flag("tokenizer.ggml.add_bos_token", adds_bos);
    if let Some(template) = settings["chat_template"].as_str() {
        file.text("tokenizer.chat_template", template);
    }
    file
}

/// A merge as a text. The file has it as a text or, in newer versions, as a pair.
fn merge(merge: &Json) -> String {
    match merge {
        Json::String(text) => text.clone(),
        pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
    }
}

/// A file with the same metadata and no tensors, whose text is cut in another way.
pub fn with_pre(metadata: &Metadata, pre: &str) -> GgufFile {
    let mut file = GgufFile::default();
    for (key, value) in metadata.iter() {
        match value {
            Value::F32(number) => file.f32(key, *number),
            Value::Text(text) => file.text(key, text),
            Value::U32(number) => file.u32(key, *number),
            Value::Bool(flag) => file.flag(key, *flag),
            Value::Array(Array::Text(texts)) => file.texts(key, texts.iter()),
            Value::Array(Array::I32(numbers)) => file.integers(key, numbers),
            other => panic!("{key} is {other}"),
        };
    }
    file.text("tokenizer.ggml.pre", pre);
    file
}
