//! The parameters by which kernels find K and V.

use crate::cuda::exact::KvView;
use crate::cuda::launch::Divisor;

/// What stands before the sources of this folder.
macro_rules! source {
    ($file:literal) => {
        concat!(include_str!("pool.cuh"), "#line 1 \"", $file, "\"\n", include_str!($file))
    };
}
pub(super) use source;

/// `Pool` of `pool.cuh`, byte for byte.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Pool {
    start: [u64; 2],
    page: [u32; 2],
    head: [u32; 2],
    token: [u32; 2],
    page_tokens: Divisor,
    unused: u32,
}

impl Pool {
    /// The pool of this view, for heads of `head_dim` elements of bf16.
    ///
    /// # Panics
    /// When elements have other sizes, or rows do not lie at multiples of 16 bytes, or strides are of 4 GiB and more.
    pub(super) fn new(view: &KvView) -> Self {
        assert_eq!(view.element, 2, "bytes of an element of K and V");
        assert!(view.page_tokens > 0, "pages of no tokens");
        assert!(
            view.start.iter().all(|start| start.is_multiple_of(16)),
            "K and V do not begin at a multiple of 16 bytes"
        );
        let stride = |stride: u64| {
            assert!(stride.is_multiple_of(16), "a stride of {stride} bytes, not a multiple of 16");
            u32::try_from(stride).unwrap_or_else(|_| panic!("a stride of {stride} bytes, 4 GiB or more"))
        };
        Self {
            start: view.start,
            page: view.page.map(stride),
            head: view.head.map(stride),
            token: view.token.map(stride),
            page_tokens: Divisor::of(view.page_tokens),
            unused: 0,
        }
    }
}
