//! What kernels are compiled from.

/// CUDA C++ and how it is compiled.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Its file's name, for messages and for the cache of compiled kernels.
    pub name: &'static str,
    /// The text.
    pub text: &'static str,
    /// Options of NVRTC besides the architecture, such as `--fmad=false`.
    pub options: &'static [&'static str],
}
