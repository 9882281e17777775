//! Pools for the tests of digests: the three orders of the host's pools, and digests by the CPU.

use host_kernels::cuda::digest::{PagePart, Pool, Side};
use host_kernels::xxh3::xxh3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    PageHeadLayer,
    PageLayerHead,
    TokenMajor,
}

pub const ORDERS: [Order; 3] = [Order::PageHeadLayer, Order::PageLayerHead, Order::TokenMajor];

#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub order: Order,
    pub pages: usize,
    pub page_tokens: usize,
    pub layers: usize,
    pub heads: usize,
    pub first_head: usize,
    /// Bytes of a row of K and of V.
    pub rows: [usize; 2],
}

impl Shape {
    pub fn bytes(&self) -> usize {
        self.pages * self.heads * self.layers * self.page_tokens * (self.rows[0] + self.rows[1])
    }

    /// The pool that starts at this address.
    pub fn at(&self, address: u64) -> Pool {
        let Shape { pages, page_tokens, layers, heads, first_head, rows, .. } = *self;
        let block = page_tokens * (rows[0] + rows[1]);
        let side = |side: usize| {
            let row = rows[side];
            let before = if side == 0 { 0 } else { page_tokens * rows[0] };
            let [start, page, head, layer, token] = match self.order {
                Order::PageHeadLayer => [before, block * layers * heads, block * layers, block, row],
                Order::PageLayerHead => [before, block * layers * heads, block, block * heads, row],
                Order::TokenMajor => [
                    before * heads * pages,
                    row * heads * page_tokens,
                    row,
                    block * heads * pages,
                    row * heads,
                ],
            }
            .map(|bytes| bytes as u64);
            Side { start: address + start, page, head, layer, token, row }
        };
        Pool { sides: [side(0), side(1)], pages, page_tokens, layers, heads, first_head }
    }

    /// The digest of a part of a pool that starts at `bytes[0]`.
    pub fn digest(&self, bytes: &[u8], part: &PagePart) -> u64 {
        let pool = self.at(0);
        let mut digest = 0_u64;
        for layer in part.layers.clone() {
            for head in part.heads.clone() {
                let mut block = Vec::new();
                for side in &pool.sides {
                    for token in 0..part.tokens.min(self.page_tokens) {
                        let numbers = [part.page, head - self.first_head, layer, token];
                        let steps = [side.page, side.head, side.layer, side.token];
                        let offset = numbers
                            .iter()
                            .zip(steps)
                            .map(|(number, step)| *number as u64 * step)
                            .sum::<u64>();
                        block.extend_from_slice(&bytes[(side.start + offset) as usize..][..side.row]);
                    }
                }
                let place = [part.index, layer as u64, head as u64, xxh3(&block, 0)];
                let term: Vec<u8> = place.iter().flat_map(|number| number.to_le_bytes()).collect();
                digest = digest.wrapping_add(xxh3(&term, 0));
            }
        }
        digest
    }
}
