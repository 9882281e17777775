//! The format of an object: a header of 32 bytes that describes the value, then the value.
//!
//! The header has the mark `HOSTNIXO`, the value's length, its checksum (as a file's, [`checksum`]), and the checksum
//! of these 24 bytes, seeded with that of the key: so the bytes of another object are not taken for this one's. The
//! header comes first, because the start of an object can be read without its length. NIXL removes nothing, so a
//! removed value is overwritten with a *tombstone*: a header alone, with the mark `HOSTGONE`.

use host_plugin_api::Key;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::tier::store::checksum;

const VALUE: [u8; 8] = *b"HOSTNIXO";
const GONE: [u8; 8] = *b"HOSTGONE";
/// Bytes before the value.
pub const HEADER: usize = 32;

/// What an object's header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    Value {
        length: u64,
        checksum: u64,
    },
    /// The value was removed.
    Gone,
    /// The header is damaged.
    Damaged,
}

fn own(key: &Key, header: &[u8]) -> u64 {
    xxh3_64_with_seed(&header[..24], xxh3_64(&key.0))
}

fn written(key: &Key, mark: [u8; 8], length: u64, checksum: u64) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&mark);
    header[8..16].copy_from_slice(&length.to_le_bytes());
    header[16..24].copy_from_slice(&checksum.to_le_bytes());
    let own = own(key, &header);
    header[24..].copy_from_slice(&own.to_le_bytes());
    header
}

/// The object of a value.
pub fn object(key: &Key, value: &[u8]) -> Vec<u8> {
    let mut object = Vec::with_capacity(HEADER + value.len());
    object.extend_from_slice(&written(key, VALUE, value.len() as u64, checksum(key, value)));
    object.extend_from_slice(value);
    object
}

/// The object that replaces a removed value.
pub fn tombstone(key: &Key) -> Vec<u8> {
    written(key, GONE, 0, 0).to_vec()
}

/// Reads the first bytes of an object.
pub fn header(key: &Key, bytes: &[u8]) -> Header {
    let Some(header) = bytes.first_chunk::<HEADER>() else { return Header::Damaged };
    let number = |at: usize| header[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    if number(24) != own(key, header) {
        return Header::Damaged;
    }
    match header.first_chunk() {
        Some(&VALUE) => Header::Value { length: number(8), checksum: number(16) },
        Some(&GONE) => Header::Gone,
        _ => Header::Damaged,
    }
}

/// An object's value, if all of it is there.
pub fn value<'a>(key: &Key, object: &'a [u8]) -> Option<&'a [u8]> {
    let Header::Value { length, checksum: sum } = header(key, object) else { return None };
    let value = &object[HEADER..];
    (value.len() as u64 == length && checksum(key, value) == sum).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_taken_for_its_own_key_and_whole_or_not_at_all() {
        let (key, other) = (Key([3; 32]), Key([4; 32]));
        let bytes: Vec<u8> = (0..5000_u32).map(|at| at as u8).collect();
        let whole = object(&key, &bytes);
        assert_eq!(value(&key, &whole), Some(&bytes[..]));
        assert_eq!(header(&other, &whole), Header::Damaged, "of another key");
        for at in [0, 9, 17, 25, 31] {
            let mut flipped = whole.clone();
            flipped[at] ^= 1;
            assert_eq!(header(&key, &flipped), Header::Damaged, "byte {at}");
        }
        let mut flipped = whole.clone();
        flipped[HEADER + 4321] ^= 1;
        assert_eq!((header(&key, &flipped), value(&key, &flipped)), (header(&key, &whole), None));
        for length in [0, 31, 32, 5031] {
            assert_eq!(value(&key, &whole[..length]), None, "{length} bytes");
        }
        // A buffer of the right length after a read that came short.
        let mut short = whole.clone();
        short[4000..].fill(0);
        assert_eq!(value(&key, &short), None);
    }

    #[test]
    fn a_tombstone_is_no_value_and_none_of_another_key() {
        let (key, other) = (Key([3; 32]), Key([4; 32]));
        assert_eq!(header(&key, &tombstone(&key)), Header::Gone);
        assert_eq!(header(&other, &tombstone(&key)), Header::Damaged);
        assert_eq!(value(&key, &tombstone(&key)), None);
        assert_eq!(
            header(&key, &object(&key, &[])),
            Header::Value { length: 0, checksum: checksum(&key, &[]) }
        );
    }
}
