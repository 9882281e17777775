//! Tests the CUDA copies from end to end on a machine without a GPU: the real host side and the real source of the kernels, on a
//! stand-in for NVIDIA's libraries that gcc compiles together with them (`host_tests::cuda`).
//!
//! The tests show that parameters, grids and index arithmetic are right, and that no access is out of bounds or unaligned. They
//! show nothing of a GPU's memory model or speed. `benches/cuda_copy.rs` does.

#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

#[path = "page_copy/cases.rs"]
mod cases;

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use cases::{bytes, case, naive};
use cudarc::driver::DevicePtr;
use host_kernels::copy::{CopyError, CopyPages, Dimension, Memory, PageBlock, PagesCopy};
use host_kernels::cuda::{CudaCopier, CudaError, CudaKernels, Device};
use libloading::os::unix::Library;
use parking_lot::{Mutex, MutexGuard};
use proptest::prelude::*;

/// The stand-in. Its lock lets only one test at a time change its settings.
struct Driver {
    library: Library,
    path: PathBuf,
}

fn driver() -> MutexGuard<'static, Driver> {
    static DRIVER: LazyLock<Mutex<Driver>> = LazyLock::new(|| Mutex::new(build()));
    DRIVER.lock()
}

/// Loads the stand-in under the name that is opened later, so that the later call finds this library.
fn build() -> Driver {
    let path = host_tests::cuda::library();
    // SAFETY: our own library, without initialisers.
    let library = unsafe { Library::open(Some(&path), libloading::os::unix::RTLD_NOW) }.unwrap();
    Driver { library, path }
}

impl Driver {
    fn set(&self, name: &str, value: i32) {
        // SAFETY: driver.c has this signature for every such name.
        unsafe { self.library.get::<unsafe extern "C" fn(i32)>(name.as_bytes()).unwrap()(value) }
    }

    fn launches(&self) -> u64 {
        // SAFETY: as in driver.c.
        unsafe { self.library.get::<unsafe extern "C" fn() -> u64>(b"fake_launches").unwrap()() }
    }

    fn last_kernel(&self) -> String {
        // SAFETY: as in driver.c, which returns a constant place.
        let name = unsafe {
            let name =
                self.library.get::<unsafe extern "C" fn() -> *const std::ffi::c_char>(b"fake_last_kernel");
            std::ffi::CStr::from_ptr(name.unwrap()())
        };
        name.to_str().unwrap().to_owned()
    }

    fn load(&self, device: usize) -> Result<CudaKernels, CudaError> {
        CudaKernels::load(&Device::open(device, Some(&self.path))?)
    }

    fn copier(&self) -> CudaCopier {
        let kernels = Arc::new(self.load(0).unwrap());
        let stream = kernels.context().new_stream().unwrap();
        kernels.on(stream)
    }
}

/// The content of the target after the copy. Both sides lie `shift` bytes into memory that is aligned like a GPU's.
fn on_device(
    copier: &CudaCopier,
    copy: &PagesCopy<'_>,
    source: &[u8],
    target: &[u8],
    shift: [usize; 2],
) -> Result<Vec<u8>, CopyError> {
    let stream = copier.stream();
    let from = stream.clone_htod(source).unwrap();
    let to = stream.clone_htod(target).unwrap();
    let memory = |buffer: &cudarc::driver::CudaSlice<u8>, shift: usize| {
        Memory::device(buffer.device_ptr(stream).0 + shift as u64, buffer.len() - shift)
    };
    // SAFETY: both live until the copy is done, and nothing else refers to them.
    unsafe { copier.copy_memory(copy, memory(&from, shift[0]), memory(&to, shift[1]))? };
    let result = stream.clone_dtoh(&to).unwrap();
    stream.synchronize().unwrap();
    Ok(result)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_gpu_copies_what_the_cpu_copies(
        case in case(),
        shift in prop_oneof![Just([0, 0]), Just([16, 64]), [0..20_usize, 0..20_usize]],
        scale in prop_oneof![Just(1_usize), Just(2), Just(4), Just(8), Just(16)],
    ) {
        // Larger units, so that wide kernels are tested too.
        let scaled = |block: &PageBlock| PageBlock {
            run: block.run * scale,
            source: block.source * scale,
            target: block.target * scale,
            source_page: block.source_page * scale,
            target_page: block.target_page * scale,
            dims: block.dims.map(|dim| Dimension { source: dim.source * scale, target: dim.target * scale, ..dim }),
        };
        let blocks: Vec<PageBlock> = case.blocks.iter().map(scaled).collect();
        let copy = PagesCopy { pages: &case.pages, blocks: &blocks };
        let source = bytes(case.source * scale + shift[0], 1);
        let before = bytes(case.target * scale + shift[1], 99);
        let mut expected = before.clone();
        naive(&copy, &source[shift[0]..], &mut expected[shift[1]..]);
        let driver = driver();
        let found = on_device(&driver.copier(), &copy, &source, &before, shift).unwrap();
        prop_assert!(found == expected, "{}", driver.last_kernel());
    }
}

