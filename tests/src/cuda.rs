//! A stand-in for NVIDIA's driver and compiler on machines without a GPU: our kernels, compiled by gcc, with the parts of both
//! libraries that are needed to call them (`tests/cuda`).
//!
//! It shows that parameters, grids and index arithmetic are right, that sums equal those of the CPU, and that no access is out of
//! bounds or unaligned. It is lazy: work in a stream is done when a caller waits for it, so a missing wait shows as memory that
//! was not written. It shows nothing of a GPU's memory model or speed.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::built::{repository, target};
use crate::model::TinyModel;
use crate::skip::skipped;

/// Sources of the stand-in. Each file that lists kernels includes their source.
const FILES: [&str; 4] = ["driver.c", "page_copy.c", "exact.c", "digest.c"];
/// Names under which programs look for it. The first is the library's own.
const NAMES: [&str; 3] = ["libcuda.so", "libcuda.so.1", "libnvrtc.so.12"];

/// The folder of the stand-in. Builds it unless it was built from the same files before.
///
/// A program has a GPU when it is started with the [variables](environment) that name the folder. A test that has loaded
/// [`library`] has one, too: later loads of that name find the library that is loaded.
///
/// # Panics
/// When gcc cannot compile it.
#[must_use]
pub fn stand_in() -> PathBuf {
    let sources = [repository().join("tests/cuda"), repository().join("kernels/src/cuda")];
    // With these flags the code rounds as a GPU does: products and sums are fused only where the source says so. Without the
    // instruction, the C library fuses them.
    let mut flags =
        vec!["-std=gnu11", "-O2", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-ffp-contract=off"];
    flags.extend(["-shared", "-fPIC", "-pthread", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so"]);
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("fma") {
        flags.push("-mfma");
    }
    let mut state = DefaultHasher::new();
    flags.hash(&mut state);
    for folder in &sources {
        for file in files(folder) {
            file.hash(&mut state);
            std::fs::read(&file).unwrap().hash(&mut state);
        }
    }
    let all = target().join("cuda-stand-in");
    let folder = all.join(format!("{:016x}", state.finish()));
    if folder.is_dir() {
        return folder;
    }
    std::fs::create_dir_all(&all).unwrap();
    let unfinished = tempfile::tempdir_in(&all).unwrap();
    let status = Command::new(std::env::var_os("CC").unwrap_or_else(|| "gcc".into()))
        .args(flags)
        .arg("-include")
        .arg(sources[0].join("words.h"))
        .arg("-I")
        .arg(&sources[1])
        .arg("-o")
        .arg(unfinished.path().join(NAMES[0]))
        .args(FILES.map(|file| sources[0].join(file)))
        .arg("-lm")
        .status()
        .unwrap();
    assert!(status.success(), "gcc refuses the stand-in or the kernels");
    for name in &NAMES[1..] {
        symlink(NAMES[0], unfinished.path().join(name)).unwrap();
    }
    // Another test may have built the folder meanwhile.
    if std::fs::rename(unfinished.path(), &folder).is_err() {
        assert!(folder.is_dir(), "the stand-in cannot be moved to {}", folder.display());
    }
    folder
}

/// The variables with which a program has the stand-in for a GPU. With `HOST_CUDA=device` the machine has a GPU, and its compiler is
/// in the first folder that the variable `NVRTC` names.
///
/// # Panics
/// As [`stand_in`].
#[must_use]
pub fn environment() -> Vec<(&'static str, PathBuf)> {
    if is_on_device() {
        let named = std::env::var_os("NVRTC").unwrap_or_default();
        return std::env::split_paths(&named).take(1).map(|folder| ("NVRTC", folder)).collect();
    }
    let folder = stand_in();
    vec![("LD_LIBRARY_PATH", folder.clone()), ("NVRTC", folder)]
}

/// Whether tests use the GPU of this machine.
#[must_use]
pub fn is_on_device() -> bool {
    std::env::var_os("HOST_CUDA").is_some_and(|value| value == "device")
}

/// The variable that names the file of [`LostGpus`].
const LOST: &str = "STAND_IN_LOST";

/// A file with the ids of the processes that have lost their GPU.
pub struct LostGpus(tempfile::NamedTempFile);

impl LostGpus {
    /// No process has lost its GPU yet. Absent on a real GPU, which cannot be taken away.
    ///
    /// # Panics
    /// When there is no room for a file.
    #[must_use]
    pub fn none() -> Option<Self> {
        if is_on_device() {
            skipped("workers that lose their GPU: HOST_CUDA=device says that there is a real one");
            return None;
        }
        Some(Self(tempfile::NamedTempFile::new().expect("a file for ids of processes")))
    }

    /// The variable for programs that may lose their GPU.
    #[must_use]
    pub fn variable(&self) -> (&'static str, &Path) {
        (LOST, self.0.path())
    }

    /// Takes a process's GPU away: from now on, each of its calls to the driver fails.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn lose(&self, pid: u32) {
        self.0.as_file().write_all(format!("{pid}\n").as_bytes()).expect("an id is written");
    }
}

/// A tiny model of two layers. A worker on the CPU and a worker on the stand-in compute the same bits of it.
pub struct OnBoth(tempfile::TempDir);

impl OnBoth {
    /// Makes the model.
    ///
    /// # Panics
    /// When it cannot be written.
    #[must_use]
    pub fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory for a model");
        let model = TinyModel { layers: 2, kv_heads: 4, seed: 3, ..TinyModel::default() };
        model.write(directory.path()).expect("the model is written");
        Self(directory)
    }

    /// Flags of a worker that computes the model on the `cpu`, or on the GPU with `cuda`.
    #[must_use]
    pub fn on(&self, executor: &str) -> [String; 4] {
        let directory = self.0.path().display().to_string();
        ["--executor".to_owned(), executor.to_owned(), "--model".to_owned(), directory]
    }
}

impl Default for OnBoth {
    fn default() -> Self {
        Self::new()
    }
}

/// The library in the [stand-in's folder](stand_in), to be loaded by its path before anything looks for a driver. It also stands
/// in for NVRTC.
///
/// # Panics
/// As [`stand_in`].
#[must_use]
pub fn library() -> PathBuf {
    stand_in().join(NAMES[0])
}

/// The files of a folder that the stand-in is made of, in order.
fn files(folder: &Path) -> Vec<PathBuf> {
    let all = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_source = |path: &PathBuf| {
        path.extension().is_some_and(|ending| ending == "c" || ending == "h" || ending == "cu")
    };
    let mut files: Vec<PathBuf> = all.filter(is_source).collect();
    files.sort();
    files
}
