//! A model directory that is wrong in one way is refused with an error that names it.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use host_core::Dtype;
use host_executor::cpu::{CpuExecutor, CpuOptions, read_shape};
use host_executor::model::LoadError;
use host_executor::{ModelShape, Sliding};
use host_tests::model::{Family, Stored, TinyModel, tiny_gemma3, tiny_qwen3};
use serde_json::{Value, json};
use tempfile::TempDir;

fn model() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    tiny_qwen3(directory.path(), 1).unwrap();
    directory
}

fn load(directory: &Path) -> Result<ModelShape, LoadError> {
    let options = CpuOptions { threads: 1, ..CpuOptions::default() };
    CpuExecutor::load(directory, options).map(|executor| host_executor::Executor::shape(&executor).clone())
}

fn error(directory: &Path) -> String {
    load(directory).unwrap_err().to_string()
}

fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

/// Changes the header of a safetensors file and leaves its data alone.
fn edit_header(path: &Path, change: impl FnOnce(&mut Value)) {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    change(&mut header);
    let header = header.to_string();
    let mut changed = (header.len() as u64).to_le_bytes().to_vec();
    changed.extend_from_slice(header.as_bytes());
    changed.extend_from_slice(&bytes[8 + length..]);
    fs::write(path, changed).unwrap();
}

#[test]
fn configurations_that_are_wrong_or_unsupported_are_refused() {
    let directory = model();
    let path = directory.path().join("config.json");
    let original = fs::read(&path).unwrap();
    for (key, value, says) in [
        ("architectures", json!(["GPT2LMHeadModel"]), "architectures is [\"GPT2LMHeadModel\"], which"),
        ("architectures", json!(null), "architectures is absent"),
        ("hidden_size", json!(null), "hidden_size is absent, expected a whole number"),
        ("hidden_size", json!(-4), "hidden_size is -4"),
        ("hidden_size", json!("64"), "hidden_size is \"64\""),
        ("hidden_size", json!(68), "hidden_size is 68"),
        ("num_hidden_layers", json!(0), "num_hidden_layers is 0"),
        ("vocab_size", json!(u64::MAX), "vocab_size is 18446744073709551615"),
        (
            "num_key_value_heads",
            json!(3),
            "num_key_value_heads is 3, expected a divisor of num_attention_heads 4",
        ),
        ("head_dim", json!(24), "head_dim is 24"),
        ("rms_norm_eps", json!("tiny"), "rms_norm_eps is \"tiny\""),
        ("hidden_act", json!("gelu"), "hidden_act is \"gelu\""),
        ("attention_bias", json!(true), "attention_bias is true"),
        ("use_sliding_window", json!(true), "use_sliding_window is true"),
        ("rope_scaling", json!({ "rope_type": "yarn" }), "rope_scaling is {\"rope_type\":\"yarn\"}"),
        ("rope_scaling", json!({ "rope_type": "llama3" }), "factor is absent"),
        ("quantization_config", json!({ "bits": 4 }), "quantization_config is {\"bits\":4}"),
    ] {
        fs::write(&path, &original).unwrap();
        edit(&path, |config| config[key] = value.clone());
        let error = error(directory.path());
        assert!(error.contains("config.json") && error.contains(says), "{key} {value}: {error}");
        assert_eq!(read_shape(directory.path()).unwrap_err().to_string(), error);
    }
    fs::write(&path, "{").unwrap();
    assert!(error(directory.path()).contains("cannot parse"));
    fs::write(&path, vec![b' '; 2 << 20]).unwrap();
    assert!(error(directory.path()).contains("2097152 bytes, at most 1048576"));
    fs::remove_file(&path).unwrap();
    assert!(matches!(load(directory.path()), Err(LoadError::Read { file, .. }) if file == path));
}

