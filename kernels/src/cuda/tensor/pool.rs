//! The parameters by which kernels find K and V.

use crate::cuda::batch::KvView;
use crate::cuda::launch::Divisor;

/// The text of these sources of this folder, with `bits.cuh` in front.
macro_rules! source {
    ($($file:literal),+) => {
        concat!(include_str!("bits.cuh"), $("#line 1 \"", $file, "\"\n", include_str!($file)),+)
    };
}
pub(super) use source;

/// `Pool` of `pool.cuh`, byte for byte.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Pool {
    start: [u64; 2],
    page: u32,
    head: u32,
    token: u32,
    page_tokens: Divisor,
}

impl Pool {
    /// The pool of this view, for heads of `head_dim` elements of bf16.
    ///
    /// # Panics
    /// When elements have another size, K and V have different layouts, distances are no whole rows, or K or V does not begin at a
    /// multiple of 16 bytes.
    pub(super) fn new(view: &KvView, head_dim: usize) -> Self {
        assert_eq!(view.element, 2, "bytes of an element of K and V");
        assert!(view.page_tokens > 0, "pages of no tokens");
        assert!(
            view.start.iter().all(|start| start.is_multiple_of(16)),
            "K and V do not begin at multiples of 16 bytes"
        );
        let row = 2 * head_dim as u64;
        let rows = |what, [keys, values]: [u64; 2]| {
            assert_eq!(keys, values, "bytes from one {what} to the next in K and in V");
            assert!(
                keys.is_multiple_of(row),
                "{keys} bytes from one {what} to the next are no whole rows of {row}"
            );
            u32::try_from(keys / row)
                .unwrap_or_else(|_| panic!("{keys} bytes from one {what} to the next are 2^32 rows or more"))
        };
        Self {
            start: view.start,
            page: rows("page", view.page),
            head: rows("head", view.head),
            token: rows("token", view.token),
            page_tokens: Divisor::of(view.page_tokens),
        }
    }
}
