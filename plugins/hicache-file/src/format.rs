//! The format of a segment's files, as the [crate] describes it. Pure functions.

use host_kernels::xxh3::xxh3;
use host_plugin_api::Key;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Values start at multiples of this, and direct reads and writes come in multiples of it.
pub const BLOCK: u64 = 4096;
/// Bytes of a header and of a record.
pub const RECORD: usize = 64;
const MAGIC: &[u8; 8] = b"HOSTTIER";
const VERSION: u32 = 1;
const VALUE: u32 = 1;
const SEAL: u32 = 2;

/// Bytes that a value takes on disk.
pub fn padded(length: u64) -> u64 {
    length.next_multiple_of(BLOCK)
}

/// The seed of a value's checksum, made of the value's key and length.
pub fn seed(key: &Key, length: u32) -> u64 {
    let mut bytes = [0; 36];
    bytes[..32].copy_from_slice(&key.0);
    bytes[32..].copy_from_slice(&length.to_le_bytes());
    xxh3_64(&bytes)
}

/// The checksum of a value.
pub fn checksum(key: &Key, value: &[u8]) -> u64 {
    xxh3(value, seed(key, value.len() as u32))
}

/// The common name of a segment's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    /// Microseconds since 1970.
    pub birth: u64,
    pub random: u64,
}

impl Name {
    pub fn index(self) -> String {
        format!("{:016x}-{:016x}.idx", self.birth, self.random)
    }

    pub fn data(self) -> String {
        format!("{:016x}-{:016x}.dat", self.birth, self.random)
    }

    /// Parses a file's name: the segment's name, and whether the file is the index. `None` for files that are not a segment's.
    pub fn parse(text: &[u8]) -> Option<(Self, bool)> {
        let is_index = match text.get(33..)? {
            b".idx" => true,
            b".dat" => false,
            _ => return None,
        };
        let number = |digits: &[u8]| {
            let lower = digits.iter().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(b));
            let text = std::str::from_utf8(digits).ok().filter(|_| lower)?;
            u64::from_str_radix(text, 16).ok()
        };
        if text[16] != b'-' {
            return None;
        }
        Some((Self { birth: number(&text[..16])?, random: number(&text[17..33])? }, is_index))
    }

    /// The header of the index file.
    pub fn header(self, segment: u64) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(BLOCK as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.birth.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.random.to_le_bytes());
        bytes[32..40].copy_from_slice(&segment.to_le_bytes());
        let sum = xxh3_64(&bytes[..56]);
        bytes[56..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Whether these bytes are this segment's header.
    pub fn has_header(self, bytes: &[u8]) -> bool {
        let Some(bytes) = bytes.first_chunk::<RECORD>() else { return false };
        let segment = u64::from_le_bytes(eight(&bytes[32..]));
        *bytes == self.header(segment)
    }
}

fn eight(bytes: &[u8]) -> [u8; 8] {
    let mut out = [0; 8];
    out.copy_from_slice(&bytes[..8]);
    out
}

fn four(bytes: &[u8]) -> u32 {
    let mut out = [0; 4];
    out.copy_from_slice(&bytes[..4]);
    u32::from_le_bytes(out)
}

/// Where a value lies, with its key, checksum and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value {
    pub key: Key,
    pub checksum: u64,
    /// In units of [`BLOCK`].
    pub block: u32,
    pub length: u32,
}

impl Value {
    /// First byte in the data file.
    pub fn start(&self) -> u64 {
        u64::from(self.block) * BLOCK
    }

    /// The first byte after its last block.
    pub fn end(&self) -> u64 {
        self.start() + padded(u64::from(self.length))
    }
}

/// Content of one place of an index file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    Value(Value),
    Seal,
    /// Zeros: removed, or never written.
    Empty,
    /// Torn or damaged.
    Damaged,
}

