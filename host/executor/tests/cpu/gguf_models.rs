//! A GGUF file computes the bits of the safetensors model that it was made of.

use std::path::Path;

use fastrand::Rng;
use host_core::layout::KvOrder;
use host_core::window::WindowPages;
use host_core::{Batch, Dtype, KvLayout, KvShape, PageId, Room, Sampling, Sequence};
use host_executor::cpu::{CpuExecutor, CpuOptions, read_shape};
use host_executor::{Executor, KvMemory};
use host_gguf::{Gguf, Kind};
use host_tests::gguf::GgufFile;
use host_tests::model::{Family, Stored, TinyModel};

const PAGES: usize = 24;
/// Pages, of all [`PAGES`], for layers that see everything. The others are for the windows of layers that slide.
const FULL: u32 = 6;

/// Bits of everything that a model computed.
#[derive(PartialEq)]
struct Computed {
    logits: Vec<u32>,
    kv: Vec<u8>,
    sampled: Option<u32>,
}

fn load(model: &Path) -> CpuExecutor {
    let executor = CpuExecutor::load(model, CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap();
    assert_eq!(*executor.shape(), read_shape(model).unwrap());
    executor
}

/// Computes a prompt of 60 tokens, then one more that samples, over KV of this type.
fn compute(model: &Path, dtype: Dtype) -> Computed {
    let mut executor = load(model);
    let shape = executor.shape().clone();
    let layout = KvShape {
        pages: PAGES,
        heads: shape.kv_heads,
        layers: shape.page_layers(),
        page_tokens: 16,
        head_dim: shape.head_dim,
        value_dim: shape.head_dim,
        dtype,
    };
    let mut kv = KvMemory::new(KvLayout::new(layout, KvOrder::PageHeadLayerKvTokenDim)).unwrap();
    let tokens: Vec<u32> = (0..61u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) % 500).collect();
    let sequence = |tokens: &[u32], start, sample| {
        let window = WindowPages { first: 0, pages: (FULL..PAGES as u32).map(PageId).collect() };
        let pages = (0..FULL).map(PageId).collect();
        Sequence {
            room: Room(1),
            tokens: tokens.to_vec(),
            start,
            pages,
            window,
            recompute: 0..0,
            drafted: 0,
            sample,
            scored: None,
        }
    };
    let batch = |id, sequence| Batch { id, sequences: vec![sequence], layer_group: 0 };
    let (prompt, last) = tokens.split_at(60);
    let logits = executor.forward_logits(&mut kv, &batch(0, sequence(prompt, 0, None))).unwrap();
    let logits = logits.iter().map(|logit| logit.to_bits()).collect();
    let greedy = Sampling::GREEDY;
    let outputs = executor.forward(&mut kv, &batch(1, sequence(last, 60, Some(greedy.into())))).unwrap();
    let sampled = outputs[0].sampled.first().map(|sampled| sampled.token);
    Computed { logits, kv: kv_bytes(&kv), sampled }
}

/// All rows of all pages.
fn kv_bytes(kv: &KvMemory) -> Vec<u8> {
    let shape = kv.layout().shape;
    let mut bytes = Vec::new();
    for page in (0..PAGES as u32).map(PageId) {
        for (head, layer) in
            (0..shape.heads).flat_map(|head| (0..shape.layers).map(move |layer| (head, layer)))
        {
            for (side, slot) in (0..2).flat_map(|side| (0..shape.page_tokens).map(move |slot| (side, slot))) {
                bytes.extend_from_slice(kv.read_row(page, head, layer, side, slot));
            }
        }
    }
    assert!(bytes.iter().any(|byte| *byte != 0));
    bytes
}

fn write(file: &GgufFile, directory: &Path, name: &str) -> std::path::PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, file.bytes()).unwrap();
    path
}

#[test]
fn logits_and_kv_are_those_of_the_safetensors_model() {
    for (family, tied, stored) in [
        (Family::Llama, false, Stored::F32),
        (Family::Llama, true, Stored::Bf16),
        (Family::Llama, false, Stored::F16),
        (Family::Qwen3, false, Stored::Bf16),
        (Family::Qwen3, true, Stored::F16),
        (Family::Qwen3, false, Stored::F32),
        (Family::Gemma3, true, Stored::F32),
        (Family::Gemma3, true, Stored::Bf16),
        (Family::Gemma3, true, Stored::F16),
    ] {
        let base = if family == Family::Gemma3 { TinyModel::gemma3() } else { TinyModel::default() };
        let model = TinyModel { family, tied, stored, seed: 3, ..base };
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path().join("folder");
        model.write(&folder).unwrap();
        let path = write(&model.gguf(), directory.path(), "model.gguf");
        let (expected, found) = (read_shape(&folder).unwrap(), read_shape(&path).unwrap());
        assert_ne!(found.weights, expected.weights, "{family:?}");
        let same = host_executor::ModelShape { weights: expected.weights.clone(), ..found };
        assert_eq!(same, expected, "{family:?} {stored:?}");
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let expected = compute(&folder, dtype);
            assert!(expected.logits.iter().all(|bits| f32::from_bits(*bits).is_finite()));
            assert!(compute(&path, dtype) == expected, "{family:?} {stored:?} {dtype:?}");
        }
    }
}

