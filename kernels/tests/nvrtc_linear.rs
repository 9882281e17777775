//! The matrix products for tensor cores compile for the GPU that they are for, keep their sums in registers, and use the
//! instructions that they say they use.
//!
//! The tests need NVRTC, but no GPU, as `nvrtc.rs` does.

#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

use std::path::PathBuf;

use host_kernels::cuda::tensor::linear::{SOURCE, Variant};
use host_kernels::cuda::{Image, Nvrtc};
use host_tests::skip::skipped;

fn compilers() -> Vec<Nvrtc> {
    let paths = std::env::var_os("NVRTC").unwrap_or_default();
    let paths: Vec<PathBuf> =
        std::env::split_paths(&paths).filter(|path| !path.as_os_str().is_empty()).collect();
    if paths.is_empty() {
        skipped("compiling the CUDA kernels: NVRTC names no library");
    }
    paths.iter().map(|path| Nvrtc::open(Some(path)).unwrap()).collect()
}

#[test]
fn the_products_compile_for_hopper_and_multiply_on_its_tensor_cores() {
    for nvrtc in compilers() {
        let Image::Binary(binary) = nvrtc.compile_with(SOURCE.text, SOURCE.options, 90).unwrap() else {
            panic!("no machine code for 90");
        };
        assert_eq!(&binary[..4], b"\x7fELF");

        // A device that the compiler does not know gets assembly, which this test can read.
        let unknown = nvrtc.capabilities().unwrap().last().unwrap() + 1;
        let Image::Assembly(text) = nvrtc.compile_with(SOURCE.text, SOURCE.options, unknown).unwrap() else {
            panic!("machine code where assembly was requested");
        };
        assert!(text.contains(".target sm_90a"), "{text:.500}");
        for variant in Variant::ALL {
            let name = variant.kernel();
            let start = text.find(&format!(".entry {name}(")).unwrap();
            let body = &text[start..start + text[start..].find("\n}").unwrap()];
            let instruction =
                format!("wgmma.mma_async.sync.aligned.m64n{}k16.f32.bf16.bf16", variant.tokens());
            for what in [
                instruction.as_str(),
                "cp.async.bulk.shared::cluster.global.mbarrier",
                "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier",
                "griddepcontrol.wait",
                "griddepcontrol.launch_dependents",
            ] {
                assert!(body.contains(what), "{name} has no {what}");
            }
            assert!(!body.contains(".local"), "{name} keeps something in memory");
            assert_eq!(body.contains("setmaxnreg"), variant.groups() > 1, "{name}");
        }
    }
}