fn spread_rows(run: usize, rows: usize, step: usize) -> PageBlock {
    let dims = [Dimension { extent: rows, source: step, target: run }, Dimension::NONE, Dimension::NONE];
    PageBlock { run, source: 0, target: 0, source_page: step * rows, target_page: run * rows, dims }
}

#[test]
fn the_widest_vector_that_divides_everything_is_taken() {
    let driver = driver();
    let copier = driver.copier();
    for (run, step, shift, kernel) in [
        (64, 128, [0, 0], "page_copy_16"),
        (64, 128, [256, 16], "page_copy_16"),
        (64, 128, [8, 0], "page_copy_8"),
        (64, 128, [0, 4], "page_copy_4"),
        (64, 98, [0, 0], "page_copy_2"),
        (24, 96, [0, 0], "page_copy_8"),
        (7, 32, [0, 0], "page_copy_1"),
    ] {
        let copy = PagesCopy { pages: &[[1, 0], [0, 1]], blocks: &[spread_rows(run, 3, step)] };
        let source = bytes(2 * 3 * step + shift[0], 3);
        let before = vec![0; 2 * 3 * run + shift[1]];
        let mut expected = before.clone();
        naive(&copy, &source[shift[0]..], &mut expected[shift[1]..]);
        assert_eq!(on_device(&copier, &copy, &source, &before, shift).unwrap(), expected);
        assert_eq!(driver.last_kernel(), kernel, "rows of {run}, {step} apart, at {shift:?}");
    }
}

#[test]
fn more_pages_than_a_launch_can_name_are_several_launches() {
    let driver = driver();
    let copier = driver.copier();
    for (pages, launches) in [(1, 1), (464, 1), (465, 2), (1000, 3)] {
        let pairs: Vec<[u32; 2]> = (0..pages).map(|page| [pages - 1 - page, page]).collect();
        let block = spread_rows(16, 5, 32);
        let copy = PagesCopy { pages: &pairs, blocks: &[block] };
        let source = bytes(160 * pages as usize, 7);
        let before = vec![0; 80 * pages as usize];
        let mut expected = before.clone();
        naive(&copy, &source, &mut expected);
        let earlier = driver.launches();
        assert!(on_device(&copier, &copy, &source, &before, [0, 0]).unwrap() == expected, "{pages} pages");
        assert_eq!(driver.launches() - earlier, launches, "{pages} pages");
    }
}

#[test]
fn what_the_cpu_refuses_a_gpu_refuses_before_any_launch() {
    let driver = driver();
    let copier = driver.copier();
    let copy = PagesCopy { pages: &[[0, 0], [1, 1]], blocks: &[spread_rows(16, 5, 32)] };
    let earlier = driver.launches();
    let short = on_device(&copier, &copy, &[0; 303], &[0; 160], [0, 0]);
    assert!(matches!(short, Err(CopyError::OutOfBounds { needed: 304, .. })), "{short:?}");
    let huge = PageBlock { run: 1 << 31 | 1, ..spread_rows(1, 1, 1) };
    let copy = PagesCopy { pages: &[[0, 0]], blocks: &[spread_rows(16, 1, 16), huge] };
    let pool = |address| Memory::device(address, 1 << 40);
    let other = PageBlock { target: 1 << 20, ..huge };
    let copy = PagesCopy { blocks: &[copy.blocks[0], other], ..copy };
    // SAFETY: the copy is refused before it touches any memory.
    let refused = unsafe { copier.copy_memory(&copy, pool(1 << 41), pool(1 << 42)) };
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("too large for one launch") && text.contains("copy fewer layers"), "{text}");
    assert_eq!(driver.launches(), earlier);
}

#[test]
fn a_driver_that_is_too_old_and_a_missing_device_are_told() {
    let driver = driver();
    let refusal = || driver.load(0).err().unwrap();
    driver.set("fake_version", 11080);
    let old = refusal();
    driver.set("fake_version", 12040);
    assert_eq!(old, CudaError::OldDriver(11080));
    assert!(old.to_string().starts_with("the CUDA driver supports CUDA 11.8, and 12.0 is needed"), "{old}");
    driver.set("fake_devices", 0);
    let none = refusal();
    driver.set("fake_devices", 1);
    assert!(none.to_string().contains("cannot open device 0: "), "{none}");
    assert!(none.to_string().contains("no CUDA-capable device is detected"), "{none}");
    let second = driver.load(1).err().unwrap();
    assert!(second.to_string().contains("cannot open device 1: "), "{second}");
    driver.set("fake_capability", 75);
    let below = refusal();
    driver.set("fake_capability", 120);
    let above = driver.load(0);
    driver.set("fake_capability", 90);
    assert!(below.to_string().contains("75 is below the oldest"), "{below}");
    assert!(above.is_ok(), "a later device gets assembly");
}
