//! Sources of kernels.

/// A text in CUDA C++, with the compiler's options.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// The name of its file, for messages and for the cache of compiled kernels.
    pub name: &'static str,
    /// The text.
    pub text: &'static str,
    /// Options of NVRTC besides the architecture, such as `--fmad=false`.
    pub options: &'static [&'static str],
}
