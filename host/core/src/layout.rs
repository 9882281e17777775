//! Where each element of the KV cache lies.
//!
//! The cache is one array over (page, head, layer, K or V, token in page, dim). [`KvLayout`] gives the bytes between
//! neighbours along each of these, for K and for V, whose rows may differ in size. So one type describes every order
//! that an engine requires. The default order is page-head-layer-kv-token-dim: a page is one contiguous run of memory
//! for all layers, and so is a head range of it.

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
    /// Elements of one K row.
    pub head_dim: usize,
    /// Elements of one V row. Most models have as many as in a K row.
    pub value_dim: usize,
    /// Element type.
    pub dtype: Dtype,
}

impl KvShape {
    /// Bytes of one page over all heads and layers, K and V.
    #[must_use]
    pub const fn page_bytes(&self) -> usize {
        self.heads * self.layers * self.block_bytes()
    }

    /// Bytes of one head in one layer of one page, K and V.
    #[must_use]
    pub const fn block_bytes(&self) -> usize {
        self.page_tokens * (self.row_bytes(0) + self.row_bytes(1))
    }

    /// Bytes of one row: of K where `kv` is 0, else of V.
    #[must_use]
    pub const fn row_bytes(&self, kv: usize) -> usize {
        let elements = if kv == 0 { self.head_dim } else { self.value_dim };
        elements * self.dtype.bytes()
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
    /// Where the rows of K lie, and those of V.
    pub sides: [Strides; 2],
}

/// Where the rows of K, or those of V, lie in a pool: bytes between neighbours along each dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strides {
    /// Bytes from the start of the pool to the first row.
    pub start: usize,
    /// Bytes from one page to the next.
    pub page: usize,
    /// Bytes from one head to the next.
    pub head: usize,
    /// Bytes from one layer to the next.
    pub layer: usize,
    /// Bytes from one token of a page to the next.
    pub token: usize,
    /// Bytes of one row.
    pub row: usize,
}

impl Strides {
    const fn new(shape: KvShape, order: KvOrder, kv: usize) -> Self {
        let row = shape.row_bytes(kv);
        let block = shape.block_bytes();
        let before = if kv == 0 { 0 } else { shape.page_tokens * shape.row_bytes(0) };
        match order {
            KvOrder::PageHeadLayerKvTokenDim => {
                let head = block * shape.layers;
                Self { start: before, page: head * shape.heads, head, layer: block, token: row, row }
            }
            KvOrder::PageLayerHeadKvTokenDim => {
                let layer = block * shape.heads;
                Self { start: before, page: layer * shape.layers, head: block, layer, token: row, row }
            }
            KvOrder::LayerKvPageTokenHeadDim => {
                let token = row * shape.heads;
                let rows = shape.heads * shape.pages;
                let page = token * shape.page_tokens;
                Self { start: before * rows, page, head: row, layer: block * rows, token, row }
            }
        }
    }
}

/// Orders in use, outermost dimension first. `dim` is always innermost and dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvOrder {
    /// The default: a page, and a head range of it, is one contiguous run.
    PageHeadLayerKvTokenDim,
    /// A page, and a range of its layers, is one contiguous run: for sending layers while others are computed.
    PageLayerHeadKvTokenDim,
    /// The order that engines require: one array per layer and per K or V, token-major within (often called NHD).
    LayerKvPageTokenHeadDim,
}

impl KvOrder {
    /// All orders, the default first.
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
        Self { shape, order, sides: [Strides::new(shape, order, 0), Strides::new(shape, order, 1)] }
    }

    /// Bytes of the whole pool.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.shape.page_bytes() * self.shape.pages
    }

    /// Byte offset of one row. `kv` is 0 for K (`head_dim` elements) and 1 for V (`value_dim`).
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
        let side = &self.sides[kv];
        // Called for every row that attention reads. It is inlined only without overflow checks. It cannot overflow: all rows
        // lie in the pool.
        let strides = [(page, side.page), (head, side.head), (layer, side.layer), (token, side.token)];
        strides.iter().fold(side.start, |sum, (index, stride)| sum.wrapping_add(index.wrapping_mul(*stride)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape = KvShape {
        pages: 3,
        heads: 2,
        layers: 4,
        page_tokens: 5,
        head_dim: 6,
        value_dim: 6,
        dtype: Dtype::Bf16,
    };

    #[test]
    fn every_order_places_every_byte_of_every_row_once() {
        for (order, value_dim) in KvOrder::ALL.into_iter().flat_map(|order| [6, 4, 9].map(|dim| (order, dim)))
        {
            let layout = KvLayout::new(KvShape { value_dim, ..SHAPE }, order);
            let mut seen = vec![false; layout.bytes()];
            for (page, head, layer) in
                (0..3).flat_map(|p| (0..2).flat_map(move |h| (0..4).map(move |l| (p, h, l))))
            {
                for (kv, token) in (0..2).flat_map(|kv| (0..5).map(move |token| (kv, token))) {
                    let offset = layout.row(page, head, layer, kv, token);
                    for hit in &mut seen[offset..offset + layout.shape.row_bytes(kv)] {
                        assert!(!std::mem::replace(hit, true));
                    }
                }
            }
            assert!(seen.iter().all(|&hit| hit), "{order} leaves holes");
        }
    }

    #[test]
    fn a_head_range_of_a_page_is_contiguous_in_the_default_order() {
        let layout = KvLayout::new(SHAPE, KvOrder::PageHeadLayerKvTokenDim);
        let keys = layout.sides[0];
        assert_eq!(keys.head * SHAPE.heads, keys.page);
        assert_eq!(keys.page, SHAPE.page_bytes());
    }

    #[test]
    #[should_panic(expected = "outside the pool")]
    fn a_row_outside_the_pool_is_refused() {
        let layout = KvLayout::new(SHAPE, KvOrder::PageHeadLayerKvTokenDim);
        assert_eq!(layout.row(3, 0, 0, 0, 0), 0);
    }
}
