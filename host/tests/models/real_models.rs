//! Real models: every arrangement of workers gives the same tokens, every type of weights with the same values does too, and the
//! tokens are llama.cpp's.

use std::path::{Path, PathBuf};

use host_front::text::TextModel;
use host_tests::caches::{LOADED, RESTORES};
use host_tests::cluster::{Cluster, Start};
use host_tests::fetched::Artifact;
use host_tests::gguf::retyped;
use host_tests::llama_cpp;
use host_tests::model::Stored;
use host_tests::plugin_files;
use serde_json::{Value, json};

/// Tokens of an answer.
const COUNT: u32 = 24;
/// Tokens of a long answer beside llama.cpp's.
const LONG_COUNT: u32 = 48;

/// Short prompts: facts, code, another language, numbers, a text without an end.
const PROMPTS: [&str; 8] = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "Die Hauptstadt von Deutschland ist",
    "1, 2, 3, 5, 8, 13,",
    "The three primary colours are red,",
    "Q: Why is the sky blue?\nA:",
];

/// A text of many pages, longer than the window of Gemma-3's layers (512 tokens): about 28 tokens for each day.
fn long(days: u32) -> String {
    let day = |day: u32| {
        format!(
            "On day {day} the crew of the ship measured {} degrees, caught {} fish and sailed {} miles towards the north. ",
            day * 7 % 31,
            day * 13 % 50,
            day * 29 % 97
        )
    };
    format!("{}On the last day the crew", (1..=days).map(day).collect::<String>())
}

/// A server of a model with these flags.
fn serve(model: &Path, flags: &[&str], config: &str, workers: usize) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm", "hicache-file", "swa"]);
    let given = ["--model", model.to_str().unwrap(), "--plugins-dir", plugins.path().to_str().unwrap()];
    let flags = given.iter().chain(flags).map(|flag| (*flag).to_owned()).collect();
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    let start = Start { program, flags, config: config.to_owned(), workers };
    (Cluster::start(&start), plugins)
}

/// Tokens of an answer with the bits of their log probabilities. They are equal only if the computation was.
type Answer = Vec<(u64, u64)>;

fn answer(cluster: &Cluster, prompt: &[u32]) -> (Answer, u64) {
    let sampling = json!({ "max_new_tokens": COUNT, "temperature": 0, "ignore_eos": true });
    let body = json!({ "input_ids": prompt, "sampling_params": sampling, "return_logprob": true });
    let (status, text) = cluster.post("/generate", &body.to_string()).unwrap();
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    let meta = &answer["meta_info"];
    let tokens = meta["output_token_logprobs"].as_array().unwrap().iter();
    let tokens = tokens.map(|token| (token[1].as_u64().unwrap(), token[0].as_f64().unwrap().to_bits()));
    (tokens.collect(), meta["transferred_bytes"].as_u64().unwrap_or(0))
}

/// Ids of a text that begins a conversation.
fn ids(model: &Path, text: &str) -> Vec<u32> {
    TextModel::load(model).unwrap().tokenizer.encode(text, true).unwrap()
}

/// Compares the model's answer from one worker without a cache with answers that are split over ranks, come through caches and a
/// storage tier, and come after a restart. All must be equal.
fn every_arrangement_answers_alike(model: &Path, prompt: &str) -> Answer {
    let prompt = ids(model, prompt);
    let alone = |ranks: &str| {
        let flags = ["--role", "aggregated", "--tp", ranks, "--kv-dtype", "bf16"];
        let (cluster, _plugins) = serve(model, &flags, "", 1);
        answer(&cluster, &prompt).0
    };
    let expected = alone("1");
    assert_eq!(expected.len(), COUNT as usize);
    assert_eq!(alone("2"), expected, "--tp 2");

    let pages = tempfile::tempdir().unwrap();
    let config = format!("{RESTORES}[plugin.hicache-file]\n{LOADED}dir = {:?}\n", pages.path());
    let flags = ["--plugins", "shm,hicache-file", "--prefill-tp", "2", "--kv-dtype", "bf16"];
    let flags = [&flags[..], &["--prefill-radix-cache", "--decode-radix-cache"]].concat();
    let (mut split, _plugins) = serve(model, &flags, &config, 2);
    let (first, moved) = answer(&split, &prompt);
    assert_eq!(first, expected, "split");
    assert!(moved > 0);
    let (second, moved_again) = answer(&split, &prompt);
    assert_eq!(second, expected, "through caches");
    assert!(moved_again < moved, "decode kept its pages: {moved_again} of {moved}");
    // A worker stores all waiting pages before it ends.
    assert_eq!(split.interrupt(), Some(0), "{}", split.log());
    let (again, _plugins) = serve(model, &flags, &config, 2);
    assert_eq!(answer(&again, &prompt).0, expected, "restored");
    again.wait("pages to be restored", || again.all_storage_pages("read") > 0.0);
    expected
}

