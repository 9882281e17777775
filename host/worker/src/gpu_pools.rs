//! Pools in the memory of a GPU, for tests. A library stands in for the GPU.

use std::sync::{Arc, LazyLock};

use host_executor::KvMemory;
use host_kernels::cuda::Device;
use libloading::os::unix::{Library, RTLD_NOW};

/// The GPU that the library stands in for.
pub fn device() -> Arc<Device> {
    static STAND_IN: LazyLock<Library> = LazyLock::new(|| {
        // SAFETY: our own library, without initialisers.
        unsafe { Library::open(Some(host_tests::cuda::library()), RTLD_NOW) }.unwrap()
    });
    // The device finds the library by its name, because it is loaded already.
    LazyLock::force(&STAND_IN);
    Device::open(0, Some(&host_tests::cuda::library())).unwrap()
}

/// A pool in the GPU's memory with the layout, the heads and the bytes of this one.
pub fn on_gpu(kv: &KvMemory) -> KvMemory {
    let mut pool = KvMemory::on_device(*kv.layout(), kv.heads().start, &device()).unwrap();
    change(&mut pool, |rows| bytes_mut(rows).copy_from_slice(bytes(kv)));
    pool
}

/// Changes rows of a pool in any memory.
pub fn change(kv: &mut KvMemory, change: impl FnOnce(&mut KvMemory)) {
    let Some(memory) = kv.device() else { return change(kv) };
    let stream = memory.device().stream().unwrap();
    let mut all = memory.part(0, memory.len());
    let mut rows = in_host_memory(kv);
    change(&mut rows);
    all.upload(&stream, bytes(&rows)).unwrap();
}

/// A pool in host memory with the layout, the heads and the bytes of this one.
pub fn in_host_memory(kv: &KvMemory) -> KvMemory {
    let mut rows = KvMemory::for_heads(*kv.layout(), kv.heads().start).unwrap();
    match kv.device() {
        Some(memory) => memory.download(&memory.device().stream().unwrap(), bytes_mut(&mut rows)).unwrap(),
        None => bytes_mut(&mut rows).copy_from_slice(bytes(kv)),
    }
    rows
}

/// The bytes of a pool in host memory.
pub fn bytes(kv: &KvMemory) -> &[u8] {
    // SAFETY: the test's threads touch no pool while it looks at one.
    unsafe { kv.host().unwrap().bytes_at(0, kv.layout().bytes()) }
}

fn bytes_mut(kv: &mut KvMemory) -> &mut [u8] {
    let memory = kv.host().unwrap();
    // SAFETY: as above, and the slice borrows the pool alone.
    unsafe { std::slice::from_raw_parts_mut(memory.address().as_ptr(), kv.layout().bytes()) }
}
