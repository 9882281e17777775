//! Descriptions of a batch and of its pool for kernels. The exact math and the tensor math share them.

use cudarc::driver::DeviceRepr;

use super::Array;

/// Where the K and V of one layer lie in a pool on the device. All distances are in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvView {
    /// Address of the first row of K and of V in this layer.
    pub start: [u64; 2],
    /// From one page to the next.
    pub page: [u64; 2],
    /// From one head to the next.
    pub head: [u64; 2],
    /// From one token of a page to the next.
    pub token: [u64; 2],
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Bytes of an element: 4 for f32, 2 for bf16.
    pub element: u32,
}

// SAFETY: numbers only, in C's layout, without padding.
unsafe impl DeviceRepr for KvView {}

/// The rows of a batch, on the device.
#[derive(Debug)]
pub struct Rows {
    /// Rows.
    pub rows: usize,
    /// Sequences.
    pub sequences: usize,
    /// Token of each row.
    pub token: Array<u32>,
    /// Position of each row in its sequence.
    pub position: Array<u32>,
    /// Where the pages of each row's sequence begin in `pages`.
    pub table: Array<u32>,
    /// The pages of all sequences, one sequence after the other.
    pub pages: Array<u32>,
}

/// Sizes of one attention layer on the device.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Query heads.
    pub heads: usize,
    /// KV heads. Each serves `heads / kv_heads` query heads that lie side by side.
    pub kv_heads: usize,
    /// Elements of a head, a multiple of 8.
    pub head_dim: usize,
    /// Elements from one query row to the next.
    pub query_stride: usize,
    /// The factor by which scores are multiplied.
    pub scale: f32,
}
