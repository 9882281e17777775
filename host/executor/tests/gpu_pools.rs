//! Digests and copies of pools in a GPU's memory are those of pools in host memory. The tests use the stand-in for NVIDIA's driver.

#![allow(clippy::unwrap_used, reason = "a fixture that fails is a test that fails")]

use std::sync::{Arc, LazyLock};

use host_core::layout::KvOrder;
use host_core::transfer::{KvSlice, Lane, copy_lane};
use host_core::{Dtype, KvLayout, KvShape, PageId};
use host_executor::KvMemory;
use host_executor::digest::{self, PagePart};
use host_executor::memory::{PageBuffer, PageCopyError, bytes_of_device};
use host_kernels::copy::Copier;
use host_kernels::cuda::Device;
use libloading::os::unix::{Library, RTLD_NOW};

fn device() -> Arc<Device> {
    static STAND_IN: LazyLock<Library> = LazyLock::new(|| {
        // SAFETY: our own library, without initialisers.
        unsafe { Library::open(Some(host_tests::cuda::library()), RTLD_NOW) }.unwrap()
    });
    // The driver's name then finds the library that is loaded already.
    LazyLock::force(&STAND_IN);
    Device::open(0, Some(&host_tests::cuda::library())).unwrap()
}

/// Two pools with the same content, in host memory and on the GPU. They hold the heads 2, 3 and 4.
fn pools(order: KvOrder, pages: usize, page_tokens: usize, head_dim: usize) -> [KvMemory; 2] {
    let (heads, layers, value_dim, dtype) = (3, 2, head_dim + 2, Dtype::Bf16);
    let shape = KvShape { pages, heads, layers, page_tokens, head_dim, value_dim, dtype };
    let layout = KvLayout::new(shape, order);
    let host = KvMemory::for_heads(layout, 2).unwrap();
    let mut random = fastrand::Rng::with_seed(7);
    let bytes: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(layout.bytes()).collect();
    // SAFETY: nothing else uses the pool.
    unsafe { host.host().unwrap().write(0, &bytes) };
    let gpu = KvMemory::on_device(layout, 2, &device()).unwrap();
    let memory = gpu.device().unwrap();
    memory.part(0, bytes.len()).upload(&device().stream().unwrap(), &bytes).unwrap();
    [host, gpu]
}

fn bytes(kv: &KvMemory) -> Vec<u8> {
    let mut bytes = vec![0; kv.layout().bytes()];
    match kv.device() {
        Some(memory) => memory.download(&device().stream().unwrap(), &mut bytes).unwrap(),
        // SAFETY: nothing writes the pool.
        None => unsafe { kv.host().unwrap().read(0, &mut bytes) },
    }
    bytes
}

#[test]
fn a_new_pool_is_empty() {
    let [host, _] = pools(KvOrder::PageHeadLayerKvTokenDim, 3, 4, 6);
    let gpu = KvMemory::on_device(*host.layout(), 0, &device()).unwrap();
    assert!(bytes(&gpu).iter().all(|byte| *byte == 0));
    assert_eq!((gpu.location().device, host.location().device), (Some(0), None));
    assert!(gpu.expect_host().is_err() && host.expect_host().is_ok());
}

#[test]
fn digests_on_a_gpu_are_those_in_host_memory() {
    for order in KvOrder::ALL {
        let pools = pools(order, 9, 4, 6);
        let part = |page, index, layers, heads, tokens| PagePart {
            page: PageId(page),
            index,
            layers,
            heads,
            tokens,
        };
        let parts = [
            part(3, 0, 0..2, 2..5, 4),
            part(1, 1, 0..2, 2..5, 3),
            part(3, 7, 0..2, 2..5, 9),
            part(8, 2, 1..2, 3..4, 4),
            part(0, 3, 1..2, 3..5, 1),
            part(0, 4, 1..1, 3..5, 1),
            part(2, 4, 0..1, 4..4, 2),
            part(5, 5, 0..2, 2..3, 0),
        ];
        let [host, gpu] = pools.each_ref().map(|kv| digest::parts(kv, &parts).unwrap());
        assert_eq!(host, gpu, "{order}");
        assert_eq!(host[5..7], [0, 0], "of nothing");
    }
}

#[test]
fn more_pages_than_are_brought_at_once_are_digested() {
    // 60 pages of 150 KiB each.
    let pools = pools(KvOrder::PageLayerHeadKvTokenDim, 60, 100, 63);
    let part = |page: u32| PagePart { page: PageId(page), index: 0, layers: 0..2, heads: 2..5, tokens: 100 };
    let parts: Vec<PagePart> = (0..60).rev().map(part).collect();
    let [host, gpu] = pools.each_ref().map(|kv| digest::parts(kv, &parts).unwrap());
    assert_eq!(host, gpu);
}

#[test]
fn copies_both_ways_are_those_of_host_memory() {
    let cpu = Arc::new(Copier::new(1).unwrap());
    for order in KvOrder::ALL {
        let pools = pools(order, 9, 4, 6);
        let results = pools.map(|kv| {
            let copier = kv.copier(&cpu).unwrap();
            let heads = 3..5;
            let dense = KvSlice::dense(kv.layout().shape, 3, heads.clone(), 0..2);
            let own = KvSlice::pool(*kv.layout(), 2);
            let buffer = PageBuffer::shared(&kv, "test", 1000 + dense.layout.bytes()).unwrap();
            let part = 1000..1000 + dense.layout.bytes();
            let slots = [0, 1, 2].map(PageId);
            let out = Lane { source: own, target: dense, heads: heads.clone() };
            let out = copy_lane(&out, &[5, 2, 6].map(PageId), &slots, 0..2).unwrap();
            let back =
                copy_lane(&Lane { source: dense, target: own, heads }, &slots, &[1, 8, 0].map(PageId), 0..2)
                    .unwrap();
            // SAFETY: this test alone has pool and buffer.
            unsafe {
                copier.copy_out(&out, &buffer, part.clone()).unwrap();
                copier.copy_in(&back, &buffer, part.clone()).unwrap();
                let short = copier.copy_in(&back, &buffer, part.start..part.end - 1);
                assert!(matches!(short, Err(PageCopyError::Copy(_))), "{short:?}");
                let outside = copier.copy_in(&back, &buffer, part.start..part.end + 1);
                assert_eq!(outside, Err(PageCopyError::Outside));
                (buffer.bytes_at(0, buffer.bytes()).to_vec(), bytes(&kv))
            }
        });
        assert_eq!(results[0], results[1], "{order}");
    }
}

#[test]
fn memory_that_the_device_does_not_reach_is_not_copied_to() {
    let [host, gpu] = pools(KvOrder::PageHeadLayerKvTokenDim, 3, 4, 6);
    let buffer = PageBuffer::private(&host, gpu.layout().bytes()).unwrap();
    let copier = gpu.copier(&Arc::new(Copier::new(1).unwrap())).unwrap();
    let own = KvSlice::pool(*gpu.layout(), 2);
    let copy =
        copy_lane(&Lane { source: own, target: own, heads: 2..5 }, &[PageId(0)], &[PageId(0)], 0..2).unwrap();
    // SAFETY: this test alone has pool and buffer.
    let refused = unsafe { copier.copy_out(&copy, &buffer, 0..buffer.bytes()) };
    assert_eq!(refused, Err(PageCopyError::NotRegistered));
}

#[test]
fn a_device_that_is_not_there_is_told() {
    drop(device());
    assert!(bytes_of_device(0).unwrap() > 0);
    let said = bytes_of_device(7).unwrap_err().to_string();
    assert!(said.contains("cannot open device 7"), "{said}");
}