/// Random blocks of a type, with scales from 2^-10 to 2^-8 in the places where the type has its scales.
fn random_blocks(kind: Kind, blocks: usize, random: &mut Rng) -> Vec<u8> {
    let scales: &[usize] = match kind {
        Kind::Q8_0 | Kind::Q4_0 | Kind::Q5_0 => &[0],
        Kind::Q4_1 | Kind::Q5_1 | Kind::Q4K | Kind::Q5K => &[0, 2],
        Kind::Q6K => &[208],
        other => panic!("{other:?} has no blocks"),
    };
    let mut data = vec![0; blocks * kind.block_bytes()];
    random.fill(&mut data);
    for block in data.chunks_exact_mut(kind.block_bytes()) {
        for scale in scales {
            let bits = u16::from_le_bytes([block[*scale], block[scale + 1]]);
            let half = (0x1400 + bits % 0x800) | (bits & 0x8000);
            block[*scale..scale + 2].copy_from_slice(&half.to_le_bytes());
        }
    }
    data
}

/// A file whose matrices have all kinds in turn, so that fused matrices mix quantized kinds and kinds stored element by element.
fn mixed(model: &TinyModel) -> GgufFile {
    let mut file = model.gguf();
    let kinds = [3, 4, 5, 6, 7, 8, 9, 10].map(|index| Kind::ALL[index]);
    let (mut turn, mut random) = (0, Rng::with_seed(7));
    for tensor in file.tensors.iter_mut().filter(|tensor| tensor.dimensions.len() == 2) {
        turn += 1;
        // Of ten tensors, one stays as it is, one becomes bf16, and eight become quantized.
        match turn % 10 {
            0 => {}
            1 => {
                let upper = tensor.data.chunks_exact(4).flat_map(|bytes| [bytes[2], bytes[3]]);
                (tensor.data, tensor.kind) = (upper.collect(), Kind::Bf16.number());
            }
            other => {
                let kind = kinds[other - 2];
                let blocks = tensor.data.len() / 4 / kind.block_elements();
                (tensor.data, tensor.kind) = (random_blocks(kind, blocks, &mut random), kind.number());
            }
        }
    }
    file
}

/// The same file with every tensor as f32.
fn expanded(file: &GgufFile) -> GgufFile {
    let bytes = file.bytes();
    let gguf = Gguf::read(&bytes[..]).unwrap();
    let mut wide = file.clone();
    for tensor in &mut wide.tensors {
        let info = gguf.tensor(&tensor.name).unwrap();
        let mut values = vec![0.0; (info.rows() * info.row_elements()) as usize];
        gguf.read_rows(info, 0, &mut values).unwrap();
        (tensor.data, tensor.kind) = (values.iter().flat_map(|value| value.to_le_bytes()).collect(), 0);
    }
    wide
}

#[test]
fn files_that_mix_types_compute_what_their_expansion_to_f32_does() {
    for family in [Family::Llama, Family::Gemma3] {
        let base = if family == Family::Gemma3 { TinyModel::gemma3() } else { TinyModel::default() };
        let sizes = TinyModel { hidden: 256, intermediate: 512, head_dim: 64, ..base };
        let file = mixed(&TinyModel { family, stored: Stored::F32, ..sizes });
        let directory = tempfile::tempdir().unwrap();
        let path = write(&file, directory.path(), "mixed.gguf");
        let wide = write(&expanded(&file), directory.path(), "wide.gguf");
        assert_eq!(
            (read_shape(&path).unwrap().kv_dtype, read_shape(&wide).unwrap().kv_dtype),
            (Dtype::Bf16, Dtype::F32)
        );
        let expected = compute(&wide, Dtype::Bf16);
        assert!(expected.logits.iter().all(|bits| f32::from_bits(*bits).is_finite()));
        assert!(compute(&path, Dtype::Bf16) == expected, "{family:?}");
    }
}

#[test]
fn divisors_of_rotary_frequencies_are_applied() {
    let model = TinyModel { family: Family::Llama, stored: Stored::F32, ..TinyModel::default() };
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("folder");
    model.write(&folder).unwrap();
    let config = folder.join("config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    json["rope_scaling"] = serde_json::json!({ "rope_type": "linear", "factor": 4.0 });
    std::fs::write(&config, json.to_string()).unwrap();
    let expected = compute(&folder, Dtype::F32);
    let mut by_key = model.gguf();
    by_key.text("llama.rope.scaling.type", "linear").f32("llama.rope.scaling.factor", 4.0);
    assert!(compute(&write(&by_key, directory.path(), "key.gguf"), Dtype::F32) == expected);
    let mut by_tensor = model.gguf();
    let divisors = [4.0f32; 8].iter().flat_map(|divisor| divisor.to_le_bytes()).collect();
    by_tensor.tensor("rope_freqs.weight", &[8], 0, divisors);
    assert!(compute(&write(&by_tensor, directory.path(), "tensor.gguf"), Dtype::F32) == expected);
    assert!(compute(&write(&model.gguf(), directory.path(), "plain.gguf"), Dtype::F32) != expected);
}

#[test]
fn the_identity_is_that_of_the_file_and_not_of_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let model = TinyModel::default();
    let weights =
        |file: &GgufFile, name: &str| read_shape(&write(file, directory.path(), name)).unwrap().weights;
    let base = weights(&model.gguf(), "a.gguf");
    assert_eq!(base.len(), 64);
    assert_eq!(base, weights(&model.gguf(), "b.gguf"));
    assert_ne!(base, weights(model.gguf().text("general.name", "other"), "c.gguf"));
    assert_ne!(base, weights(&TinyModel { seed: 1, ..model.clone() }.gguf(), "d.gguf"));
    let mut changed = model.gguf();
    *changed.tensors.last_mut().unwrap().data.last_mut().unwrap() ^= 1;
    assert_ne!(base, weights(&changed, "e.gguf"));
}
