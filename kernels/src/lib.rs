//! Copy, gather and scatter of KV pages, and the batch-invariant CPU math.
//!
//! [`math`] is what the `cpu` executor computes with, and [`copy`] what moves KV between layouts, on a GPU with
//! [`cuda`]. [`xxh3`] is the sum that pages are checked by. None knows of models, batches or pools: they take memory,
//! sizes and offsets.

pub mod copy;
pub mod cuda;
pub mod math;
pub mod xxh3;
