//! Copy, gather and scatter of KV pages, and the batch-invariant CPU math.
//!
//! The `cpu` executor computes with [`math`]. [`copy`] moves KV between layouts, on a GPU together with [`cuda`]. [`xxh3`]
//! computes the sums by which pages are checked. [`math`], [`copy`] and [`xxh3`] do not know models, batches or pools: they take
//! memory, sizes and offsets.

pub mod copy;
pub mod cuda;
pub mod math;
pub mod xxh3;