/// Writes the model with its weights in this type into a folder.
fn in_type(source: &Path, stored: Stored, folder: &Path) -> PathBuf {
    let path = folder.join(format!("{stored:?}.gguf"));
    std::fs::write(&path, retyped(source, stored).bytes()).unwrap();
    path
}

#[test]
fn smollm2_answers_alike_in_every_arrangement_as_it_is_and_in_f32() {
    let (model, folder) = (Artifact::SmolLm2.path(), tempfile::tempdir().unwrap());
    let answer = every_arrangement_answers_alike(&model, &long(8));
    let wide = in_type(&model, Stored::F32, folder.path());
    assert_eq!(
        every_arrangement_answers_alike(&wide, &long(8)),
        answer,
        "quantized weights are expanded to these values"
    );
}

#[test]
fn smollm2_answers_alike_in_every_arrangement_in_bf16() {
    let folder = tempfile::tempdir().unwrap();
    every_arrangement_answers_alike(
        &in_type(&Artifact::SmolLm2.path(), Stored::Bf16, folder.path()),
        &long(8),
    );
}

#[test]
fn smollm2_answers_alike_in_every_arrangement_in_f16() {
    let folder = tempfile::tempdir().unwrap();
    every_arrangement_answers_alike(
        &in_type(&Artifact::SmolLm2.path(), Stored::F16, folder.path()),
        &long(8),
    );
}

/// The file has weights of types Q4_K, Q5_0, Q6_K and Q8_0.
#[test]
fn gemma3_answers_alike_in_every_arrangement() {
    let (model, prompt) = (Artifact::Gemma3.path(), long(24));
    assert!(ids(&model, &prompt).len() > 600, "longer than a window");
    every_arrangement_answers_alike(&model, &prompt);
}

/// llama.cpp rounds activations before it multiplies them with quantized weights, so it gets weights in f32, and keeps KV in f32.
/// It adds in another order, so logits differ by rounding: answers diverge where two tokens are nearly equally likely.
fn llama_cpp_answers_alike(source: &Path) {
    let folder = tempfile::tempdir().unwrap();
    let model = in_type(source, Stored::F32, folder.path());
    let flags = ["--role", "aggregated", "--kv-dtype", "f32"];
    let (cluster, _plugins) = serve(&model, &flags, "", 1);
    let ends = TextModel::load(&model).unwrap().end;
    let short: Vec<String> = PROMPTS.iter().map(|text| (*text).to_owned()).collect();
    for (count, texts) in [(COUNT, short), (LONG_COUNT, vec![long(24), long(52)])] {
        let theirs = llama_cpp::greedy(&model, count, &texts);
        assert_eq!(theirs.len(), texts.len());
        for (text, theirs) in texts.iter().zip(theirs) {
            assert_eq!(theirs.prompt, ids(&model, text), "{text:?}");
            let ours = cluster.generate(&theirs.prompt, count).unwrap().tokens;
            let ended = theirs.answer.last().is_some_and(|last| ends.contains(last));
            assert!(theirs.answer.len() == count as usize || ended, "{theirs:?}");
            let theirs: Vec<u64> = theirs.answer.into_iter().map(u64::from).collect();
            assert_eq!(ours[..theirs.len()], theirs, "{text:?}");
        }
    }
}

#[test]
fn smollm2_answers_as_llama_cpp_does() {
    llama_cpp_answers_alike(&Artifact::SmolLm2.path());
}

#[test]
fn gemma3_answers_as_llama_cpp_does() {
    llama_cpp_answers_alike(&Artifact::Gemma3.path());
}
