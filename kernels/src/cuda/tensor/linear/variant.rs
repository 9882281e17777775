//! The kernels of linear.cu, and the choice of the fastest.

use super::{Size, TILE};

/// Shared memory that a block may have when two blocks share a multiprocessor. The second number is for a block that has the
/// multiprocessor alone.
pub(super) const SHARED_OF_TWO: usize = 113 << 10;
pub(super) const SHARED_OF_ONE: usize = 227 << 10;
/// Most stages of the ring.
const MOST_STAGES: usize = 16;
/// Bytes of the two barriers of a stage: one signals that it is full, the other that it is empty.
const STAGE_BARRIERS_BYTES: usize = 16;
/// Bytes of one more barrier, and of the padding that aligns the inbox after it.
const BARRIER_BYTES: usize = 16;

/// A kernel. All of them give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// A block takes one slice of 64 rows of weights, and 8 rows of X. A cluster takes all slices.
    Split8,
    /// As `Split8`, with 16 rows of X.
    Split16,
    /// As `Split8`, with 32 rows of X.
    Split32,
    /// As `Split8`, with 64 rows of X.
    Split64,
    /// A block takes one slice of 128 rows of weights, and 128 rows of X. A cluster takes all slices.
    Split128,
    /// A pair of blocks takes all slices of 256 rows of weights, one after the other, and 128 rows of X.
    Added128,
    /// As `Added128`, with 176 rows of X.
    Added176,
    /// As `Added128`, with 192 rows of X.
    Added192,
    /// A pair of blocks takes 256 rows of weights, and 256 rows of X. It is for matrices of one slice.
    One256,
}

/// Which blocks compute the slices of a product. `Slices` of linear.cu.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Slices {
    Split,
    Added,
    One,
}

/// The sizes that a kernel is made for, and its speed.
struct Shape {
    kernel: &'static str,
    /// Tiles of 64 rows of weights that a block takes, each with a group of threads.
    groups: usize,
    /// Rows of X that a block takes.
    tokens: usize,
    slices: Slices,
    /// Nanoseconds of a block of 64 columns, and of the rest of a tile's work, measured on an H100 with all multiprocessors
    /// busy. They are used only to compare kernels for more than 64 rows.
    nanoseconds: [usize; 2],
}

impl Variant {
    /// All of them, in the order of the enum.
    pub const ALL: [Self; 9] = [
        Self::Split8,
        Self::Split16,
        Self::Split32,
        Self::Split64,
        Self::Split128,
        Self::Added128,
        Self::Added176,
        Self::Added192,
        Self::One256,
    ];

    fn shape(self) -> Shape {
        let shape = |kernel, groups, tokens, slices, nanoseconds| Shape {
            kernel,
            groups,
            tokens,
            slices,
            nanoseconds,
        };
        match self {
            Self::Split8 => shape("linear_split_8", 1, 8, Slices::Split, [0; 2]),
            Self::Split16 => shape("linear_split_16", 1, 16, Slices::Split, [0; 2]),
            Self::Split32 => shape("linear_split_32", 1, 32, Slices::Split, [0; 2]),
            Self::Split64 => shape("linear_split_64", 1, 64, Slices::Split, [0; 2]),
            Self::Split128 => shape("linear_split_128", 2, 128, Slices::Split, [400, 5000]),
            Self::Added128 => shape("linear_added_128", 2, 128, Slices::Added, [420, 2500]),
            Self::Added176 => shape("linear_added_176", 2, 176, Slices::Added, [490, 6000]),
            Self::Added192 => shape("linear_added_192", 2, 192, Slices::Added, [540, 5500]),
            Self::One256 => shape("linear_one_256", 2, 256, Slices::One, [660, 4000]),
        }
    }

