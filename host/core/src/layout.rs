//! Where each element of the KV cache lies.
//!
//! The cache is one array over (page, head, layer, K or V, token in page, dim). [`KvLayout`] gives the bytes between
//! neighbours along each of these, so any order that an engine fixes is the same type. The default order is
//! page-head-layer-kv-token-dim: a page is one contiguous piece of memory for all layers, and so is a head range of it.

use std::fmt;
use std::str::FromStr;

/// Element type of K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 32-bit float.
    F32,
    /// The upper half of a 32-bit float.
    Bf16,
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
        })
    }
}

impl FromStr for Dtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "f32" => Ok(Dtype::F32),
            "bf16" => Ok(Dtype::Bf16),
            other => Err(format!("unknown KV element type {other:?}: use f32 or bf16")),
        }
    }
}

/// Extents of the KV cache of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvShape {
    /// Pages in the pool.
    pub pages: usize,
    /// KV heads of this rank.
    pub heads: usize,
    /// Transformer layers.
    pub layers: usize,
    /// Tokens in a page.
    pub page_tokens: usize,
    /// Elements of one head's K, and of its V.
    pub head_dim: usize,
    /// Element type.
    pub dtype: Dtype,
}

impl KvShape {
    /// Bytes of one page over all heads and layers, K and V.
    #[must_use]
    pub const fn page_bytes(&self) -> usize {
        self.heads * self.layers * 2 * self.page_tokens * self.head_dim * self.dtype.bytes()
    }

    /// Pages that `tokens` tokens need.
    #[must_use]
    pub const fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens)
    }
}

/// The dimensions in memory order, outermost first, and the strides that follow from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    /// The extents.
    pub shape: KvShape,
    /// Which order this is.
    pub order: KvOrder,
    /// Bytes from one page to the next.
    pub page: usize,
    /// Bytes from one head to the next.
    pub head: usize,
    /// Bytes from one layer to the next.
    pub layer: usize,
    /// Bytes from K to V.
    pub kv: usize,
    /// Bytes from one token of a page to the next.
    pub token: usize,
}

/// Orders in use, outermost dimension first; `dim` is always innermost and dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvOrder {
    /// Ours: a page, and a head range of it, is one contiguous piece.
    PageHeadLayerKvTokenDim,
    /// A page, and a range of its layers, is one contiguous piece: for sending layers while others are computed.
    PageLayerHeadKvTokenDim,
    /// What engines fix: one array per layer and per K or V, token-major within (often called NHD).
    LayerKvPageTokenHeadDim,
}

impl KvOrder {
    /// All of them, the default first.
    pub const ALL: [KvOrder; 3] = [
        KvOrder::PageHeadLayerKvTokenDim,
        KvOrder::PageLayerHeadKvTokenDim,
        KvOrder::LayerKvPageTokenHeadDim,
    ];
}

impl fmt::Display for KvOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KvOrder::PageHeadLayerKvTokenDim => "page-head-layer-kv-token-dim",
            KvOrder::PageLayerHeadKvTokenDim => "page-layer-head-kv-token-dim",
            KvOrder::LayerKvPageTokenHeadDim => "layer-kv-page-token-head-dim",
        })
    }
}

impl FromStr for KvOrder {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        KvOrder::ALL.into_iter().find(|order| order.to_string() == text).ok_or_else(|| {
            let [first, second, third] = KvOrder::ALL;
            format!("unknown KV layout {text:?}: use {first}, {second} or {third}")
        })
    }
}

impl KvLayout {
    /// The layout of this shape in this order.
    #[must_use]
    pub const fn new(shape: KvShape, order: KvOrder) -> Self {
        let row = shape.head_dim * shape.dtype.bytes();
        match order {
            KvOrder::PageHeadLayerKvTokenDim => {
                let kv = row * shape.page_tokens;
                let layer = kv * 2;
                let head = layer * shape.layers;
                Self { shape, order, page: head * shape.heads, head, layer, kv, token: row }
            }
            KvOrder::PageLayerHeadKvTokenDim => {
                let kv = row * shape.page_tokens;
                let head = kv * 2;
                let layer = head * shape.heads;
                Self { shape, order, page: layer * shape.layers, head, layer, kv, token: row }
            }
            KvOrder::LayerKvPageTokenHeadDim => {
                let token = row * shape.heads;
                let page = token * shape.page_tokens;
                let kv = page * shape.pages;
                Self { shape, order, page, head: row, layer: kv * 2, kv, token }
            }
        }
    }

    /// Bytes of the whole pool.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.shape.page_bytes() * self.shape.pages
    }

    /// Byte offset of one row of `head_dim` elements; `kv` is 0 for K and 1 for V.
    ///
    /// # Panics
    /// When an index lies outside the shape.
    #[must_use]
    #[inline]
    pub fn row(&self, page: usize, head: usize, layer: usize, kv: usize, token: usize) -> usize {
        let shape = &self.shape;
        assert!(
            page < shape.pages
                && head < shape.heads
                && layer < shape.layers
                && kv < 2
                && token < shape.page_tokens,
            "KV row outside the pool: page {page} head {head} layer {layer} kv {kv} token {token} of {shape:?}"
        );
        page * self.page + head * self.head + layer * self.layer + kv * self.kv + token * self.token
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape =
        KvShape { pages: 3, heads: 2, layers: 4, page_tokens: 5, head_dim: 6, dtype: Dtype::Bf16 };

    #[test]
    fn every_order_places_every_row_once() {
        for order in KvOrder::ALL {
            let layout = KvLayout::new(SHAPE, order);
            let row = SHAPE.head_dim * SHAPE.dtype.bytes();
            let mut seen = vec![false; layout.bytes() / row];
            for page in 0..3 {
                for head in 0..2 {
                    for layer in 0..4 {
                        for kv in 0..2 {
                            for token in 0..5 {
                                let offset = layout.row(page, head, layer, kv, token);
                                assert_eq!(offset % row, 0);
                                assert!(!std::mem::replace(&mut seen[offset / row], true));
                            }
                        }
                    }
                }
            }
            assert!(seen.iter().all(|&hit| hit), "{order} leaves holes");
        }
    }

    #[test]
    fn a_head_range_of_a_page_is_contiguous_in_the_default_order() {
        let layout = KvLayout::new(SHAPE, KvOrder::PageHeadLayerKvTokenDim);
        assert_eq!(layout.head * SHAPE.heads, layout.page);
        assert_eq!(layout.page, SHAPE.page_bytes());
    }

    #[test]
    #[should_panic(expected = "outside the pool")]
    fn a_row_outside_the_pool_is_refused() {
        let layout = KvLayout::new(SHAPE, KvOrder::PageHeadLayerKvTokenDim);
        assert_eq!(layout.row(3, 0, 0, 0, 0), 0);
    }
}
