//! The workload: sequences in groups that share a prefix. Every cache gets the same bytes.

/// Tokens in a page.
pub const PAGE: usize = 16;
/// Tokens in a sequence.
pub const TOKENS: usize = 2048;
/// Pages that the sequences of a group share: 79.7 %.
pub const SHARED_PAGES: usize = 102;
/// Pages of a sequence.
pub const PAGES: usize = TOKENS / PAGE;

/// All sequences, one behind the other.
pub struct Workload {
    tokens: Vec<u32>,
    /// Suffixes that are in no sequence.
    fresh: Vec<u32>,
    groups: usize,
}

struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    fn fill(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| (self.next() % 128_000) as u32).collect()
    }
}

impl Workload {
    /// `sequences` sequences. Sequence i starts like all others of group i mod `groups`.
    pub fn new(sequences: usize, groups: usize) -> Self {
        let mut random = SplitMix64(42);
        let shared = SHARED_PAGES * PAGE;
        let prefixes: Vec<Vec<u32>> = (0..groups).map(|_| random.fill(shared)).collect();
        let mut tokens = Vec::with_capacity(sequences * TOKENS);
        for sequence in 0..sequences {
            tokens.extend_from_slice(&prefixes[sequence % groups]);
            tokens.extend(random.fill(TOKENS - shared));
        }
        let fresh = random.fill(TOKENS - shared + sequences.min(20_000));
        Self { tokens, fresh, groups }
    }

    pub fn len(&self) -> usize {
        self.tokens.len() / TOKENS
    }

    pub fn groups(&self) -> usize {
        self.groups
    }

    pub fn unique_pages(&self) -> usize {
        self.groups.min(self.len()) * SHARED_PAGES + self.len() * (PAGES - SHARED_PAGES)
    }

    pub fn all(&self) -> &[u32] {
        &self.tokens
    }

    pub fn sequence(&self, index: usize) -> &[u32] {
        &self.tokens[index * TOKENS..(index + 1) * TOKENS]
    }

    /// Prompts that share the prefix of a group and continue with new tokens.
    pub fn cold(&self, count: usize) -> Vec<Vec<u32>> {
        let shared = SHARED_PAGES * PAGE;
        let fresh =
            |index: usize| &self.fresh[index % (self.fresh.len() + shared - TOKENS)..][..TOKENS - shared];
        (0..count)
            .map(|index| [&self.sequence(index % self.len())[..shared], fresh(index)].concat())
            .collect()
    }
}

/// Reads a prompt once, so that it lies in the processor's cache as after a tokenizer or a socket.
pub fn read(tokens: &[u32]) -> u32 {
    std::hint::black_box(tokens.iter().fold(0, |sum, token| sum ^ token))
}
