//! XXH3 of pages, 64 and 128 bits, with 256-bit vectors where the processor has them.
//!
//! This module detects the vectors at run time. `xxhash-rust` chooses at compile time, and then uses only instructions that every
//! x86-64 processor has. The sums are the same. The algorithm is that of xxHash's specification.
//!
//! Pages come from memory, not from the processor's caches. For such bytes the wider vectors alone save little. Fetching ahead
//! saves as much again, because it also passes the ends of 4 KiB pages, where the processor's own prefetchers stop. So `twox-hash`,
//! which has the vectors and does not fetch ahead, takes a third longer for the same bytes.

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// The XXH3-64 of these bytes with this seed.
#[must_use]
pub fn xxh3(value: &[u8], seed: u64) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if value.len() >= wide::SHORTEST && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, as was just checked.
        return unsafe { wide::xxh3(value, seed) };
    }
    xxh3_64_with_seed(value, seed)
}

/// The XXH3-128 of a key followed by a value, without a seed.
#[must_use]
pub fn xxh3_128(key: &[u8; KEY], value: &[u8]) -> u128 {
    #[cfg(target_arch = "x86_64")]
    if KEY + value.len() >= wide::SHORTEST && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, as was just checked.
        return unsafe { wide::xxh3_128(key, value) };
    }
    plain_128(key, value)
}

fn plain_128(key: &[u8; KEY], value: &[u8]) -> u128 {
    let mut hash = Xxh3::new();
    hash.update(key);
    hash.update(value);
    hash.digest128()
}

/// Bytes of a key.
const KEY: usize = 32;