#[test]
fn models_of_the_gemma_family_that_are_not_computed_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    tiny_gemma3(directory.path(), 1).unwrap();
    let shape = load(directory.path()).unwrap();
    assert_eq!(shape, read_shape(directory.path()).unwrap());
    assert_eq!((shape.layers, shape.sliding), (7, Some(Sliding { layers: 5, window: 20 })));
    assert_eq!((shape.page_layers(), shape.window_parts()), (2, 3));
    let path = directory.path().join("config.json");
    let original = fs::read(&path).unwrap();
    let sliding = json!(vec!["sliding_attention"; 7]);
    for (key, value, says) in [
        (
            "architectures",
            json!(["Gemma2ForCausalLM"]),
            "supports Qwen3ForCausalLM, LlamaForCausalLM, Gemma3ForCausalLM",
        ),
        (
            "architectures",
            json!(["Gemma3ForConditionalGeneration"]),
            "which the cpu executor does not support",
        ),
        ("model_type", json!("gemma2"), "model_type is \"gemma2\""),
        ("hidden_activation", json!("silu"), "supports gelu_pytorch_tanh"),
        (
            "attn_logit_softcapping",
            json!(50.0),
            "attn_logit_softcapping is 50.0, which the cpu executor does not",
        ),
        ("final_logit_softcapping", json!(30.0), "it supports no soft capping"),
        ("use_bidirectional_attention", json!(true), "use_bidirectional_attention is true"),
        ("global_head_dim", json!(32), "it supports layers that all have the same heads"),
        ("layer_types", sliding, "at least one layer has full attention"),
        ("sliding_window_pattern", json!(8), "at least one layer has full attention"),
        ("layer_types", json!(["full_attention"]), "for each of 7 layers"),
        (
            "layer_types",
            json!(vec!["chunked_attention"; 7]),
            "expected \"sliding_attention\" or \"full_attention\"",
        ),
        ("sliding_window", json!(0), "sliding_window is 0"),
        ("query_pre_attn_scalar", json!(-1), "query_pre_attn_scalar is -1"),
        ("rope_local_base_freq", json!("10"), "rope_local_base_freq is \"10\""),
    ] {
        fs::write(&path, &original).unwrap();
        edit(&path, |config| config[key] = value.clone());
        let error = error(directory.path());
        assert!(error.contains("config.json") && error.contains(says), "{key} {value}: {error}");
    }
    fs::write(&path, &original).unwrap();
    edit_header(&directory.path().join("model.safetensors"), |header| {
        drop(header.as_object_mut().unwrap().remove("model.layers.3.post_feedforward_layernorm.weight"))
    });
    assert!(
        error(directory.path()).contains("has no tensor model.layers.3.post_feedforward_layernorm.weight")
    );
}

#[test]
fn weight_files_that_are_wrong_are_refused() {
    let name = "model.layers.2.mlp.up_proj.weight";
    type Break = fn(&Path);
    let cases: [(&str, Break, &str); 12] = [
        ("missing file", |path| fs::remove_file(path).unwrap(), "no weights in"),
        ("empty file", |path| fs::write(path, []).unwrap(), "describes 8 bytes, the file has 0"),
        (
            "no header",
            |path| fs::write(path, 100u64.to_le_bytes()).unwrap(),
            "describes 108 bytes, the file has 8",
        ),
        (
            "huge header",
            |path| fs::write(path, [0xff; 64]).unwrap(),
            "a header of 18446744073709551615 bytes",
        ),
        ("bad header", |path| fs::write(path, [2, 0, 0, 0, 0, 0, 0, 0, b'{', b'x']).unwrap(), "bad header"),
        (
            "cut off",
            |path| {
                let length = fs::metadata(path).unwrap().len();
                OpenOptions::new().write(true).open(path).unwrap().set_len(length - 1).unwrap();
            },
            "is truncated: its header describes",
        ),
        (
            "missing tensor",
            |path| {
                edit_header(path, |header| drop(header.as_object_mut().unwrap().remove("model.norm.weight")))
            },
            "has no tensor model.norm.weight",
        ),
        (
            "wrong shape",
            |path| edit_header(path, |h| h["model.layers.2.mlp.up_proj.weight"]["shape"] = json!([64, 128])),
            "model.layers.2.mlp.up_proj.weight has shape [64, 128], but the model's configuration asks for [128, 64]",
        ),
        (
            "long shape",
            |path| {
                edit_header(path, |h| {
                    h["model.layers.2.mlp.up_proj.weight"]["shape"] = json!([1, 1, 1, 1, 1, 1, 1, 1, 1])
                })
            },
            "tensor model.layers.2.mlp.up_proj.weight: invalid length 9, expected a list of at most 8 numbers",
        ),
        (
            "no file",
            |path| {
                fs::remove_file(path).unwrap();
                std::os::unix::fs::symlink("/dev/zero", path).unwrap();
            },
            "it is not a regular file",
        ),
        (
            "wrong type",
            |path| edit_header(path, |h| h["model.layers.2.mlp.up_proj.weight"]["dtype"] = json!("I8")),
            "model.layers.2.mlp.up_proj.weight has element type I8, expected F32, BF16 or F16",
        ),
        (
            "wrong range",
            |path| {
                edit_header(path, |h| h["model.layers.2.mlp.up_proj.weight"]["data_offsets"] = json!([0, 7]))
            },
            "takes 16384 bytes, its data_offsets span 7",
        ),
    ];
    for (case, spoil, says) in cases {
        let directory = model();
        let path = directory.path().join("model.safetensors");
        spoil(&path);
        let error = error(directory.path());
        assert!(error.contains(says), "{case}: {error}");
        assert!(error.contains(&directory.path().display().to_string()), "{case}: {error}");
        if says.contains("up_proj") {
            assert!(error.contains(name), "{case}: {error}");
        }
    }
}

