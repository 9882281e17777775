//! Entry points for fuzzing: a segment's index as other processes may have written it, and the index in memory.

use std::collections::BTreeSet;

use host_plugin_api::Key;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::format::{Name, RECORD, Value, record, seal};
use crate::index::Index;
use crate::segment::{Segment, parse_records};

const NAME: Name = Name { birth: 0x1234, random: 0xABCD_EF01_2345_6789 };
/// Most records of one input.
const MOST: usize = 64;

/// Reads the records of index files, 64 bytes each. The first byte gives the length of the data file. A generator
/// cannot guess checksums, so each record whose last byte is odd gets its right number and checksum.
///
/// Puts all values into an index and takes them out again. Returns true when some record was a value.
///
/// # Panics
/// When the index is not empty afterwards, or counts wrongly.
#[must_use]
pub fn segment_index(bytes: &[u8]) -> bool {
    let Some((length, records)) = bytes.split_first() else { return false };
    let data = u64::from(*length) << 12;
    let (chunks, torn) = records.as_chunks::<RECORD>();
    let mut file: Vec<u8> = Vec::new();
    for (number, chunk) in (0..).zip(chunks.iter().take(MOST)) {
        file.extend(if chunk[RECORD - 1] % 2 == 1 { mended(number, *chunk) } else { *chunk });
    }
    file.extend(torn);
    let found = parse_records(NAME, 0, data, &file);
    assert!(found.values.len() <= MOST + 1 && found.next as usize <= MOST + 1);
    let mut index = Index::new();
    // The same records as from two processes: those of the second are copies.
    let segments = [(); 2].map(|()| index.add(|id| Segment::new(id, NAME, None)).id);
    for segment in segments {
        for (number, value) in &found.values {
            assert!(value.end() <= data);
            index.insert(segment, *number, *value);
        }
    }
    let keys: BTreeSet<Key> = found.values.iter().map(|(_, value)| value.key).collect();
    assert_eq!(index.len(), keys.len());
    let mut seen = [Key::default(); MOST + 1];
    let (count, next) = index.scan(0, 0, &mut seen);
    assert_eq!((count, next), (keys.len(), None), "a scan sees each page once");
    for (at, key) in keys.iter().enumerate() {
        assert!(index.find(key).is_some_and(|hit| hit.value.key == *key));
        if at % 2 == 0 {
            assert!(!index.remove_all(key).is_empty());
            assert!(index.find(key).is_none());
        }
    }
    for segment in segments {
        index.drop_segment(segment);
    }
    assert_eq!((index.len(), index.bytes()), (0, 0));
    !found.values.is_empty()
}

/// The record with the number and the checksum that it should have.
fn mended(number: u32, mut bytes: [u8; RECORD]) -> [u8; RECORD] {
    bytes[52..56].copy_from_slice(&number.to_le_bytes());
    let sum = xxh3_64_with_seed(&bytes[..56], NAME.random);
    bytes[56..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// Seeds with values, one of them twice, a removed value, and a seal.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let value = |key, block| Value { key: Key([key; 32]), checksum: 99, block, length: 5000 };
    let mut whole = vec![16];
    for (number, key) in (0..).zip([1, 2, 1]) {
        whole.extend(record(NAME, number, &value(key, number * 2)));
    }
    whole.extend([0; RECORD]);
    whole.extend(seal(NAME, 4));
    let open = [&[4][..], &record(NAME, 0, &value(7, 0)), &record(NAME, 1, &value(8, 90)), &[9; 20]].concat();
    vec![whole, open]
}
