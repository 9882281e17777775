//! Layer groups: when pages of a chunk are sent while its later layers are still computed, and in how many groups of
//! layers.
//!
//! When a prompt is computed, decode still has to wait for the pages of the last chunk. If they are cut into groups of
//! layers, all but the last group travel while the chunk is computed. Each group is a part of its own, which costs
//! messages and wake-ups, and in layouts where a layer is not contiguous it is cut into smaller runs. So groups are no
//! finer than what [`KNEE`] and [`LEAST_PART`] allow.

use std::fmt;
use std::str::FromStr;

use crate::layout::KvLayout;
use crate::transfer::{KNEE, piece_bytes};

/// Smallest part that is sent on its own, in bytes: copying it takes about as long as telling all threads on both sides
/// of one more part.
pub const LEAST_PART: usize = 512 << 10;

/// Most groups that [`Wish::Auto`] chooses: with eight, 7/8 of a chunk's transfer overlaps with computing.
const MOST_CHOSEN: u32 = 8;

/// Most groups that an operator can ask for. Bounds the parts of a transfer.
pub const MOST_LAYER_GROUPS: u32 = 32;

/// How many layer groups the operator wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wish {
    /// Pages are sent whole.
    Off,
    /// As many groups as pay.
    #[default]
    Auto,
    /// So many, whether they pay or not.
    Groups(u32),
}

impl fmt::Display for Wish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wish::Off => f.write_str("off"),
            Wish::Auto => f.write_str("auto"),
            Wish::Groups(groups) => write!(f, "{groups}"),
        }
    }
}

impl FromStr for Wish {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("off", _) => Ok(Wish::Off),
            ("auto", _) => Ok(Wish::Auto),
            (_, Ok(groups)) if (2..=MOST_LAYER_GROUPS).contains(&groups) => Ok(Wish::Groups(groups)),
            _ => Err(format!(
                "{text:?} is no number of layer groups: use auto, off or 2 to {MOST_LAYER_GROUPS}"
            )),
        }
    }
}

/// The rule by which one worker cuts parts into layer groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerGroups {
    layers: u32,
    most: u32,
    least_part: usize,
    page_bytes: usize,
}

impl LayerGroups {
    /// The rule for a model of so many layers that sends pages whole.
    #[must_use]
    pub fn off(layers: u32) -> Self {
        Self { layers, most: 1, least_part: 0, page_bytes: 0 }
    }

    /// The rule for pages of this layout.
    ///
    /// # Errors
    /// When more groups are wanted than there are layers.
    pub fn new(wish: Wish, layout: &KvLayout) -> Result<Self, String> {
        let layers = u32::try_from(layout.shape.layers).unwrap_or(u32::MAX);
        let page_bytes = layout.shape.page_bytes();
        match wish {
            Wish::Off => Ok(Self::off(layers)),
            Wish::Groups(groups) if groups > layers => {
                Err(format!("{groups} layer groups of a model of {layers} layers"))
            }
            Wish::Groups(most) => Ok(Self { layers, most, least_part: 0, page_bytes }),
            Wish::Auto => {
                let enough = KNEE.min(piece_bytes(layout, layout.shape.layers));
                let finest = (1..=layers).find(|count| piece_bytes(layout, *count as usize) >= enough);
                let most = (layers / finest.unwrap_or(layers).max(1)).clamp(1, MOST_CHOSEN);
                Ok(Self { layers, most, least_part: LEAST_PART, page_bytes })
            }
        }
    }

    /// Layers of the model.
    #[must_use]
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Layers in a group when `pages` pages are computed at once, or `None` when they are sent whole.
    #[must_use]
    pub fn group(&self, pages: usize) -> Option<u32> {
        let fitting = (pages * self.page_bytes).checked_div(self.least_part).unwrap_or(usize::MAX);
        let groups = self.most.min(u32::try_from(fitting).unwrap_or(u32::MAX));
        let group = self.layers.div_ceil(groups.max(1));
        (pages > 0 && group < self.layers).then_some(group)
    }

