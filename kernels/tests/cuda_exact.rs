//! The exact math for GPUs gives the CPU's bits. The tests use a stand-in for a GPU (`host_tests::cuda`) that runs the same
//! kernels.
//!
//! `benches/cuda_exact.rs` compares the same on a GPU.

#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

#[path = "cuda_exact/compare.rs"]
mod compare;

use std::path::PathBuf;
use std::sync::LazyLock;

use compare::{Batch, Both, Numbers};
use host_kernels::cuda::Device;
use host_kernels::cuda::exact::Exact;
use host_kernels::math::{Element, Heads, Math};
use libloading::os::unix::{Library, RTLD_NOW};
use proptest::prelude::*;

/// Loads the stand-in once.
fn both() -> Both {
    static DRIVER: LazyLock<(Library, PathBuf)> = LazyLock::new(|| {
        let path = host_tests::cuda::library();
        // SAFETY: our own library, without initialisers.
        (unsafe { Library::open(Some(&path), RTLD_NOW) }.unwrap(), path)
    });
    let device = Device::open(0, Some(&DRIVER.1)).unwrap();
    let stream = device.stream().unwrap();
    let exact = Exact::new(&device, stream).unwrap();
    Both { device, exact, math: Math::new(1).unwrap() }
}

fn element() -> impl Strategy<Value = Element> {
    prop_oneof![Just(Element::F32), Just(Element::Bf16), Just(Element::F16)]
}

/// A seed, and how many of 256 numbers are of any kind (see [`Numbers`]): none, some or many.
fn numbers() -> impl Strategy<Value = (u64, u8)> {
    (any::<u64>(), prop_oneof![Just(0), Just(3), Just(90)])
}

fn batch() -> impl Strategy<Value = Batch> {
    let sequence = (0..70_usize, 1..20_usize).prop_map(|(position, rows)| [position, rows]);
    let heads = (1..4_usize, 1..4_usize);
    (prop::collection::vec(sequence, 1..4), 1..20_usize, heads, 1..6_usize, any::<bool>(), any::<bool>())
        .prop_map(|(sequences, page_tokens, (kv_heads, group), eights, bf16, heads_first)| Batch {
            sequences,
            page_tokens,
            heads: kv_heads * group,
            kv_heads,
            head_dim: eights * 8,
            bf16,
            heads_first,
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn embedded_tokens((seed, wild) in numbers(), element in element(), rows in 1..20_usize, held in 1..40_usize,
        width in 1..300_usize, first in 0..50_u32) {
        both().embed(Numbers::new(seed, wild), element, [rows, held, width], first);
    }

    #[test]
    fn products((seed, wild) in numbers(), element in element(), rows in 1..20_usize, outputs in 1..70_usize,
        inputs in prop_oneof![1..150_usize, (1..40_usize).prop_map(|eights| 8 * eights)]) {
        both().linear(Numbers::new(seed, wild / 30), element, [rows, outputs, inputs]);
    }

    #[test]
    fn norms((seed, wild) in numbers(), rows in 1..20_usize, eights in 1..70_usize) {
        both().rms_norm(Numbers::new(seed, wild / 30), rows, 8 * eights);
    }

    #[test]
    fn rotations((seed, wild) in numbers(), rows in 1..12_usize, heads in 1..7_usize, sixteens in 1..9_usize,
        offset in 0..40_usize, behind in 0..40_usize, normed in any::<bool>()) {
        let head_dim = 16 * sixteens;
        let heads = Heads { stride: offset + heads * head_dim + behind, offset, heads, head_dim };
        both().rotate_heads(Numbers::new(seed, wild / 30), rows, heads, normed);
    }

    #[test]
    fn gates((seed, wild) in numbers(), rows in 1..12_usize, width in 1..600_usize) {
        both().gated(Numbers::new(seed, wild), rows, width);
    }

    #[test]
    fn sums_and_selections((seed, wild) in numbers(), rows in 1..12_usize, width in 1..600_usize) {
        both().add_and_select(Numbers::new(seed, wild), rows, width);
    }

    #[test]
    fn the_greatest((seed, wild) in numbers(), rows in 1..40_usize, width in 1..1500_usize) {
        both().argmax(Numbers::new(seed, wild), rows, width);
    }

    #[test]
    fn attention((seed, wild) in numbers(), batch in batch()) {
        both().attention(Numbers::new(seed, wild / 90), &batch);
    }
}

#[test]
fn more_rows_than_fit_between_two_launches_are_done_a_part_at_a_time() {
    let sequences = vec![[3000, 40]];
    let batch = Batch {
        sequences,
        page_tokens: 64,
        heads: 160,
        kv_heads: 1,
        head_dim: 8,
        bf16: true,
        heads_first: true,
    };
    both().attention(Numbers::new(1, 0), &batch);
}

#[test]
fn no_rows_are_no_work() {
    let both = both();
    let (x, mut y) = (both.array(&[1.0_f32; 8]), both.array(&[2.0_f32; 8]));
    both.exact.rms_norm(&x, 0, &x, 1e-6, &mut y).unwrap();
    both.exact.add(&mut y, &x, 0).unwrap();
    let mut left = [0.0; 8];
    y.download(both.exact.stream(), &mut left).unwrap();
    assert_eq!(left, [2.0; 8]);
}

#[test]
#[should_panic(expected = "outputs of a product: 12 elements in an array of 8")]
fn an_array_that_is_too_short_is_refused() {
    let both = both();
    let weight = both.exact.upload_matrix(&[0; 4 * 4 * 4], Element::F32, 4, 4).unwrap();
    let (x, mut y) = (both.array(&[0.0_f32; 12]), both.array(&[0.0_f32; 8]));
    let _refused = both.exact.linear(&x, 3, &weight, &mut y);
}
