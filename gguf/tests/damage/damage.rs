//! Valid files, and a generator that damages them, from a seed. Shared by the example `mutate` and a test.

use host_gguf::Kind;
use host_tests::gguf::{GgufFile, value};

/// Valid files: one with everything, one that is almost empty, one with another alignment.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut whole = GgufFile::default();
    whole
        .text("general.architecture", "llama")
        .u32("llama.block_count", 2)
        .f32("llama.rope.freq_base", 1e4)
        .flag("tokenizer.ggml.add_bos_token", true)
        .raw("x.u64", value::U64, &[7; 8])
        .raw("x.i8", value::I8, &[255])
        .texts("tokenizer.ggml.tokens", ["a", "", "é", "word", "<|end|>"])
        .numbers("tokenizer.ggml.scores", &[0.5, -1.0, 3.0])
        .integers("tokenizer.ggml.token_type", &[1, 3, 6])
        .array("x.flags", value::BOOL, [[0], [1]])
        .array("x.u16", value::U16, [[1, 2], [3, 4]]);
    for kind in Kind::ALL {
        let blocks = if kind.block_elements() == 256 { 1 } else { 4 };
        let row = (blocks * kind.block_elements()) as u64;
        let data = vec![0x5a; 2 * blocks * kind.block_bytes()];
        whole.tensor(&format!("blk.0.{}.weight", kind.name()), &[row, 2], kind.number(), data);
    }
    let mut aligned = GgufFile { alignment: 64, version: 2, ..GgufFile::default() };
    aligned
        .u32("general.alignment", 64)
        .u32("split.count", 1)
        .tensor("output.weight", &[4, 1, 2, 2], 0, vec![1; 64])
        .tensor("output_norm.weight", &[4], 1, vec![1; 8]);
    vec![whole.bytes(), aligned.bytes(), GgufFile::default().text("k", "v").bytes()]
}

/// Damages files at random, from a seed.
pub struct Damage(fastrand::Rng);

impl Damage {
    /// A generator from this seed.
    pub fn seeded(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// A random number below `end`, or 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        self.0.usize(..end.max(1))
    }

    /// A valid file with one to four things changed.
    pub fn damaged(&mut self, base: &[u8]) -> Vec<u8> {
        let mut bytes = base.to_vec();
        for _ in 0..1 + self.below(4) {
            self.damage(&mut bytes, base);
        }
        bytes
    }

    /// A random position in `bytes`, more often in the header, which is in front.
    fn place(&mut self, bytes: &[u8]) -> usize {
        let end = if self.below(4) > 0 { bytes.len().min(1024) } else { bytes.len() };
        self.below(end)
    }

    /// Changes one thing.
    fn damage(&mut self, bytes: &mut Vec<u8>, base: &[u8]) {
        let place = self.place(bytes);
        let length = (1 + self.below(16)).min(bytes.len() - place);
        match self.below(8) {
            0 if !bytes.is_empty() => bytes[place] ^= 1 << self.below(8),
            1 if !bytes.is_empty() => bytes[place] = self.0.u8(..),
            2 => {
                // Numbers at which lengths and offsets overflow, or cross a limit.
                let number = [0, 1, 31, 32, u64::MAX, u64::MAX - 31, 1 << 63, 1 << 32, 1 << 31, 1 << 20];
                let number = number[self.below(number.len())];
                let width = if self.below(3) == 0 { 4 } else { 8 };
                let width = width.min(bytes.len() - place);
                bytes[place..place + width].copy_from_slice(&number.to_le_bytes()[..width]);
            }
            3 => bytes.truncate(place),
            4 => drop(bytes.drain(place..place + length)),
            5 => {
                let part = base[place.min(base.len())..(place + length).min(base.len())].to_vec();
                let at = self.place(bytes);
                bytes.splice(at..at, part);
            }
            6 => {
                let from = self.place(bytes);
                let part = bytes[from..(from + length).min(bytes.len())].to_vec();
                bytes[place..].iter_mut().zip(part).for_each(|(byte, new)| *byte = new);
            }
            _ => {
                let value = self.below(20) as u8;
                bytes[place..place + length].iter_mut().take(1).for_each(|byte| *byte = value);
            }
        }
    }
}