    /// Name of the kernel in [`SOURCE`](super::SOURCE).
    #[must_use]
    pub fn kernel(self) -> &'static str {
        self.shape().kernel
    }

    /// Rows of X that a block takes.
    #[must_use]
    pub fn tokens(self) -> usize {
        self.shape().tokens
    }

    /// Tiles of 64 rows of weights that a block takes, each with a group of threads.
    #[must_use]
    pub fn groups(self) -> usize {
        self.shape().groups
    }

    /// Whether the kernel can multiply with a matrix of so many [slices](super::TensorMatrix::slices).
    #[must_use]
    pub fn suits(self, slices: usize) -> bool {
        self.shape().slices != Slices::One || slices == 1
    }

    /// Blocks of a cluster.
    pub(super) fn cluster(self, slices: usize) -> usize {
        if self.is_split() { slices } else { 2 }
    }

    /// Clusters of a product of `rows` rows. If no slices are exchanged, a cluster takes one tile after the other.
    pub(super) fn clusters(self, rows: usize, size: Size, multiprocessors: usize) -> usize {
        let tiles = self.tiles(rows, size);
        if self.is_split() && size.slices > 1 { tiles } else { tiles.min(self.room(size, multiprocessors)) }
    }

    /// Rows of X that one copy brings. In a pair, each block copies half.
    pub(super) fn copied_rows(self) -> usize {
        if self.is_split() { self.tokens() } else { self.tokens() / 2 }
    }

    /// Threads of a block: its groups, and one warp, or one group, that fills the ring.
    pub(super) fn threads(self) -> usize {
        if self.groups() == 1 { 160 } else { 384 }
    }

    /// Stages of the ring: as many as there is room for, and no more than a block fills. The next kernel can use the shared memory
    /// that is left.
    pub(super) fn stages(self, size: Size) -> usize {
        let room = self.most_shared_bytes() - BARRIER_BYTES - self.inbox_bytes(size.slices);
        let most = if self.is_split() && size.slices > 1 {
            size.blocks().div_ceil(size.slices)
        } else {
            MOST_STAGES
        };
        (room / self.stage_bytes()).min(most)
    }

    pub(super) fn shared_bytes(self, size: Size) -> usize {
        self.stages(size) * self.stage_bytes() + self.inbox_bytes(size.slices) + BARRIER_BYTES
    }

    pub(super) fn most_shared_bytes(self) -> usize {
        if self.groups() == 1 { SHARED_OF_TWO } else { SHARED_OF_ONE }
    }

    fn stage_bytes(self) -> usize {
        (self.groups() * TILE + self.tokens()) * TILE * 2 + STAGE_BARRIERS_BYTES
    }

    /// Bytes that a block receives from the others of its cluster: for each 8 rows of X, the sums of all its rows of weights.
    fn inbox_bytes(self, slices: usize) -> usize {
        let eights = (self.tokens() / 8).next_multiple_of(slices);
        if self.is_split() && slices > 1 { eights * self.groups() * TILE * 8 * 4 } else { 0 }
    }

    fn is_split(self) -> bool {
        self.shape().slices == Slices::Split
    }

    /// Tiles of the result, each computed by one cluster.
    fn tiles(self, rows: usize, size: Size) -> usize {
        let weights = self.groups() * TILE * if self.is_split() { 1 } else { 2 };
        size.outputs.div_ceil(weights) * rows.div_ceil(self.tokens())
    }

    /// Clusters that the device runs at the same time.
    fn room(self, size: Size, multiprocessors: usize) -> usize {
        let blocks = if self.groups() == 1 { 2 * multiprocessors } else { multiprocessors };
        match self.cluster(size.slices) {
            cluster @ ..=2 => blocks / cluster,
            // Multiprocessors are in groups of 16 or 18. A cluster lies in one group, so some multiprocessors have no cluster.
            cluster => blocks * 7 / 8 / cluster,
        }
        .max(1)
    }

    /// The fastest kernel for this many rows.
    pub(super) fn best(rows: usize, size: Size, multiprocessors: usize) -> Self {
        let few = [Self::Split8, Self::Split16, Self::Split32, Self::Split64];
        if let Some(variant) = few.into_iter().find(|variant| rows <= variant.tokens()) {
            return variant;
        }
        let time = |variant: &Self| {
            let [block, rest] = variant.shape().nanoseconds;
            let blocks = if variant.is_split() { size.blocks().div_ceil(size.slices) } else { size.blocks() };
            let rounds = variant.tiles(rows, size).div_ceil(variant.room(size, multiprocessors));
            rounds * (blocks * block + rest)
        };
        let many = [Self::Split128, Self::Added128, Self::Added176, Self::Added192, Self::One256];
        many.into_iter()
            .filter(|variant| variant.suits(size.slices))
            .min_by_key(time)
            .unwrap_or(Self::Added128)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_fit_into_shared_memory_and_hold_enough_to_hide_latency() {
        for variant in Variant::ALL {
            for slices in [1, 2, 4, 8] {
                let size = Size { outputs: 1024, inputs: 16384, slices };
                let bytes = variant.shared_bytes(size);
                let blocks = if variant.groups() == 1 { 2 } else { 1 };
                // The device keeps 1 KiB for each block.
                assert!(blocks * (bytes + 1024) <= 228 << 10, "{variant:?}: {bytes} bytes");
                assert!(variant.stages(size) >= 4, "{variant:?}: {} stages", variant.stages(size));
            }
        }
    }

    #[test]
    fn a_ring_is_no_longer_than_the_slice_that_it_is_for() {
        let size = Size { outputs: 2048, inputs: 2048, slices: 4 };
        assert_eq!(Variant::Split8.stages(size), 8);
        assert_eq!(Variant::Split8.stages(Size { inputs: 8192, ..size }), 11);
    }

    #[test]
    fn what_was_fastest_on_an_h100_is_chosen() {
        let (qkv, output, down) = ((3072, 2048), (2048, 2048), (2048, 8192));
        let gate_up = (16384, 2048);
        for ((outputs, inputs), rows, expected) in [
            (qkv, 1, Variant::Split8),
            (gate_up, 9, Variant::Split16),
            (down, 32, Variant::Split32),
            (output, 33, Variant::Split64),
            (qkv, 128, Variant::Split128),
            (output, 128, Variant::Split128),
            (down, 256, Variant::Split128),
            (output, 512, Variant::Added128),
            (down, 1024, Variant::Added128),
            (qkv, 2048, Variant::Added192),
            (qkv, 8192, Variant::Added192),
            (output, 8192, Variant::Added128),
            (down, 8192, Variant::Added176),
            (gate_up, 192, Variant::Added192),
            (gate_up, 256, Variant::One256),
            (gate_up, 384, Variant::Added192),
            (gate_up, 8192, Variant::One256),
        ] {
            let size = Size::new(outputs, inputs);
            assert_eq!(Variant::best(rows, size, 132), expected, "{rows} rows, {outputs} x {inputs}");
        }
    }
}
