//! Layers that keep a state: how a state changes, and its layout in a page.
//!
//! A state is one number for each head, derived from the previous state and a token. In a page it fills every row of the layer:
//! the first eight bytes of the first row are the number, and all other bytes are derived from it. If any byte differs, another
//! number is read, so every byte of a state matters.

use host_core::{PageId, Sequence};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::KvMemory;
use crate::window::LayerPages;

/// The rows of one head of a layer in a page.
struct HeadRows {
    page: PageId,
    /// The index of the head among this rank's heads.
    index: usize,
    /// The layer within the page.
    layer: usize,
}

/// Continues from the state before a sequence's new positions. Writes the state behind each whole page and behind the last
/// position.
pub(super) fn write(kv: &mut KvMemory, sequence: &Sequence, pages: &LayerPages<'_>, layer: usize) {
    let page_tokens = kv.layout().shape.page_tokens;
    let start = sequence.start as usize;
    for (index, head) in kv.heads().enumerate() {
        let which = (head as u64) << 32 | layer as u64;
        let place = |position: usize| {
            let page = pages.page(position / page_tokens);
            HeadRows { page, index, layer: pages.layer }
        };
        let mut state = match start.checked_sub(1) {
            Some(before) => read(kv, &place(before)),
            None => which,
        };
        for (position, token) in (start..).zip(&sequence.tokens) {
            state = xxh3_64_with_seed(&token.to_le_bytes(), state ^ which);
            if (position + 1).is_multiple_of(page_tokens) || position + 1 == sequence.end() {
                fill(kv, &place(position), state);
            }
        }
    }
}

/// The bytes of one row of a state.
fn row(state: u64, side: usize, slot: usize, bytes: &mut [u8]) {
    for (word, bytes) in bytes.chunks_exact_mut(8).enumerate() {
        let value = match (side, slot, word) {
            (0, 0, 0) => state,
            _ => state.wrapping_mul(2 * word as u64 + 3).rotate_left((side + 2 * slot) as u32 % 61),
        };
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

fn fill(kv: &mut KvMemory, place: &HeadRows, state: u64) {
    for (slot, side) in slots(kv) {
        row(state, side, slot, kv.write_row(place.page, place.index, place.layer, side, slot));
    }
}

/// The state in a page, or another number if any byte of it has changed.
fn read(kv: &KvMemory, place: &HeadRows) -> u64 {
    let found = |side, slot| kv.read_row(place.page, place.index, place.layer, side, slot);
    let state = found(0, 0).get(..8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes);
    let mut expected = vec![0; found(0, 0).len()];
    slots(kv).fold(state, |sum, (slot, side)| {
        row(state, side, slot, &mut expected);
        let found = found(side, slot);
        if found == expected { sum } else { sum.rotate_left(7) ^ xxh3_64(found) }
    })
}

/// All rows of one head and layer of a page: slots, and K or V.
fn slots(kv: &KvMemory) -> impl Iterator<Item = (usize, usize)> + use<> {
    (0..kv.layout().shape.page_tokens).flat_map(|slot| [(slot, 0), (slot, 1)])
}
