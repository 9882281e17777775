//! The kernels of attention and rows compile for the GPUs that they are for, with tensor cores and asynchronous copies.
//!
//! The tests need NVRTC, but no GPU. `NVRTC` names its library, or folders with it, separated as `PATH` is. `cargo xtask test`
//! installs two versions and sets the variable.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what fails here is the test")]

use std::path::PathBuf;

use host_kernels::cuda::tensor::{attention, rows};
use host_kernels::cuda::{Image, Nvrtc, Source};
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

const SOURCES: [Source; 3] = [attention::SOURCE_64, attention::SOURCE_128, rows::SOURCE];

#[test]
fn the_kernels_compile_to_machine_code() {
    for nvrtc in compilers() {
        for (source, capability) in SOURCES.iter().map(|source| (source, 90)).chain([(&rows::SOURCE, 80)]) {
            let image = nvrtc.compile_with(source.text, source.options, capability).unwrap();
            let Image::Binary(binary) = image else { panic!("no machine code for {capability}") };
            assert_eq!(&binary[..4], b"\x7fELF", "{} for {capability}", source.name);
        }
    }
}

/// The body of a kernel in PTX.
fn kernel<'a>(text: &'a str, name: &str) -> &'a str {
    let start = text.find(&format!(".entry {name}(")).unwrap();
    let length = text[start..].find("\n}").unwrap();
    &text[start..start + length]
}

/// PTX for the latest GPU that the compiler knows. The compilation is for a newer GPU, which makes the compiler give PTX.
fn assembly(nvrtc: &Nvrtc, source: &Source) -> String {
    let latest = *nvrtc.capabilities().unwrap().last().unwrap();
    match nvrtc.compile_with(source.text, source.options, latest + 1).unwrap() {
        Image::Assembly(text) => text,
        Image::Binary(_) => panic!("machine code for a GPU that the compiler does not know"),
    }
}

#[test]
fn attention_multiplies_on_tensor_cores_and_loads_while_it_does() {
    let decode = [
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
        "cp.async.cg.shared.global.L2::128B",
        "ex2.approx.ftz.f32",
    ];
    let prefill = [
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier",
        "setmaxnreg.inc",
        "ex2.approx.ftz.f32",
    ];
    for nvrtc in compilers() {
        for source in [attention::SOURCE_64, attention::SOURCE_128] {
            let text = assembly(&nvrtc, &source);
            for (name, instructions) in [("attention_decode", decode), ("attention_prefill", prefill)] {
                let body = kernel(&text, name);
                for instruction in instructions {
                    assert!(body.contains(instruction), "{name} {:?} has no {instruction}", source.options);
                }
                assert!(!body.contains(".local"), "{name} {:?} keeps arrays in memory", source.options);
            }
        }
    }
}

#[test]
fn every_kernel_waits_for_the_one_before_it_and_writes_nothing_until_then() {
    for nvrtc in compilers() {
        for source in SOURCES {
            let text = assembly(&nvrtc, &source);
            let kernels: Vec<&str> =
                text.split(".entry ").skip(1).map(|entry| &entry[..entry.find('(').unwrap()]).collect();
            assert!(kernels.len() >= 3, "{kernels:?}");
            for name in kernels {
                let body = kernel(&text, name);
                let wait = body.find("griddepcontrol.wait").unwrap_or_else(|| panic!("{name} does not wait"));
                let store = body.find("st.global").unwrap_or_else(|| panic!("{name} writes nothing"));
                assert!(wait < store, "{name} writes before it waits");
            }
        }
    }
}