fn encode(name: Name, number: u32, kind: u32, value: &Value) -> [u8; RECORD] {
    let mut bytes = [0; RECORD];
    bytes[..32].copy_from_slice(&value.key.0);
    bytes[32..40].copy_from_slice(&value.checksum.to_le_bytes());
    bytes[40..44].copy_from_slice(&value.block.to_le_bytes());
    bytes[44..48].copy_from_slice(&value.length.to_le_bytes());
    bytes[48..52].copy_from_slice(&kind.to_le_bytes());
    bytes[52..56].copy_from_slice(&number.to_le_bytes());
    let sum = xxh3_64_with_seed(&bytes[..56], name.random);
    bytes[56..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// The record of a value. `number` counts from 0 behind the header.
pub fn record(name: Name, number: u32, value: &Value) -> [u8; RECORD] {
    encode(name, number, VALUE, value)
}

/// The seal: the record after the last value.
pub fn seal(name: Name, number: u32) -> [u8; RECORD] {
    encode(name, number, SEAL, &Value { key: Key::default(), checksum: 0, block: 0, length: 0 })
}

/// Position of the record of this number in the index file.
pub fn position(number: u32) -> u64 {
    (u64::from(number) + 1) * RECORD as u64
}

/// Reads the record of this number.
pub fn slot(name: Name, number: u32, bytes: &[u8; RECORD]) -> Slot {
    if bytes.iter().all(|b| *b == 0) {
        return Slot::Empty;
    }
    let sum = u64::from_le_bytes(eight(&bytes[56..]));
    if sum != xxh3_64_with_seed(&bytes[..56], name.random) || four(&bytes[52..]) != number {
        return Slot::Damaged;
    }
    let mut key = Key::default();
    key.0.copy_from_slice(&bytes[..32]);
    let checksum = u64::from_le_bytes(eight(&bytes[32..]));
    let value = Value { key, checksum, block: four(&bytes[40..]), length: four(&bytes[44..]) };
    match four(&bytes[48..]) {
        VALUE if value.length > 0 => Slot::Value(value),
        SEAL => Slot::Seal,
        _ => Slot::Damaged,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: Name = Name { birth: 0x1234, random: 0xABCD_EF01_2345_6789 };

    #[test]
    fn records_come_back_and_no_flipped_bit_passes() {
        let value = Value { key: Key([7; 32]), checksum: 99, block: 3, length: 5000 };
        let bytes = record(NAME, 11, &value);
        assert_eq!(slot(NAME, 11, &bytes), Slot::Value(value));
        assert_eq!((value.start(), value.end()), (3 * 4096, 5 * 4096));
        assert_eq!(slot(NAME, 12, &bytes), Slot::Damaged, "a record in another's place");
        let other = Name { random: 1, ..NAME };
        assert_eq!(slot(other, 11, &bytes), Slot::Damaged, "a record of another segment");
        assert_eq!(slot(NAME, 11, &seal(NAME, 11)), Slot::Seal);
        assert_eq!(slot(NAME, 11, &[0; RECORD]), Slot::Empty);
        for bit in 0..RECORD * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(slot(NAME, 11, &flipped), Slot::Damaged, "bit {bit}");
            let mut header = NAME.header(1 << 20);
            assert!(NAME.has_header(&header));
            header[bit / 8] ^= 1 << (bit % 8);
            assert!(!NAME.has_header(&header), "bit {bit}");
        }
    }

    #[test]
    fn only_names_of_segments_are_names_of_segments() {
        assert_eq!(Name::parse(NAME.index().as_bytes()), Some((NAME, true)));
        assert_eq!(Name::parse(NAME.data().as_bytes()), Some((NAME, false)));
        let good = NAME.data();
        for wrong in
            ["", "lock", &good[1..], &good.to_uppercase(), &format!("{good}x"), &good.replace('-', "_")]
        {
            assert_eq!(Name::parse(wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(Name::parse(b"+000000000001234-abcdef0123456789.dat"), None);
    }
}
