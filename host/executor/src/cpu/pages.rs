//! K and V of a sequence, written to and read from its pages.

use host_core::Dtype;
use host_kernels::math::{KvRows, bf16_from_f32};

use crate::KvMemory;
use crate::window::LayerPages;

/// One sequence's K and V in one layer.
pub(super) struct PagedRows<'a> {
    pub kv: &'a KvMemory,
    pub pages: LayerPages<'a>,
}

impl KvRows for PagedRows<'_> {
    fn rows<'a>(&'a self, head: usize, first: usize, keys: &mut [&'a [u8]], values: &mut [&'a [u8]]) {
        let page_tokens = self.kv.layout().shape.page_tokens;
        let (mut index, mut slot) = (first / page_tokens, first % page_tokens);
        for (key, value) in keys.iter_mut().zip(values) {
            let (page, layer) = (self.pages.page(index), self.pages.layer);
            *key = self.kv.read_row(page, head, layer, 0, slot);
            *value = self.kv.read_row(page, head, layer, 1, slot);
            slot += 1;
            if slot == page_tokens {
                (index, slot) = (index + 1, 0);
            }
        }
    }
}

/// Writes K (`kv` 0) or V (`kv` 1) of all heads at one position, rounded to the pool's type.
pub(super) fn write(memory: &mut KvMemory, pages: LayerPages<'_>, kv: usize, position: usize, heads: &[f32]) {
    let shape = memory.layout().shape;
    let page = pages.page(position / shape.page_tokens);
    let slot = position % shape.page_tokens;
    for (head, values) in heads.chunks_exact(shape.head_dim).enumerate() {
        let row = memory.write_row(page, head, pages.layer, kv, slot);
        match shape.dtype {
            Dtype::F32 => {
                for (target, value) in row.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                    *target = value.to_le_bytes();
                }
            }
            Dtype::Bf16 => {
                for (target, value) in row.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                    *target = bf16_from_f32(*value).to_le_bytes();
                }
            }
        }
    }
}
