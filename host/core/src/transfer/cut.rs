//! A staged lane in pieces that fit the slots of a staging buffer.

use std::ops::Range;

use super::lane::KvSlice;
use crate::layout::KvShape;

/// How the pages of one part are cut for one lane. They are cut by pages, by layers if one page is too much for a piece, and by
/// heads if one layer of a page is too much. The cut follows from the part, the lane and the size of a piece alone, so both
/// sides can make the same one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    pages: usize,
    layers: Range<usize>,
    heads: Range<usize>,
    /// Most pages, layers and heads of a piece.
    step: [usize; 3],
}

/// The contents of one piece of a staged lane, as a dense buffer ([`KvSlice::dense`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagedPiece {
    /// The pages, by their place in the part's list.
    pub pages: Range<usize>,
    /// The layers, counted over the whole model.
    pub layers: Range<usize>,
    /// The heads, counted over the whole model.
    pub heads: Range<usize>,
}

impl Cut {
    /// Cuts `pages` pages like those of `shape`, of which some layers and heads are sent, into pieces of at most
    /// `piece_bytes` bytes. `None` when one head of one layer of one page is more than that.
    #[must_use]
    pub fn new(
        shape: &KvShape,
        pages: usize,
        layers: Range<usize>,
        heads: Range<usize>,
        piece_bytes: usize,
    ) -> Option<Self> {
        let block = shape.block_bytes().max(1);
        let layer = block * heads.len().max(1);
        let page = layer * layers.len().max(1);
        let step = match piece_bytes {
            bytes if bytes >= page => [bytes / page, layers.len(), heads.len()],
            bytes if bytes >= layer => [1, bytes / layer, heads.len()],
            bytes if bytes >= block => [1, 1, bytes / block],
            _ => return None,
        };
        Some(Self { pages, layers, heads, step: step.map(|extent| extent.max(1)) })
    }

    /// Numbers of pieces along pages, layers and heads.
    fn counts(&self) -> [usize; 3] {
        let [pages, layers, heads] = self.step;
        [self.pages.div_ceil(pages), self.layers.len().div_ceil(layers), self.heads.len().div_ceil(heads)]
    }

    /// Number of pieces, or 0 if there is nothing to send.
    #[must_use]
    pub fn pieces(&self) -> usize {
        self.counts().iter().product()
    }

    /// The piece of this number, counted from 0: in the order of pages, then layers, then heads. `None` when there is no
    /// such piece.
    #[must_use]
    pub fn piece(&self, number: usize) -> Option<StagedPiece> {
        let [_, layers, heads] = self.counts();
        (number < self.pieces()).then(|| StagedPiece {
            pages: nth(&(0..self.pages), self.step[0], number / (layers * heads)),
            layers: nth(&self.layers, self.step[1], number / heads % layers),
            heads: nth(&self.heads, self.step[2], number % heads),
        })
    }
}

fn nth(whole: &Range<usize>, step: usize, number: usize) -> Range<usize> {
    let start = whole.start + number * step;
    start..(start + step).min(whole.end)
}

impl StagedPiece {
    /// Bytes of the piece, for pages like those of `shape`.
    #[must_use]
    pub fn bytes(&self, shape: &KvShape) -> usize {
        self.pages.len() * self.layers.len() * self.heads.len() * shape.block_bytes()
    }

    /// The buffer that holds the piece: page `i` of the buffer is the piece's `i`th page.
    #[must_use]
    pub fn slice(&self, shape: KvShape) -> KvSlice {
        KvSlice::dense(shape, self.pages.len(), self.heads.clone(), self.layers.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Dtype;

    const SHAPE: KvShape = KvShape {
        pages: 9,
        heads: 8,
        layers: 6,
        page_tokens: 16,
        head_dim: 3,
        value_dim: 2,
        dtype: Dtype::Bf16,
    };

    #[test]
    fn pieces_cover_everything_once_and_fit() {
        let block = SHAPE.block_bytes();
        for pages in 0..6 {
            for (layers, heads) in [(0..6, 0..8), (2..3, 5..8), (1..5, 3..4), (4..4, 0..8), (0..6, 2..2)] {
                for piece_bytes in (1..200).map(|blocks| blocks * block + 7) {
                    let cut = Cut::new(&SHAPE, pages, layers.clone(), heads.clone(), piece_bytes).unwrap();
                    let mut seen = std::collections::BTreeSet::new();
                    let pieces: Vec<_> = (0..cut.pieces()).map(|number| cut.piece(number).unwrap()).collect();
                    for piece in &pieces {
                        assert!(piece.bytes(&SHAPE) <= piece_bytes, "{piece:?} of {cut:?}");
                        assert_eq!(piece.slice(SHAPE).layout.bytes(), piece.bytes(&SHAPE));
                        for place in piece.pages.clone().flat_map(|page| {
                            let heads = piece.heads.clone();
                            piece
                                .layers
                                .clone()
                                .flat_map(move |layer| heads.clone().map(move |head| (page, layer, head)))
                        }) {
                            assert!(seen.insert(place), "{place:?} twice in {cut:?}");
                        }
                    }
                    assert_eq!(seen.len(), pages * layers.len() * heads.len(), "{cut:?}");
                    assert_eq!(cut.piece(cut.pieces()), None);
                }
            }
        }
    }

    #[test]
    fn a_page_is_cut_by_layers_only_where_it_does_not_fit_and_a_layer_by_heads_only_where_it_does_not() {
        let block = SHAPE.block_bytes();
        let first = |bytes| {
            let piece = Cut::new(&SHAPE, 4, 1..6, 2..8, bytes)?.piece(0)?;
            Some((piece.pages, piece.layers, piece.heads))
        };
        assert_eq!(first(4 * 30 * block), Some((0..4, 1..6, 2..8)));
        assert_eq!(first(4 * 30 * block - 1), Some((0..3, 1..6, 2..8)));
        assert_eq!(first(30 * block - 1), Some((0..1, 1..5, 2..8)));
        assert_eq!(first(6 * block - 1), Some((0..1, 1..2, 2..7)));
        assert_eq!(first(block), Some((0..1, 1..2, 2..3)));
        assert_eq!(first(block - 1), None);
    }

    #[test]
    fn tokens_past_the_prefix_are_cut_at_multiples_of_a_pieces_pages() {
        // A piece of 512 pages of 16 tokens: 8192 tokens. (first token, last, where it is cut)
        for (base, end, cuts) in [
            (0, 20_000, vec![0, 8_192, 16_384, 20_000]),
            (128, 20_000, vec![128, 8_320, 16_512, 20_000]),
            (0, 8_192, vec![0, 8_192]),
            (64, 64, vec![64]),
        ] {
            let bytes = SHAPE.page_bytes() * 512;
            let cut = Cut::new(&SHAPE, (end - base) / 16, 0..6, 0..8, bytes).unwrap();
            let mut found = vec![base];
            found.extend(
                (0..cut.pieces()).filter_map(|number| Some(base + 16 * cut.piece(number)?.pages.end)),
            );
            assert_eq!(found, cuts);
        }
    }
}