#[test]
fn data_ranges_that_overflow_or_run_backwards_are_refused() {
    for offsets in [json!([u64::MAX - 8, u64::MAX]), json!([8, 0]), json!([-1, 4]), json!([0])] {
        let directory = model();
        edit_header(&directory.path().join("model.safetensors"), |h| {
            h["model.norm.weight"]["data_offsets"] = offsets
        });
        let error = error(directory.path());
        assert!(error.contains("model.norm.weight"), "{error}");
    }
}

#[test]
fn shards_are_read_and_checked() {
    let write = || {
        let directory = tempfile::tempdir().unwrap();
        TinyModel { shards: 3, ..TinyModel::default() }.write(directory.path()).unwrap();
        directory
    };
    load(write().path()).unwrap();
    for (entry, says) in [
        (json!("../model-00001-of-00003.safetensors"), "is not a plain file name"),
        (json!("model-00002-of-00003.safetensors"), "model-00002-of-00003.safetensors has no tensor"),
        (json!("model-9.safetensors"), "cannot read"),
        (json!(null), "model.safetensors.index.json"),
    ] {
        let directory = write();
        let index = directory.path().join("model.safetensors.index.json");
        // The first tensor of the first shard.
        edit(&index, |index| index["weight_map"]["model.embed_tokens.weight"] = entry.clone());
        let error = error(directory.path());
        assert!(error.contains(says), "{entry}: {error}");
    }
    let directory = write();
    let index = directory.path().join("model.safetensors.index.json");
    edit(&index, |index| drop(index["weight_map"].as_object_mut().unwrap().remove("lm_head.weight")));
    assert!(error(directory.path()).contains("index.json has no tensor lm_head.weight"));
}

#[test]
fn the_shape_tells_models_apart_without_loading_them() {
    let shape = |model: TinyModel| {
        let directory = tempfile::tempdir().unwrap();
        model.write(directory.path()).unwrap();
        let shape = read_shape(directory.path()).unwrap();
        assert_eq!(shape, load(directory.path()).unwrap());
        shape
    };
    let base = shape(TinyModel::default());
    let expected = ModelShape {
        layers: 4,
        kv_heads: 2,
        head_dim: 16,
        vocabulary: 559,
        max_positions: 4096,
        kv_dtype: Dtype::Bf16,
        weights: base.weights.clone(),
        math: "cpu-1".to_owned(),
        sliding: None,
        state_layers: 0,
    };
    assert_eq!(base, expected);
    assert_eq!(base.weights.len(), 64);
    assert_eq!(base, shape(TinyModel::default()));
    assert_eq!(shape(TinyModel { stored: Stored::F32, ..TinyModel::default() }).kv_dtype, Dtype::F32);
    for other in [
        TinyModel { seed: 1, ..TinyModel::default() },
        TinyModel { shards: 2, ..TinyModel::default() },
        TinyModel { tied: true, ..TinyModel::default() },
        TinyModel { family: Family::Llama, ..TinyModel::default() },
        TinyModel { max_positions: 4097, ..TinyModel::default() },
    ] {
        assert_ne!(shape(other.clone()).weights, base.weights, "{other:?}");
    }
}

#[test]
fn one_changed_weight_changes_the_identity_wherever_it_lies() {
    let directory = tempfile::tempdir().unwrap();
    let large = TinyModel { hidden: 512, intermediate: 1024, vocabulary: 2048, ..TinyModel::default() };
    large.write(directory.path()).unwrap();
    let file =
        fs::File::options().read(true).write(true).open(directory.path().join("model.safetensors")).unwrap();
    let bytes = file.metadata().unwrap().len();
    assert!(bytes > 8 << 20, "{bytes}");
    let weights = || read_shape(directory.path()).unwrap().weights;
    let base = weights();
    for part in 1..100 {
        let (at, mut byte) = (bytes / 100 * part, [0]);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
        assert_ne!(weights(), base, "byte {at}");
        file.write_all_at(&byte, at).unwrap();
    }
    assert_eq!(weights(), base);
}
