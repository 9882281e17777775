//! How the weights of made-up models are stored.

/// Element type of the weights in the file. The values of the first two are the same (bf16 can hold all of them).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Two bytes.
    Bf16,
    /// Four bytes.
    F32,
    /// Two bytes, of half precision: the smallest values are rounded more.
    F16,
}
