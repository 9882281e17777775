//! A GPU that lacks something, or plugins that do not reach its memory.

use std::path::Path;
use std::process::Command;

use host_tests::model::tiny_qwen3;
use host_tests::program::run_to_end;
use host_tests::{cuda, plugin_files};

/// Runs the program with the driver in this folder. Returns its exit code and its output.
fn run(driver: &Path, nvrtc: &Path, flags: &[&str]) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().unwrap();
    tiny_qwen3(folder.path(), 1).unwrap();
    let plugins = plugin_files::directory(&["shm", "wire"]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
    command.args(["--executor", "cuda", "--port", "0"]);
    command.arg("--model").arg(folder.path()).arg("--plugins-dir").arg(plugins.path());
    command.args(flags).env("NVRTC", nvrtc).env("LD_LIBRARY_PATH", driver);
    // A cache of its own, so that no kernels of an earlier start are found.
    command.env("XDG_CACHE_HOME", folder.path().join("cache"));
    let ended = run_to_end("host", &mut command);
    (ended.code(), ended.said())
}

#[test]
fn a_gpu_that_is_not_there_is_told_once_before_anything_starts() {
    let stand_in = cuda::stand_in();
    let shown = |flags: &[&str], driver: &Path, says: &str| {
        let (code, said) = run(driver, &stand_in, flags);
        assert_eq!(code, Some(2), "{said}");
        assert_eq!(said.matches(says).count(), 1, "{said}");
        assert!(!said.contains("panicked") && !said.contains("worker ready"), "{said}");
    };
    shown(
        &["--cuda-device", "3"],
        &stand_in,
        "--executor cuda cannot work here: the CUDA driver cannot open device 3",
    );
    shown(&["--pool-pages", "9999999"], &stand_in, "(--pool-pages) in 2 workers on GPU 0");
    // Files that are no libraries hide a real driver.
    let broken = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::fs::write(broken.path().join(name), "").unwrap();
    }
    let flags = ["--role", "aggregated", "--kv-memory", "1MiB"];
    shown(&flags, broken.path(), "no CUDA driver: libcuda.so.1 cannot be loaded");
}

#[test]
fn a_missing_compiler_is_told() {
    let (stand_in, nowhere) = (cuda::stand_in(), Path::new("/nowhere/libnvrtc.so"));
    let flags = ["--role", "aggregated", "--kv-memory", "1MiB"];
    let (code, said) = run(&stand_in, nowhere, &flags);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("no NVRTC: none of /nowhere/libnvrtc.so"), "{said}");
    assert!(!said.contains("panicked"), "{said}");
}

#[test]
fn a_pool_on_a_gpu_that_neither_the_plugin_nor_staging_memory_reaches_is_refused() {
    let stand_in = cuda::stand_in();
    for flags in [["--staging", "never"], ["--staging-bytes", "0"]] {
        let flags = [&["--plugins", "wire"], &flags[..]].concat();
        let (code, said) = run(&stand_in, &stand_in, &flags);
        assert_eq!(code, Some(2), "{said}");
        assert!(
            said.contains("UnstagedGpuPools needs vram") && said.contains("plugin \"wire\" declares"),
            "{said}"
        );
        assert!(said.contains("use instead: shm"), "{said}");
        assert!(said.contains("or leave --staging never and --staging-bytes 0 out"), "{said}");
    }
}
