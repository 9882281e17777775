//! Copy, gather and scatter of KV pages, and the batch-invariant CPU math.
//!
//! [`math`] is what the `cpu` executor computes with, and [`copy`] what moves KV between layouts, on a GPU with
//! [`cuda`]. None knows of
//! models, batches or pools: they take memory, sizes and offsets.

pub mod copy;
pub mod cuda;
pub mod math;