    /// Parts that a transfer of `pages` pages has at most, whatever rule its sender has.
    #[must_use]
    pub fn most_parts(&self, pages: usize) -> usize {
        // Each part but the last completes a page, or brings another group of a page's layers.
        pages * self.layers.clamp(1, MOST_LAYER_GROUPS) as usize + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Dtype, KvOrder, KvShape};

    /// A page of 16 tokens of a model of 8 billion parameters: 8 heads of 128, 32 layers, 2 MiB.
    fn layout(order: KvOrder) -> KvLayout {
        let shape = KvShape {
            pages: 100,
            heads: 8,
            layers: 32,
            page_tokens: 16,
            head_dim: 128,
            value_dim: 128,
            dtype: Dtype::Bf16,
        };
        KvLayout::new(shape, order)
    }

    #[test]
    fn pieces_stay_above_the_knee_or_are_as_large_as_without_groups() {
        let head_first = layout(KvOrder::PageHeadLayerKvTokenDim);
        assert_eq!((piece_bytes(&head_first, 1), piece_bytes(&head_first, 32)), (8 << 10, 2 << 20));
        let rule = LayerGroups::new(Wish::Auto, &head_first).unwrap();
        assert_eq!(rule.group(32), Some(4), "32 KiB a run");
        let mut small = head_first.shape;
        (small.head_dim, small.value_dim) = (16, 16);
        let rule =
            LayerGroups::new(Wish::Auto, &KvLayout::new(small, KvOrder::PageHeadLayerKvTokenDim)).unwrap();
        assert_eq!(rule.group(1000), Some(16), "1 KiB a layer");
        (small.head_dim, small.value_dim) = (8, 8);
        let rule =
            LayerGroups::new(Wish::Auto, &KvLayout::new(small, KvOrder::PageHeadLayerKvTokenDim)).unwrap();
        assert_eq!(rule.group(1000), None, "a head of all layers is 16 KiB");
        // K of one layer of a page is 4 KiB here, in groups or not.
        let rule =
            LayerGroups::new(Wish::Auto, &KvLayout::new(small, KvOrder::LayerKvPageTokenHeadDim)).unwrap();
        assert_eq!(rule.group(1000), Some(4));
        let rule =
            LayerGroups::new(Wish::Auto, &KvLayout::new(small, KvOrder::PageLayerHeadKvTokenDim)).unwrap();
        assert_eq!(rule.group(1000), Some(4), "4 KiB a layer");
    }

    #[test]
    fn small_chunks_are_sent_whole() {
        let mut shape = layout(KvOrder::PageLayerHeadKvTokenDim).shape;
        shape.layers = 4;
        let rule =
            LayerGroups::new(Wish::Auto, &KvLayout::new(shape, KvOrder::PageLayerHeadKvTokenDim)).unwrap();
        let page = shape.page_bytes();
        let groups = |pages: usize| rule.group(pages).map_or(1, |group| 4_u32.div_ceil(group));
        for pages in 0..40 {
            let least = pages * page / groups(pages) as usize;
            assert!(groups(pages) == 1 || least >= LEAST_PART, "{pages} pages: parts of {least} bytes");
        }
        assert_eq!((groups(0), groups(3), groups(40)), (1, 1, 4));
    }

    #[test]
    fn a_number_of_groups_is_taken_as_it_is_or_refused() {
        let layout = layout(KvOrder::PageHeadLayerKvTokenDim);
        for (text, group) in [("off", None), ("2", Some(16)), ("3", Some(11)), ("32", Some(1))] {
            let wish: Wish = text.parse().unwrap();
            assert_eq!(wish.to_string(), text);
            assert_eq!(LayerGroups::new(wish, &layout).unwrap().group(1), group, "{text}");
        }
        for text in ["", "0", "1", "33", "-2", "4.5", "on", "AUTO"] {
            let message = text.parse::<Wish>().unwrap_err();
            assert!(message.contains("2 to 32"), "{message}");
        }
        let mut small = layout.shape;
        small.layers = 4;
        let small = KvLayout::new(small, layout.order);
        let message = LayerGroups::new(Wish::Groups(5), &small).unwrap_err();
        assert!(message.contains("4 layers"), "{message}");
    }
}
