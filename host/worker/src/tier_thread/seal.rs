//! The seal behind each object in storage. A value from a plugin is used only if its seal fits.
//!
//! An object is one KV head of a page, then its seal (XXH3-128 over the object's key and the head's bytes), then zeros up
//! to a whole step. So a flipped bit, a value that is cut off, and another key's value are detected. This does not depend
//! on what the plugin reports, or on checksums of its own.
//!
//! [`check`] needs no model: whatever the length of the KV is, its seal is the bytes before the zeros.

use std::fmt;

use host_kernels::xxh3::xxh3_128;
use host_plugin_api::Key;

/// Bytes of a seal.
pub const SEAL_BYTES: usize = 16;

/// A step is at most a page of a disk, and at most one of `LEAST_PARTS` equal parts of the KV.
const LARGEST_STEP: usize = 4096;
const LEAST_PARTS: usize = 16;

/// Bytes of an object with so many bytes of KV, for a plugin that takes multiples of `alignment`.
///
/// If the bytes of the KV are a multiple of a large power of two, the bytes of the object are, too. Plugins can move such
/// objects without a copy of their own.
pub(super) fn object_bytes(kv: usize, alignment: usize) -> usize {
    let even = 1 << kv.trailing_zeros().min(LARGEST_STEP.trailing_zeros());
    let small = (kv / LEAST_PARTS).checked_ilog2().map_or(1, |bits| 1 << bits);
    let step = even.min(small).max(SEAL_BYTES);
    (kv + SEAL_BYTES).next_multiple_of(step).next_multiple_of(alignment.max(1))
}

/// The seal of the KV in the object of this key.
#[must_use]
pub fn seal(key: &Key, kv: &[u8]) -> [u8; SEAL_BYTES] {
    xxh3_128(&key.0, kv).to_le_bytes()
}

/// Why the bytes of a value are not those that a worker stored under its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// They are shorter than a seal.
    Short,
    /// They are all zeros.
    Zeros,
    /// No seal in them fits the key and the bytes before the seal.
    Seal,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Short => "it is shorter than the host's seal",
            Self::Zeros => "it is all zeros",
            Self::Seal => "the host's seal does not fit the bytes",
        })
    }
}

/// Checks that these bytes are the whole object of this key. The key and the bytes are enough.
///
/// # Errors
/// The damage that was found.
pub fn check(key: &Key, object: &[u8]) -> Result<(), Damage> {
    if object.len() <= SEAL_BYTES {
        return Err(Damage::Short);
    }
    let zeros = object.iter().rev().take_while(|byte| **byte == 0).count();
    let written = object.len() - zeros;
    if written == 0 {
        return Err(Damage::Zeros);
    }
    // The seal itself may end in zeros.
    let ends = written.max(SEAL_BYTES + 1)..=object.len().min(written + SEAL_BYTES);
    let fits = |end: usize| {
        let (kv, found) = object[..end].split_at(end - SEAL_BYTES);
        found == seal(key, kv)
    };
    if ends.into_iter().any(fits) { Ok(()) } else { Err(Damage::Seal) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_has_room_for_its_seal_and_stays_as_even_as_that_costs_little() {
        for (kv, alignment, bytes) in [
            (112 << 10, 1, 116 << 10),
            (640 << 10, 512, 644 << 10),
            (4096, 1, 4096 + 256),
            (4096, 4096, 8192),
            (48, 1, 64),
            (1000, 1, 1024),
        ] {
            assert_eq!(object_bytes(kv, alignment), bytes, "{kv} {alignment}");
        }
        for kv in 1..3000 {
            let bytes = object_bytes(kv, 1);
            assert!(bytes >= kv + SEAL_BYTES && bytes < kv + 2 * SEAL_BYTES + kv / 16, "{kv}: {bytes}");
        }
    }

    #[test]
    fn whatever_its_length_a_whole_value_is_good_and_any_other_is_not() {
        let (key, other) = (Key([1; 32]), Key([2; 32]));
        // Among so many seals, some end in a zero.
        for bytes in (1..600).chain([4096, 112 << 10]) {
            let kv: Vec<u8> = (0..bytes).map(|at| (at * 7 + bytes) as u8).collect();
            let mut object = kv.clone();
            object.extend(seal(&key, &kv));
            object.resize(object_bytes(bytes, 1), 0);
            assert_eq!(check(&key, &object), Ok(()), "{bytes}");
            assert_eq!(check(&other, &object), Err(Damage::Seal), "{bytes}");
            object[bytes / 2] ^= 1;
            assert_eq!(check(&key, &object), Err(Damage::Seal), "{bytes}");
            object[bytes / 2] ^= 1;
            // Cut off within the seal.
            let cut = &object[..bytes + SEAL_BYTES / 2];
            let damage = if cut.len() > SEAL_BYTES { Damage::Seal } else { Damage::Short };
            assert_eq!(check(&key, cut), Err(damage), "{bytes}");
        }
        assert_eq!(check(&key, &[0; 4096]), Err(Damage::Zeros));
        assert_eq!(check(&key, &[7; SEAL_BYTES]), Err(Damage::Short));
        // KV may itself be zeros.
        let object = [vec![0; 64], seal(&key, &[0; 64]).to_vec()].concat();
        assert_eq!(check(&key, &object), Ok(()));
    }

    /// Seals must stay the same, because storage outlives a build.
    #[test]
    fn the_seals_are_those_of_earlier_builds() {
        let kv: Vec<u8> = (0..5000u32).map(|at| ((at * at) >> 3) as u8).collect();
        let sealed = [64, 4096, 5000].map(|length| u128::from_le_bytes(seal(&Key([7; 32]), &kv[..length])));
        assert_eq!(
            sealed,
            [
                123_187_033_704_523_921_176_853_377_127_490_649_708,
                304_798_417_939_556_871_206_413_221_673_053_006_989,
                20_218_615_000_987_875_937_466_178_071_583_094_993,
            ]
        );
    }

    #[test]
    fn a_seal_fits_one_value_of_one_key() {
        let (key, other) = (Key([1; 32]), Key([2; 32]));
        let kv: Vec<u8> = (0..=255).collect();
        let sealed = seal(&key, &kv);
        assert_eq!(sealed, seal(&key, &kv));
        assert_ne!(sealed, seal(&other, &kv));
        for place in 0..kv.len() {
            let mut flipped = kv.clone();
            flipped[place] ^= 1;
            assert_ne!(sealed, seal(&key, &flipped));
        }
        assert_ne!(seal(&key, &[0; 64]), [0; SEAL_BYTES], "a value of zeros is not sealed by zeros");
    }
}
