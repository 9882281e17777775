//! Compares tokenizers and chat templates from GGUF files with llama.cpp, and with the models' own `tokenizer.json`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod from_folder;
mod texts;

use std::path::Path;

use host_front::text::TextModel;
use host_tests::fetched::Artifact;
use host_tests::gguf::GgufFile;
use host_tests::llama_cpp;
use serde_json::{Map, json};

use from_folder::gguf_of;
use texts::varied;

/// The ids of a text, as for a rendered template: without special tokens around it.
fn ids(model: &TextModel, text: &str) -> Vec<u32> {
    model.tokenizer.encode(text, false).unwrap()
}

/// Shows the first few texts whose ids are not as expected, and fails the test if there is one.
fn assert_same(
    what: &str,
    texts: &[String],
    found: impl Fn(&str) -> Vec<u32>,
    expected: impl Fn(usize) -> Vec<u32>,
) {
    let differs = |(index, text): (usize, &String)| {
        let (found, expected) = (found(text), expected(index));
        (found != expected).then(|| format!("{text:?}\n  found    {found:?}\n  expected {expected:?}"))
    };
    let differing: Vec<String> = texts.iter().enumerate().filter_map(differs).collect();
    let shown = differing.iter().take(5).cloned().collect::<Vec<String>>().join("\n");
    assert!(differing.is_empty(), "{what}: {} of {} texts differ:\n{shown}", differing.len(), texts.len());
}

/// Checks that every text comes back from its tokens, one by one. Skips texts with special tokens.
fn assert_streams_back(model: &TextModel, texts: &[String]) {
    for text in texts {
        let tokens = ids(model, text);
        // SentencePiece writes a space as `▁`, so it cannot tell the two apart.
        if text.contains('▁') || tokens.iter().any(|&token| model.tokenizer.is_special(token)) {
            continue;
        }
        let mut stream = model.tokenizer.clone().stream(host_front::text::Specials::default());
        let mut back: String = tokens.iter().map(|&token| stream.push(token)).collect();
        back.push_str(&stream.finish());
        assert_eq!(&back, text, "{tokens:?}");
    }
}

fn load(file: &GgufFile) -> Result<TextModel, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    TextModel::load(&path).map_err(|error| error.to_string())
}

fn rendered(model: &TextModel, extra: &Map<String, serde_json::Value>) -> String {
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is 1 < 2 & \"so\"?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Und auf Deutsch, 日本語 👍?"},
    ]);
    model.template.as_ref().unwrap().render(&messages, extra, 1_735_689_600).unwrap()
}

#[test]
fn smollm2_cuts_text_as_llama_cpp_does() {
    let file = Artifact::SmolLm2.path();
    let (model, texts) = (TextModel::load(&file).unwrap(), varied());
    let theirs = llama_cpp::tokens(&[&file], &texts);
    assert_same("smollm", &texts, |text| ids(&model, text), |index| theirs[0][index].clone());
    assert_streams_back(&model, &texts);
    assert_eq!(model.end, [0, 2], "<|endoftext|> and <|im_end|>");
    assert_eq!(model.tokenizer.vocabulary(), 49152);
    assert_eq!(model.tokenizer.encode("a", true).unwrap(), ids(&model, "a"), "its file adds no begin");
    assert_eq!(
        rendered(&model, &Map::new()),
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIs 1 < 2 & \"so\"?<|im_end|>\n<|im_start|>assistant\nYes.\
         <|im_end|>\n<|im_start|>user\nUnd auf Deutsch, 日本語 👍?<|im_end|>\n<|im_start|>assistant\n"
    );
}

#[test]
fn gemma3_cuts_text_as_llama_cpp_and_its_own_tokenizer_do() {
    let file = Artifact::Gemma3.path();
    let (model, texts) = (TextModel::load(&file).unwrap(), varied());
    let own = TextModel::load(&Artifact::Tokenizer("gemma3").path()).unwrap();
    assert_same("tokenizer.json", &texts, |text| ids(&model, text), |index| ids(&own, &texts[index]));
    let theirs = llama_cpp::tokens(&[&file], &texts);
    assert_same("llama.cpp", &texts, |text| ids(&model, text), |index| theirs[0][index].clone());
    assert_streams_back(&model, &texts);
    assert_eq!(model.end, [1, 106], "<eos> and <end_of_turn>");
    assert_eq!(model.tokenizer.encode("a", true).unwrap(), own.tokenizer.encode("a", true).unwrap());
    assert!(model.template.is_none(), "the file is of the base model");
}

