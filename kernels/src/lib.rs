//! Copy, gather and scatter of KV pages, and the batch-invariant CPU math.
