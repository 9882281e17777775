//! How the elements of a tensor are stored.

/// A type of tensors. Quantized types store a row in blocks that share their scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// 32-bit floats.
    F32,
    /// IEEE 754 half precision.
    F16,
    /// The upper halves of 32-bit floats.
    Bf16,
    /// 8 bits and one scale per 32 elements.
    Q8_0,
    /// 4 bits and one scale per 32 elements.
    Q4_0,
    /// 4 bits, a scale and a least value per 32 elements.
    Q4_1,
    /// 5 bits and one scale per 32 elements.
    Q5_0,
    /// 5 bits, a scale and a least value per 32 elements.
    Q5_1,
    /// 4 bits, with scales and least values of 6 bits, per 256 elements.
    Q4K,
    /// 5 bits, with scales and least values of 6 bits, per 256 elements.
    Q5K,
    /// 6 bits, with scales of 8 bits, per 256 elements.
    Q6K,
}

/// Numbers and names of the types that this crate does not read.
const OTHERS: [(u32, &str); 22] = [
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

impl Kind {
    /// All types that are read.
    pub const ALL: [Kind; 11] = [
        Kind::F32,
        Kind::F16,
        Kind::Bf16,
        Kind::Q8_0,
        Kind::Q4_0,
        Kind::Q4_1,
        Kind::Q5_0,
        Kind::Q5_1,
        Kind::Q4K,
        Kind::Q5K,
        Kind::Q6K,
    ];

    /// Number in a file, name, elements of a block, bytes of a block.
    const fn facts(self) -> (u32, &'static str, usize, usize) {
        match self {
            Kind::F32 => (0, "F32", 1, 4),
            Kind::F16 => (1, "F16", 1, 2),
            Kind::Bf16 => (30, "BF16", 1, 2),
            Kind::Q8_0 => (8, "Q8_0", 32, 2 + 32),
            Kind::Q4_0 => (2, "Q4_0", 32, 2 + 16),
            Kind::Q4_1 => (3, "Q4_1", 32, 4 + 16),
            Kind::Q5_0 => (6, "Q5_0", 32, 2 + 4 + 16),
            Kind::Q5_1 => (7, "Q5_1", 32, 4 + 4 + 16),
            Kind::Q4K => (12, "Q4_K", 256, 4 + 12 + 128),
            Kind::Q5K => (13, "Q5_K", 256, 4 + 12 + 32 + 128),
            Kind::Q6K => (14, "Q6_K", 256, 128 + 64 + 16 + 2),
        }
    }

    /// The type with this number, or the name of a type that is not read.
    pub(crate) fn of(number: u32) -> Result<Self, String> {
        let other = || match OTHERS.iter().find(|(other, _)| *other == number) {
            Some((_, name)) => (*name).to_owned(),
            None => format!("number {number}"),
        };
        Kind::ALL.into_iter().find(|kind| kind.number() == number).ok_or_else(other)
    }

    /// The number of the type in a file.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.facts().0
    }

    /// The format's name of the type.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.facts().1
    }

    /// Elements of a block.
    #[must_use]
    pub const fn block_elements(self) -> usize {
        self.facts().2
    }

    /// Bytes of a block.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        self.facts().3
    }

    /// The names of all types that are read.
    pub(crate) fn names() -> String {
        Kind::ALL.map(Kind::name).join(", ")
    }
}