/// Compares a file that was made from a folder with the folder: ids, the frame of a plain prompt, and rendered templates.
fn assert_as_folder(name: &'static str, model: &str, pre: Option<&str>) -> (TextModel, TextModel) {
    let folder = Artifact::Tokenizer(name).path();
    let (ours, own) = (load(&gguf_of(&folder, model, pre)).unwrap(), TextModel::load(&folder).unwrap());
    let texts = varied();
    assert_same(name, &texts, |text| ids(&ours, text), |index| ids(&own, &texts[index]));
    assert_eq!(ours.tokenizer.encode("a b", true).unwrap(), own.tokenizer.encode("a b", true).unwrap());
    assert_eq!(ours.tokenizer.vocabulary(), own.tokenizer.vocabulary());
    assert_eq!(ours.template.is_some(), own.template.is_some());
    if ours.template.is_some() {
        for extra in [json!({}), json!({"add_generation_prompt": false}), json!({"enable_thinking": false})] {
            let extra = extra.as_object().unwrap();
            assert_eq!(rendered(&ours, extra), rendered(&own, extra));
        }
    }
    for token in (0..ours.tokenizer.vocabulary()).step_by(97) {
        assert_eq!(ours.tokenizer.token_bytes(token), own.tokenizer.token_bytes(token), "{token}");
    }
    (ours, own)
}

#[test]
fn llama3_cuts_text_as_its_own_tokenizer_does() {
    let (model, _) = assert_as_folder("llama3", "gpt2", Some("llama-bpe"));
    assert_streams_back(&model, &varied());
    assert_eq!(model.end, [128_001, 128_009], "<|end_of_text|> and <|eot_id|>");
}

#[test]
fn qwen3_cuts_text_as_its_own_tokenizer_does() {
    let (model, _) = assert_as_folder("qwen3", "gpt2", Some("qwen2"));
    let composed = ids(&model, "\u{e9}tude");
    assert_eq!(ids(&model, "e\u{301}tude"), composed, "text is composed first");
}

#[test]
fn gpt2_cuts_text_as_its_own_tokenizer_does() {
    assert_as_folder("gpt2", "gpt2", Some("gpt-2"));
}

#[test]
fn deepseek3_cuts_text_as_its_own_tokenizer_does() {
    assert_as_folder("deepseek3", "gpt2", Some("deepseek-v3"));
}

#[test]
fn llama2_cuts_text_as_its_own_tokenizer_does() {
    let (model, own) = assert_as_folder("llama2", "llama", None);
    for text in varied() {
        let tokens = ids(&model, &text);
        let streamed = |model: &TextModel| {
            let mut stream = model.tokenizer.clone().stream(host_front::text::Specials::default());
            tokens.iter().map(|&token| stream.push(token)).collect::<String>() + &stream.finish()
        };
        assert_eq!(streamed(&model), streamed(&own), "{text:?}");
    }
}

#[test]
fn names_of_models_that_have_no_package_cut_text_as_llama_cpp_does() {
    // The way to cut words does not depend on the vocabulary, so the test uses SmolLM2's, which is small.
    let names = [
        "smaug-bpe",
        "starcoder",
        "refact",
        "deepseek-r1-qwen",
        "deepseek-coder",
        "llama-bpe",
        "gpt-2",
        "default",
    ];
    let gguf = host_gguf::Gguf::open(&Artifact::SmolLm2.path()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &&str| {
        let path = folder.path().join(format!("{name}.gguf"));
        std::fs::write(&path, from_folder::with_pre(gguf.metadata(), name).bytes()).unwrap();
        path
    };
    let files: Vec<_> = names.iter().map(write).collect();
    let files: Vec<&Path> = files.iter().map(|path| path.as_path()).collect();
    let texts = varied();
    let theirs = llama_cpp::tokens(&files, &texts);
    assert_eq!(theirs.len(), files.len());
    for ((name, file), theirs) in names.iter().zip(files).zip(theirs) {
        let model = TextModel::load(file).unwrap();
        assert_same(name, &texts, |text| ids(&model, text), |index| theirs[index].clone());
    }
}