#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::*;

    use super::KEY;

    /// Least bytes of a value for this module: XXH3 hashes shorter values in other ways.
    pub const SHORTEST: usize = 241;
    const STRIPE: usize = 64;
    /// Stripes after which the sums are scrambled.
    const BLOCK: usize = 16;
    /// How many bytes ahead memory is fetched. While the disk writes to the same memory, distances from 1 to 4 KiB are about equal.
    /// Without such writes, 512 bytes and 4 KiB save half as much.
    const AHEAD: usize = 2048;
    const P32: [u64; 3] = [0x9E37_79B1, 0x85EB_CA77, 0xC2B2_AE3D];
    const P64: [u64; 5] = [
        0x9E37_79B1_85EB_CA87,
        0xC2B2_AE3D_27D4_EB4F,
        0x1656_67B1_9E37_79F9,
        0x85EB_CA77_C2B2_AE63,
        0x27D4_EB2F_1656_67C5,
    ];
    /// xxHash's default secret, as little-endian words.
    const SECRET: [u64; 24] = [
        0xBE4B_A423_396C_FEB8,
        0x1CAD_21F7_2C81_017C,
        0xDB97_9083_E96D_D4DE,
        0x1F67_B3B7_A4A4_4072,
        0x78E5_C0CC_4EE6_79CB,
        0x2172_FFCC_7DD0_5A82,
        0x8E24_43F7_7446_08B8,
        0x4C26_3A81_E690_35E0,
        0xCB00_C391_BB52_283C,
        0xA32E_531B_8B65_D088,
        0x4EF9_0DA2_9748_6471,
        0xD8AC_DEA9_46EF_1938,
        0x3F34_9CE3_3F76_FAA8,
        0x1D4F_0BC7_C7BB_DCF9,
        0x3159_B4CD_4BE0_518A,
        0x6473_78D9_C97E_9FC8,
        0xC3EB_D334_83AC_C5EA,
        0xEB63_13FA_FFA0_81C5,
        0x49DA_F0B7_51DD_0D17,
        0x9E68_D429_2655_16D3,
        0xFCA1_477D_58BE_162B,
        0xCE31_D07A_D1B8_F88F,
        0x2804_1695_8F3A_CB45,
        0x7E40_4BBB_CAFB_D7AF,
    ];
    const SECRET_BYTES: usize = 8 * SECRET.len();

    /// Eight sums, or the eight words of a stripe.
    type Words = [__m256i; 2];
    type Secret = [u8; SECRET_BYTES];

    #[inline]
    #[target_feature(enable = "avx2")]
    fn load(bytes: &[u8; STRIPE]) -> Words {
        let half = bytes.as_ptr().cast::<__m256i>();
        // SAFETY: 64 bytes are two vectors, and these loads take any address.
        unsafe { [_mm256_loadu_si256(half), _mm256_loadu_si256(half.add(1))] }
    }

    /// 64 bytes of the secret. Every place from which the algorithm takes them has that many bytes after it.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn key(secret: &Secret, at: usize) -> Words {
        match secret[at..].first_chunk() {
            Some(bytes) => load(bytes),
            None => unreachable!("no stripe's key starts behind byte 128"),
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn accumulate(sums: &mut Words, stripe: Words, key: Words) {
        for half in 0..2 {
            let mixed = _mm256_xor_si256(stripe[half], key[half]);
            let product = _mm256_mul_epu32(mixed, _mm256_srli_epi64::<32>(mixed));
            // Swaps neighbouring words.
            let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(stripe[half]);
            sums[half] = _mm256_add_epi64(sums[half], _mm256_add_epi64(product, swapped));
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn scramble(sums: &mut Words, key: Words) {
        let prime = _mm256_set1_epi64x(P32[0] as i64);
        for half in 0..2 {
            let sum = _mm256_xor_si256(sums[half], _mm256_srli_epi64::<47>(sums[half]));
            let sum = _mm256_xor_si256(sum, key[half]);
            // Multiplies 64 bits by 32 bits.
            let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(sum), prime);
            sums[half] = _mm256_add_epi64(_mm256_mul_epu32(sum, prime), _mm256_slli_epi64::<32>(high));
        }
    }

    fn secret_of(seed: u64) -> Secret {
        let mut secret = [0; SECRET_BYTES];
        for (number, (word, bytes)) in SECRET.iter().zip(secret.as_chunks_mut::<8>().0).enumerate() {
            let word = if number % 2 == 0 { word.wrapping_add(seed) } else { word.wrapping_sub(seed) };
            *bytes = word.to_le_bytes();
        }
        secret
    }

    /// The XXH3-64 of a value that is not [shorter](SHORTEST).
    #[target_feature(enable = "avx2")]
    pub fn xxh3(value: &[u8], seed: u64) -> u64 {
        let secret = secret_of(seed);
        let mut sums = first_sums();
        // The last byte is always in the last stripe, which may overlap the stripe before it.
        for block in value[..value.len() - 1].as_chunks::<STRIPE>().0.chunks(BLOCK) {
            accumulate_block(&mut sums, block, 0, &secret);
        }
        let words = words_of(sums, value, &secret);
        merge(words, &secret[11..], (value.len() as u64).wrapping_mul(P64[0]))
    }

    /// The XXH3-128 of a key and a value that are together not [shorter](SHORTEST).
    #[target_feature(enable = "avx2")]
    pub fn xxh3_128(of: &[u8; KEY], value: &[u8]) -> u128 {
        let secret = secret_of(0);
        let mut sums = first_sums();
        // The first stripe is the key and as many bytes of the value. The other stripes are those of the rest.
        let (beside, rest) = value.split_at(STRIPE - KEY);
        let mut first = [0; STRIPE];
        first[..KEY].copy_from_slice(of);
        first[KEY..].copy_from_slice(beside);
        accumulate(&mut sums, load(&first), key(&secret, 0));
        let stripes = rest[..rest.len() - 1].as_chunks::<STRIPE>().0;
        let (block, stripes) = stripes.split_at(stripes.len().min(BLOCK - 1));
        accumulate_block(&mut sums, block, 1, &secret);
        for block in stripes.chunks(BLOCK) {
            accumulate_block(&mut sums, block, 0, &secret);
        }
        let words = words_of(sums, value, &secret);
        let length = (KEY + value.len()) as u64;
        let low = merge(words, &secret[11..], length.wrapping_mul(P64[0]));
        let high = merge(words, &secret[SECRET_BYTES - STRIPE - 11..], !length.wrapping_mul(P64[1]));
        u128::from(high) << 64 | u128::from(low)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn first_sums() -> Words {
        let word = |word: u64| word as i64;
        [
            _mm256_setr_epi64x(word(P32[2]), word(P64[0]), word(P64[1]), word(P64[2])),
            _mm256_setr_epi64x(word(P64[3]), word(P32[1]), word(P64[4]), word(P32[0])),
        ]
    }

    /// Accumulates the stripes of a block from number `from` on. Scrambles the sums if the stripes reach the end of the block.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn accumulate_block(sums: &mut Words, stripes: &[[u8; STRIPE]], from: usize, secret: &Secret) {
        for (number, stripe) in (from..).zip(stripes) {
            _mm_prefetch::<_MM_HINT_T0>(stripe.as_ptr().wrapping_add(AHEAD).cast());
            accumulate(sums, load(stripe), key(secret, 8 * number));
        }
        if from + stripes.len() == BLOCK {
            scramble(sums, key(secret, SECRET_BYTES - STRIPE));
        }
    }

    /// Adds the last stripe, which ends where the value ends, and returns the sums.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn words_of(mut sums: Words, value: &[u8], secret: &Secret) -> [u64; 8] {
        if let Some(last) = value.last_chunk() {
            accumulate(&mut sums, load(last), key(secret, SECRET_BYTES - STRIPE - 7));
        }
        let mut words = [0; 8];
        // SAFETY: eight words are two vectors, and these stores take any address.
        unsafe {
            let half = words.as_mut_ptr().cast::<__m256i>();
            _mm256_storeu_si256(half, sums[0]);
            _mm256_storeu_si256(half.add(1), sums[1]);
        }
        words
    }

    /// Merges eight words into one number, with 64 bytes of the secret.
    fn merge(words: [u64; 8], secret: &[u8], mut hash: u64) -> u64 {
        let keys = secret.as_chunks::<8>().0;
        for (pair, keys) in words.as_chunks::<2>().0.iter().zip(keys.as_chunks::<2>().0) {
            let mixed = [0, 1].map(|at| u128::from(pair[at] ^ u64::from_le_bytes(keys[at])));
            let product = mixed[0] * mixed[1];
            hash = hash.wrapping_add(product as u64 ^ (product >> 64) as u64);
        }
        hash = (hash ^ (hash >> 37)).wrapping_mul(0x1656_6791_9E37_79F9);
        hash ^ (hash >> 32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_alignment_has_the_sum_that_xxh3_says() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut bytes = vec![0; 70_000];
        random.fill(&mut bytes);
        let near = [1024, 2048, 4096, 65_536].into_iter().flat_map(|length: usize| length - 66..length + 67);
        for (at, length) in (0..1200).chain(near).enumerate() {
            let (value, seed) = (&bytes[at % 67..at % 67 + length], random.u64(..));
            assert_eq!(xxh3(value, seed), xxh3_64_with_seed(value, seed), "{length} bytes from {}", at % 67);
        }
    }

    #[test]
    fn wide_vectors_and_plain_code_give_a_key_and_a_value_of_every_length_the_same_128_bits() {
        let mut random = fastrand::Rng::with_seed(2);
        let mut bytes = vec![0; 70_000];
        random.fill(&mut bytes);
        let near = [1024, 2048, 4096, 65_536].into_iter().flat_map(|length: usize| length - 99..length + 67);
        for (at, length) in (0..1200).chain(near).enumerate() {
            let mut key = [0; KEY];
            random.fill(&mut key);
            let value = &bytes[at % 67..at % 67 + length];
            let (chosen, plain) = (xxh3_128(&key, value), plain_128(&key, value));
            assert_eq!(chosen.to_le_bytes(), plain.to_le_bytes(), "{length} bytes from {}", at % 67);
            // The sum of `xxhash-rust` over the same bytes as one value.
            let whole = [&key, value].concat();
            assert_eq!(chosen, xxhash_rust::xxh3::xxh3_128(&whole), "{length} bytes from {}", at % 67);
        }
    }
}
