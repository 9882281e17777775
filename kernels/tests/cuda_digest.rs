//! Digests on a GPU are those of the CPU. The tests use a stand-in for a GPU (`host_tests::cuda`) that runs the same kernels.
//!
//! `benches/cuda_digest.rs` compares the same on a GPU, and measures.

#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

#[path = "cuda_digest/pool.rs"]
mod pool;

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use host_kernels::cuda::digest::{DigestKernels, PagePart};
use host_kernels::cuda::{Array, Device};
use libloading::os::unix::{Library, RTLD_NOW};
use pool::{ORDERS, Order, Shape};
use proptest::prelude::*;

/// Loads the stand-in once.
fn device() -> Arc<Device> {
    static DRIVER: LazyLock<(Library, PathBuf)> = LazyLock::new(|| {
        let path = host_tests::cuda::library();
        // SAFETY: our own library, without initialisers.
        (unsafe { Library::open(Some(&path), RTLD_NOW) }.unwrap(), path)
    });
    Device::open(0, Some(&DRIVER.1)).unwrap()
}

/// Compares the digests of these parts of a pool of random bytes, `shift` bytes into its memory.
fn compare(shape: Shape, parts: &[PagePart], seed: u64, shift: usize) {
    let device = device();
    let stream = device.stream().unwrap();
    let mut bytes = vec![0; shape.bytes() + shift];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    let mut memory = Array::new(&device, bytes.len()).unwrap();
    memory.upload(&stream, &bytes).unwrap();
    let pool = shape.at(memory.address() + shift as u64);
    let found = DigestKernels::new(&device).unwrap().digests(&stream, &pool, parts).unwrap();
    let expected: Vec<u64> = parts.iter().map(|part| shape.digest(&bytes[shift..], part)).collect();
    assert_eq!(found, expected, "{shape:?}, {parts:?}, {shift} bytes off");
}

fn shape() -> impl Strategy<Value = Shape> {
    let order = prop_oneof![Just(ORDERS[0]), Just(ORDERS[1]), Just(ORDERS[2])];
    let row =
        || prop_oneof![(1..=32_usize).prop_map(|n| 16 * n), (1..=64_usize).prop_map(|n| 8 * n), 0..40_usize];
    let counts = (1..4_usize, 1..40_usize, 1..4_usize, 1..4_usize, 0..3_usize);
    (order, counts, row(), row(), any::<bool>()).prop_map(
        |(order, (pages, page_tokens, layers, heads, first_head), key, value, same)| Shape {
            order,
            pages,
            page_tokens,
            layers,
            heads,
            first_head,
            rows: [key, if same { key } else { value }],
        },
    )
}

fn case() -> impl Strategy<Value = (Shape, Vec<PagePart>)> {
    shape().prop_flat_map(|shape| {
        let within = |most: usize| (0..=most, 0..=most).prop_map(|(a, b)| a.min(b)..a.max(b));
        let part = (0..shape.pages, any::<u64>(), within(shape.layers), within(shape.heads), 0..50_usize)
            .prop_map(move |(page, index, layers, heads, tokens)| PagePart {
                page,
                index,
                layers,
                heads: heads.start + shape.first_head..heads.end + shape.first_head,
                tokens,
            });
        (Just(shape), prop::collection::vec(part, 0..6))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_gpu_digests_what_the_cpu_digests(
        (shape, parts) in case(),
        seed in any::<u64>(),
        shift in prop_oneof![Just(0_usize), Just(16), 0..20_usize],
    ) {
        compare(shape, &parts, seed, shift);
    }
}

#[test]
fn blocks_of_every_length_have_the_digests_of_xxh3() {
    let part = |tokens| PagePart { page: 0, index: 3, layers: 0..2, heads: 0..1, tokens };
    let parts: Vec<PagePart> = (0..=1300).map(part).collect();
    let shape = Shape {
        order: Order::PageHeadLayer,
        pages: 1,
        page_tokens: 1300,
        layers: 2,
        heads: 1,
        first_head: 0,
        rows: [1, 0],
    };
    compare(shape, &parts, 1, 0);
    compare(Shape { rows: [16, 0], ..shape }, &parts, 2, 0);
    compare(Shape { rows: [16, 32], ..shape }, &parts, 3, 0);
}

/// Blocks of up to 240 bytes and longer ones are for different kernels. There are more parts than a call has scratch memory for
/// at first.
#[test]
fn short_and_long_blocks_are_digested_in_one_call() {
    let shape = Shape {
        order: Order::PageLayerHead,
        pages: 2,
        page_tokens: 5,
        layers: 3,
        heads: 2,
        first_head: 5,
        rows: [64, 64],
    };
    let part = |index: usize| PagePart {
        page: index % 2,
        index: index as u64,
        layers: 0..index % 4,
        heads: 5..7,
        tokens: index % 7,
    };
    compare(shape, &(0..1500).map(part).collect::<Vec<_>>(), 4, 0);
}

#[test]
#[should_panic(expected = "heads 1..3 of a pool with the heads 2..4")]
fn a_head_that_the_pool_does_not_hold_is_refused() {
    let shape = Shape {
        order: Order::TokenMajor,
        pages: 1,
        page_tokens: 4,
        layers: 1,
        heads: 2,
        first_head: 2,
        rows: [8, 8],
    };
    compare(shape, &[PagePart { page: 0, index: 0, layers: 0..1, heads: 1..3, tokens: 4 }], 5, 0);
}
