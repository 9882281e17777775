//! A GGUF file that is wrong, or that holds more than the executor computes, is refused with an error that names the cause.

use std::path::Path;

use host_core::Dtype;
use host_executor::Sliding;
use host_executor::cpu::{CpuExecutor, CpuOptions, read_shape};
use host_executor::model::read_query_heads;
use host_tests::gguf::{GgufFile, value};
use host_tests::model::{Family, Stored, TinyModel, tiny_qwen3};

type Change = fn(&mut GgufFile);

fn llama() -> TinyModel {
    TinyModel { family: Family::Llama, ..TinyModel::default() }
}

fn error(path: &Path) -> String {
    let options = CpuOptions { threads: 1, ..CpuOptions::default() };
    CpuExecutor::load(path, options).err().unwrap().to_string()
}

/// Checks that each change to the model's file is refused with its words.
fn refused(model: &TinyModel, cases: &[(Change, &str)]) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    for (change, says) in cases {
        let mut file = model.gguf();
        change(&mut file);
        std::fs::write(&path, file.bytes()).unwrap();
        let error = error(&path);
        assert!(error.contains(says), "expected {says:?} in: {error}");
        assert!(error.contains("model.gguf"), "{error}");
    }
}

#[test]
fn keys_that_are_wrong_or_unsupported_are_refused() {
    refused(
        &llama(),
        &[
            (
                |file| {
                    file.text("general.architecture", "phi3");
                },
                "general.architecture is \"phi3\", which the cpu executor does not support; it supports llama, qwen3, gemma3",
            ),
            (
                |file| {
                    file.remove("general.architecture");
                },
                "general.architecture is absent",
            ),
            (
                |file| {
                    file.u32("general.architecture", 1);
                },
                "general.architecture is 1, expected a text",
            ),
            (
                |file| {
                    file.text("general.type", "adapter");
                },
                "general.type is \"adapter\"",
            ),
            (
                |file| {
                    file.u32("llama.expert_count", 8);
                },
                "llama.expert_count is 8",
            ),
            (
                |file| {
                    file.flag("llama.attention.causal", false);
                },
                "llama.attention.causal is false",
            ),
            (
                |file| {
                    file.f32("llama.logit_scale", 0.5);
                },
                "llama.logit_scale is 0.5",
            ),
            (
                |file| {
                    file.u32("llama.attention.sliding_window", 4096);
                },
                "llama.attention.sliding_window is 4096",
            ),
            (
                |file| {
                    file.text("llama.rope.scaling.type", "yarn");
                },
                "llama.rope.scaling.type is \"yarn\", which the cpu executor does not support; it supports \"none\" and \"linear\"",
            ),
            (
                |file| {
                    file.f32("llama.rope.scaling.attn_factor", 1.2);
                },
                "llama.rope.scaling.attn_factor is 1.2",
            ),
            (
                |file| {
                    file.f32("llama.rope.scaling.factor", -1.0);
                },
                "llama.rope.scaling.factor is -1, expected a number above 0",
            ),
            (
                |file| {
                    file.f32("llama.rope.freq_base", f32::NAN);
                },
                "llama.rope.freq_base is NaN",
            ),
            (
                |file| {
                    file.u32("llama.rope.dimension_count", 8);
                },
                "llama.rope.dimension_count is 8",
            ),
            (
                |file| {
                    file.u32("llama.attention.value_length", 32);
                },
                "llama.attention.value_length is 32",
            ),
            (
                |file| {
                    file.u32("llama.attention.key_length", 24);
                },
                "it supports 24, the dimensions of a head",
            ),
            (
                |file| {
                    file.remove("llama.block_count");
                },
                "llama.block_count is absent, expected a whole number",
            ),
            (
                |file| {
                    file.u32("llama.block_count", 0);
                },
                "llama.block_count is 0",
            ),
            (
                |file| {
                    file.u32("llama.block_count", u32::MAX);
                },
                "llama.block_count is 4294967295",
            ),
            (
                |file| {
                    file.u32("llama.embedding_length", 68);
                },
                "llama.embedding_length is 68",
            ),
            (
                |file| {
                    file.text("llama.context_length", "8");
                },
                "llama.context_length is \"8\"",
            ),
            (
                |file| {
                    file.remove("llama.attention.layer_norm_rms_epsilon");
                },
                "rms_epsilon is absent",
            ),
            (
                |file| {
                    file.u32("llama.attention.head_count_kv", 3);
                },
                "head_count_kv is 3, expected a divisor",
            ),
            (
                |file| {
                    file.integers("llama.attention.head_count_kv", &[2, 2, 1, 2]);
                },
                "it supports layers that are all alike",
            ),
            (
                |file| {
                    file.u32("llama.vocab_size", 100);
                },
                "tensor token_embd.weight has shape [559, 64], but the model's configuration asks for [100, 64]",
            ),
        ],
    );
    refused(
        &TinyModel::gemma3(),
        &[
            (
                |file| {
                    file.f32("gemma3.final_logit_softcapping", 30.0);
                },
                "final_logit_softcapping is 30",
            ),
            (
                |file| {
                    file.f32("gemma3.attn_logit_softcapping", 50.0);
                },
                "gemma3.attn_logit_softcapping is 50",
            ),
            (
                |file| {
                    file.u32("gemma3.attention.sliding_window_pattern", 8);
                },
                "pattern is 8, which the cpu executor does not support; it supports models of which at least one layer",
            ),
            (
                |file| {
                    file.array("gemma3.attention.sliding_window_pattern", value::BOOL, [[1]; 6]);
                },
                "true or false for each of 7 layers",
            ),
            (
                |file| {
                    file.array("gemma3.attention.sliding_window_pattern", value::BOOL, [[1]; 7]);
                },
                "an array of 7 bool, which the cpu executor",
            ),
        ],
    );
}

