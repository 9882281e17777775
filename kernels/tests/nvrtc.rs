//! The CUDA source compiles for the GPUs that it is for, and moves 16 bytes at a time where it says so.
//!
//! The tests need NVRTC, but no GPU. `NVRTC` names its library, or folders with it, separated as `PATH` is. `cargo xtask test`
//! installs two versions and sets the variable.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what fails here is the test")]

use std::path::PathBuf;

use host_kernels::cuda::{Architecture, CudaError, Image, Nvrtc, SOURCE, digest, exact};
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
fn the_kernels_compile_for_every_gpu_that_they_are_for() {
    for nvrtc in compilers() {
        println!("{} is version {:?}", nvrtc.path().display(), nvrtc.version().unwrap());
        for capability in [80, 90] {
            let Image::Binary(binary) = nvrtc.compile_for(SOURCE, capability).unwrap() else {
                panic!("no machine code for {capability}");
            };
            assert_eq!(&binary[..4], b"\x7fELF");
        }
        let known = nvrtc.capabilities().unwrap();
        assert!(known.contains(&80) && known.contains(&90), "{known:?}");
        // A GPU that is newer than the compiler's latest gets assembly, which the driver compiles.
        let latest = known.last().unwrap();
        let Image::Assembly(text) = nvrtc.compile_for(SOURCE, latest + 1).unwrap() else {
            panic!("machine code for a GPU that the compiler does not know");
        };
        assert!(text.contains(&format!(".target sm_{latest}")), "{text:.500}");
        let error = nvrtc.compile_for(SOURCE, 20).err().unwrap().to_string();
        assert!(error.contains("20 is below the oldest"), "{error}");
    }
}

/// The body of a kernel in PTX.
fn kernel<'a>(text: &'a str, name: &str) -> &'a str {
    let start = text.find(&format!(".entry {name}(")).unwrap();
    let length = text[start..].find("\n}").unwrap();
    &text[start..start + length]
}

#[test]
fn rows_of_sixteen_bytes_are_loaded_and_stored_as_vectors_all_loads_before_the_first_store() {
    for nvrtc in compilers() {
        for capability in [80, 90] {
            let Image::Assembly(text) = nvrtc.compile(SOURCE, Architecture::Assembly(capability)).unwrap()
            else {
                panic!("machine code where assembly was requested");
            };
            for (name, load, store) in [
                ("page_copy_16", "ld.global.cs.v4.u32", "st.global.cg.v4.u32"),
                ("page_copy_8", "ld.global.cs.v2.u32", "st.global.cg.v2.u32"),
                ("page_copy_4", "ld.global.cs.u32", "st.global.cg.u32"),
                ("page_copy_2", "ld.global.cs.u16", "st.global.cg.u16"),
                ("page_copy_1", "ld.global.cs.u8", "st.global.cg.u8"),
            ] {
                let body = kernel(&text, name);
                let places = |what: &str| body.match_indices(what).map(|(at, _)| at).collect::<Vec<_>>();
                let (loads, stores) = (places(load), places(store));
                assert_eq!((loads.len(), stores.len()), (4, 4), "{name}:\n{body}");
                assert!(loads.last() < stores.first(), "{name}:\n{body}");
                assert_eq!((places("ld.global").len(), places("st.global").len()), (4, 4), "{name}");
                // Page numbers are read in place from the parameters, and divisions are multiplications.
                assert_eq!(
                    (places(".local").len(), places("div.").len(), places("rem.").len()),
                    (0, 0, 0),
                    "{name}"
                );
            }
        }
    }
}

#[test]
fn the_exact_math_has_no_products_that_the_compiler_fused_and_no_approximations() {
    for nvrtc in compilers() {
        for capability in [80, 90] {
            let binary = nvrtc.compile_with(exact::SOURCE.text, exact::SOURCE.options, capability).unwrap();
            assert!(matches!(binary, Image::Binary(_)), "no machine code for {capability}");
        }
        let latest = *nvrtc.capabilities().unwrap().last().unwrap();
        let Image::Assembly(text) =
            nvrtc.compile_with(exact::SOURCE.text, exact::SOURCE.options, latest + 1).unwrap()
        else {
            panic!("machine code for a GPU that the compiler does not know");
        };
        // The assembler may fuse `mul.f32` with the sum after it, but must not fuse `mul.rn.f32`.
        assert!(kernel(&text, "rotate_heads").contains("mul.rn.f32"), "{text:.500}");
        for wrong in [".approx", ".ftz", "mul.f32", "add.f32", "div.full"] {
            assert!(!text.contains(wrong), "{wrong}");
        }
    }
}

#[test]
fn digests_load_sixteen_bytes_at_a_time_and_keep_everything_in_registers() {
    for nvrtc in compilers() {
        for capability in [80, 90] {
            let Image::Assembly(text) =
                nvrtc.compile(digest::SOURCE.text, Architecture::Assembly(capability)).unwrap()
            else {
                panic!("machine code where assembly was requested");
            };
            let body = kernel(&text, "digest_long");
            assert!(!body.contains(".local"), "{body}");
            // Two batches in the loop, two behind it, and the last stripe.
            assert_eq!(body.matches("ld.global.cs.v2.u64").count(), 4 * 8 + 1, "{body}");
        }
    }
}

#[test]
fn what_does_not_compile_is_told_with_the_compilers_words() {
    for nvrtc in compilers() {
        let error =
            nvrtc.compile("__global__ void f() { colour = 1; }", Architecture::Binary(90)).err().unwrap();
        let text = error.to_string();
        assert!(
            text.contains("cannot compile the kernels") && text.contains("\"colour\" is undefined"),
            "{text}"
        );
    }
}

#[test]
fn a_missing_compiler_names_what_was_tried() {
    let missing = Nvrtc::open(Some("/nowhere/libnvrtc.so.12".as_ref())).unwrap_err();
    assert!(matches!(&missing, CudaError::NoNvrtc(tried) if tried.len() == 1), "{missing}");
    assert!(missing.to_string().starts_with("no NVRTC: none of /nowhere/libnvrtc.so.12 ("), "{missing}");
    let folder = std::env::temp_dir().join("a folder without nvrtc");
    std::fs::create_dir_all(&folder).unwrap();
    let missing = Nvrtc::open(Some(&folder)).unwrap_err().to_string();
    assert!(missing.contains("libnvrtc.so.13 or libnvrtc.so.12 or libnvrtc.so in "), "{missing}");
}