#[test]
fn tensors_that_are_wrong_or_unknown_are_refused() {
    refused(
        &llama(),
        &[
            (
                |file| {
                    file.tensor("blk.0.attn_q.bias", &[64], 0, vec![0; 256]);
                },
                "tensor blk.0.attn_q.bias is none that the cpu executor knows of llama models",
            ),
            (
                |file| {
                    file.tensor("blk.0.attn_q_norm.weight", &[16], 0, vec![0; 64]);
                },
                "tensor blk.0.attn_q_norm.weight is none",
            ),
            (
                |file| {
                    file.tensor("blk.4.attn_norm.weight", &[64], 0, vec![0; 256]);
                },
                "tensor blk.4.attn_norm.weight is none",
            ),
            (
                |file| {
                    file.tensor("blk.01.attn_norm.weight", &[64], 0, vec![0; 256]);
                },
                "tensor blk.01.attn_norm.weight is none",
            ),
            (
                |file| file.tensors.retain(|tensor| tensor.name != "blk.2.ffn_up.weight"),
                "has no tensor blk.2.ffn_up.weight",
            ),
            (
                |file| file.tensors.retain(|tensor| tensor.name != "token_embd.weight"),
                "has no tensor token_embd.weight",
            ),
            (
                |file| {
                    file.tensors
                        .iter_mut()
                        .filter(|t| t.name == "blk.2.ffn_up.weight")
                        .for_each(|t| t.dimensions.reverse())
                },
                "tensor blk.2.ffn_up.weight has shape [64, 128], but the model's configuration asks for [128, 64]",
            ),
            (|file| file.tensors[5].kind = 23, "has type IQ4_XS; types that are read are"),
            (|file| file.tensors[5].data.truncate(100), "overlaps"),
            (
                |file| {
                    file.tensor("rope_freqs.weight", &[4], 0, vec![0; 16]);
                },
                "tensor rope_freqs.weight is of type F32 and shape [4], which",
            ),
            (
                |file| {
                    file.tensor("rope_freqs.weight", &[8], 0, vec![0; 32]);
                },
                "tensor rope_freqs.weight is with 0 in it",
            ),
            (
                |file| {
                    file.tensor("rope_freqs.weight", &[8], 0, vec![0; 32])
                        .f32("llama.rope.scaling.factor", 2.0);
                },
                "tensor rope_freqs.weight is there, in a llama model",
            ),
        ],
    );
    refused(
        &TinyModel::default(),
        &[(
            |file| {
                file.tensor("rope_freqs.weight", &[8], 0, vec![0; 32]);
            },
            "tensor rope_freqs.weight is there, in a qwen3 model",
        )],
    );
}

#[test]
fn absent_keys_mean_what_they_mean_in_llama_cpp() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let shape = |model: &TinyModel, change: Change| {
        let mut file = model.gguf();
        change(&mut file);
        std::fs::write(&path, file.bytes()).unwrap();
        read_shape(&path).unwrap()
    };
    let gemma3 = TinyModel { stored: Stored::F32, ..TinyModel::gemma3() };
    let full = shape(&gemma3, |file| {
        file.remove("gemma3.attention.sliding_window");
    });
    assert_eq!((full.sliding, full.kv_dtype, full.max_positions), (None, Dtype::F32, 4096));
    // Of seven layers, all slide except every sixth.
    let usual = shape(&gemma3, |file| {
        file.remove("gemma3.attention.sliding_window_pattern");
    });
    assert_eq!(usual.sliding, Some(Sliding { layers: 6, window: 20 }));
    let listed = shape(&gemma3, |file| {
        let flags = [1, 0, 1, 0, 1, 0, 0].map(|flag| [flag]);
        file.array("gemma3.attention.sliding_window_pattern", value::BOOL, flags);
    });
    assert_eq!(listed.sliding, Some(Sliding { layers: 3, window: 20 }));
    let heads = shape(&llama(), |file| {
        file.remove("llama.attention.key_length").remove("llama.attention.value_length");
        file.remove("llama.rope.dimension_count").remove("llama.vocab_size").remove("general.type");
        file.integers("llama.attention.head_count_kv", &[2, 2, 2, 2]);
    });
    assert_eq!((heads.head_dim, heads.kv_heads, heads.vocabulary), (16, 2, 559));
    assert_eq!((heads.kv_dtype, read_query_heads(&path).unwrap()), (Dtype::Bf16, 4));
}

#[test]
fn a_path_that_holds_no_model_says_what_is_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    assert!(error(&path("absent")).contains("absent: nothing is there; give a Hugging Face directory ("));
    std::fs::write(path("model.bin"), b"PK\x03\x04").unwrap();
    assert!(
        error(&path("model.bin")).contains("not a GGUF file: it begins with bytes [50, 4b, 03, 04]; give")
    );
    std::fs::write(path("cut.gguf"), &llama().gguf().bytes()[..1000]).unwrap();
    assert!(error(&path("cut.gguf")).contains("cut.gguf: truncated: "));
    let folder = path("folder");
    std::fs::create_dir(&folder).unwrap();
    assert!(error(&folder).contains("config.json"));
    for name in ["b", "a", "d", "c"] {
        std::fs::write(folder.join(name).with_extension("gguf"), []).unwrap();
    }
    let says = "a directory without config.json that holds a.gguf, b.gguf, c.gguf and more; give";
    assert!(error(&folder).contains(says), "{}", error(&folder));
    tiny_qwen3(&folder, 1).unwrap();
    read_shape(&folder).unwrap();
}
