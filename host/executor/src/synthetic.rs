//! An executor that computes no model and checks the KV that it reads.
//!
//! The KV row of a position is derived from all tokens up to it, the layer, the head and K or V. The next token is derived from
//! every byte of every row *read back through the page table*. One wrong, stale or missing byte anywhere in a sequence's pages
//! changes the answer. Its time per step comes from a cost model, so that scheduling can be measured at sizes that this machine
//! cannot compute.
//!
//! Some of its layers may slide: for these it reads the newest positions only, through the sequence's window. Garbage in pages
//! that have left the window changes nothing, and a byte in the window changes the answer.
//!
//! Instead, some of its layers may keep a state, as recurrent layers do. Such a layer's state behind a position is derived from the
//! token and from every byte of the state behind the previous position, read back from the sequence's pages.
//!
//! Ranks derive and read back the KV of their own heads, and add up the digests. If ranks that hold the same head find different
//! bytes in it, the answer changes. The modelled time is that of the worker, for any number of ranks.

mod content;
mod hold;

use std::convert::Infallible;
use std::ops::Range;
use std::thread::sleep;
use std::time::{Duration, Instant};

use host_core::heads::{holders, rank_heads};
use host_core::{Batch, Draw, Dtype, Sampled, Sampling, Sequence, SequenceOutput, Shaping};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use self::content::Content;
pub use self::hold::Hold;
use super::digest;
use super::group::Seat;
use super::{Executor, ExecutorError, KvMemory, LayersDone, ModelShape, Sliding, sampling, window};

/// Time that a step takes: `step + prefill tokens x prefill_token + sequences x sequence`, spread evenly over the layers.
///
/// Zero by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Time of each batch.
    pub step: Duration,
    /// Per drafted token, and per token of a sequence that computes more than one.
    pub prefill_token: Duration,
    /// Per sequence that computes one token. Drafted tokens behind it count separately.
    pub sequence: Duration,
}

impl Cost {
    /// The time that a batch takes.
    #[must_use]
    pub fn of(&self, batch: &Batch) -> Duration {
        let (mut tokens, mut sequences) = (0, 0);
        for sequence in &batch.sequences {
            match sequence.tokens.len() - sequence.draft().len() {
                1 => sequences += 1,
                more => tokens += more,
            }
            tokens += sequence.draft().len();
        }
        self.step_of(tokens, sequences)
    }

    /// The time of a step with so many prompt tokens, and so many sequences that compute one token.
    #[must_use]
    pub fn step_of(&self, tokens: usize, sequences: usize) -> Duration {
        let times = |time: Duration, count| time.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX));
        let tokens = times(self.prefill_token, tokens);
        self.step.saturating_add(tokens).saturating_add(times(self.sequence, sequences))
    }
}

/// The synthetic executor.
#[derive(Debug)]
pub struct Synthetic {
    shape: ModelShape,
    content: Content,
    cost: Cost,
    hold: Option<Hold>,
    seat: Seat,
}

/// Most layers, heads, and elements of a head. Up to these sizes, the bytes of a page, and of a pool of many pages, do not
/// overflow.
const MOST_SIZE: usize = 1 << 14;
/// Most token ids and positions.
const MOST_COUNT: usize = 1 << 31;

/// Name and version of how KV and tokens are derived.
pub const MATH: &str = "synthetic-2";
/// Most logits that are made up for a request whose settings change logits.
const MOST_LOGITS: u32 = 1 << 17;
/// First token id that is drawn, if the vocabulary reaches that far: printable ASCII of the byte tokenizer.
const FIRST_PRINTABLE: u32 = 32;
/// One above the last token id that is drawn.
const END_PRINTABLE: u32 = 127;

impl Synthetic {
    /// An executor for KV of this size, for a worker of one rank.
    ///
    /// # Errors
    /// When a size is out of bounds, or a row is shorter than the 8 bytes that carry the prefix.
    pub fn new(shape: SyntheticShape, cost: Cost) -> Result<Self, ExecutorError> {
        Self::for_rank(shape, cost, Seat::alone())
    }

    /// The executor of one rank. There may be any number of ranks.
    ///
    /// # Errors
    /// As [`new`](Synthetic::new).
    pub fn for_rank(shape: SyntheticShape, cost: Cost, seat: Seat) -> Result<Self, ExecutorError> {
        let SyntheticShape {
            layers,
            sliding,
            state_layers,
            kv_heads,
            head_dim,
            vocabulary,
            max_positions,
            kv_dtype,
        } = shape;
        let sizes = [("layers", layers), ("kv-heads", kv_heads), ("head-dim", head_dim)];
        let counts = [("vocabulary", vocabulary), ("max-positions", max_positions)];
        for ((name, value), most) in
            sizes.map(|size| (size, MOST_SIZE)).into_iter().chain(counts.map(|count| (count, MOST_COUNT)))
        {
            if !(1..=most).contains(&value) {
                return Err(ExecutorError::Failed(format!(
                    "[synthetic] {name} is {value}: it must be 1 to {most}"
                )));
            }
        }
        if let Some(Sliding { layers: sliding, window }) = sliding {
            let whole = [("sliding-layers", sliding, layers - 1), ("window", window, MOST_COUNT)];
            if let Some((name, value, most)) =
                whole.iter().find(|(_, value, most)| !(1..=*most).contains(value))
            {
                return Err(ExecutorError::Failed(format!(
                    "[synthetic] {name} is {value}: with layers = {layers} it must be 1 to {most}"
                )));
            }
        }
        if state_layers > 0 && (sliding.is_some() || state_layers >= layers) {
            return Err(ExecutorError::Failed(format!(
                "[synthetic] state-layers is {state_layers}: with layers = {layers} it must be below that, and no layers may slide"
            )));
        }
        let row = head_dim * kv_dtype.bytes();
        if row < 8 || row % 8 != 0 {
            return Err(ExecutorError::Failed(format!(
                "the synthetic executor needs KV rows of a multiple of 8 bytes, {head_dim} x {kv_dtype} are {row}"
            )));
        }
        let mut identity = format!("synthetic {layers} {kv_heads} {head_dim} {vocabulary}");
        if let Some(Sliding { layers, window }) = sliding {
            identity += &format!(", {layers} sliding over {window}");
        }
        if state_layers > 0 {
            identity += &format!(", {state_layers} with a state");
        }
        let shape = ModelShape {
            layers,
            kv_heads,
            head_dim,
            vocabulary,
            max_positions,
            kv_dtype,
            weights: format!("{:016x}", xxh3_64(identity.as_bytes())),
            math: MATH.to_owned(),
            sliding,
            state_layers,
        };
        Ok(Self { content: Content::new(&shape), shape, cost, hold: None, seat })
    }

    /// Holds prompts as `hold` says.
    #[must_use]
    pub fn with_hold(self, hold: Option<Hold>) -> Self {
        Self { hold, ..self }
    }

    /// The state of each draw, from the digests `found[rank][draw x the rank's heads]`: the sum over all heads. If the holders of
    /// a head found different digests, their differences to the first holder's are added, so that the KV of every rank counts.
    fn states(kv_heads: usize, draws: usize, found: &[Vec<u64>]) -> Vec<u64> {
        let ranks = found.len();
        let state = |draw: usize| {
            let digest = |rank: usize, head: usize| {
                let held = rank_heads(kv_heads, ranks, rank);
                found[rank][draw * held.len() + head - held.start]
            };
            digest::sum((0..kv_heads).flat_map(|head| {
                let holders = holders(kv_heads, ranks, head);
                let first = digest(holders.start, head);
                let others = holders.skip(1).map(move |rank| {
                    digest(rank, head).wrapping_sub(first).wrapping_mul(2 * rank as u64 + 1)
                });
                std::iter::once(first).chain(others).collect::<Vec<_>>()
            }))
        };
        (0..draws).map(state).collect()
    }

    fn draw(&self, state: u64, draw: &Draw) -> Sampled {
        let sampling = &draw.sampling;
        let state = match sampling.temperature > 0.0 {
            true => xxh3_64_with_seed(&state.to_le_bytes(), sampling.seed),
            false => state,
        };
        let vocabulary = self.shape.vocabulary as u32;
        let (first, end) = match vocabulary >= END_PRINTABLE {
            true if vocabulary < 1024 => (FIRST_PRINTABLE, END_PRINTABLE),
            _ => (0, vocabulary),
        };
        let token = |rank: u64| first + ((state.rotate_left(17) ^ rank) % u64::from(end - first)) as u32;
        // Log probabilities are made up: -0.5 for the drawn token, one less per rank.
        let likeliest = u64::from(sampling.logprobs.unwrap_or(0));
        let drawn = match &sampling.shaping {
            None => token(0),
            Some(shaping) => shaped(state, (first, end), token(0), shaping, draw),
        };
        Sampled {
            token: drawn,
            logprob: sampling.logprobs.map(|_| -0.5),
            top: (0..likeliest).map(|rank| (token(rank), -0.5 - rank as f32)).collect(),
        }
    }

    /// A token of a prompt with a made-up log probability from -9 to -1, which depends on the KV before the token. The likeliest
    /// tokens are those of a draw.
    fn score(&self, state: u64, token: u32, top: u8) -> Sampled {
        let likeliest = self.draw(state, &Sampling { logprobs: Some(top), ..Sampling::GREEDY }.into()).top;
        let bits = xxh3_64_with_seed(&token.to_le_bytes(), state) >> 40;
        Sampled { token, logprob: Some(-1.0 - bits as f32 / (1_u32 << 21) as f32), top: likeliest }
    }
}

/// The positions that a sequence draws tokens of, or whose tokens it scores.
fn draws_of(sequence: &Sequence) -> Range<usize> {
    match (&sequence.sample, &sequence.scored) {
        (Some(_), _) => sequence.known()..sequence.end() + 1,
        (None, Some(scored)) => {
            let first = sequence.start as usize + 1;
            first..first + scored.next.len()
        }
        (None, None) => 0..0,
    }
}

/// The likeliest token by made-up logits. These are from -2 to 2 for all tokens that may be drawn (in a huge vocabulary, for the
/// first ones), and 3 for the token that would be drawn without settings.
fn shaped(state: u64, (first, end): (u32, u32), unshaped: u32, shaping: &Shaping, draw: &Draw) -> u32 {
    let end = end.min(first.saturating_add(MOST_LOGITS)).max(unshaped.saturating_add(1));
    let made_up = |token: u32| {
        let bits = xxh3_64_with_seed(&token.to_le_bytes(), state) >> 40;
        if token == unshaped { 3.0 } else { bits as f32 / (1_u32 << 22) as f32 - 2.0 }
    };
    let mut logits: Vec<f32> =
        (0..end).map(|token| if token < first { f32::NEG_INFINITY } else { made_up(token) }).collect();
    sampling::shape(&mut logits, shaping, draw);
    let mut best = (unshaped, f32::NEG_INFINITY);
    for (token, logit) in (0..).zip(logits) {
        if logit > best.1 {
            best = (token, logit);
        }
    }
    best.0
}

/// Sizes of the model that the synthetic executor pretends to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyntheticShape {
    /// Transformer layers, the sliding ones included.
    pub layers: usize,
    /// The layers that see the newest positions only, if there are any.
    pub sliding: Option<Sliding>,
    /// The layers that keep a state. It is 0 if some layers slide.
    pub state_layers: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Token ids are below this.
    pub vocabulary: usize,
    /// Longest sequence.
    pub max_positions: usize,
    /// Element type of the KV.
    pub kv_dtype: Dtype,
}

impl Default for SyntheticShape {
    /// 2 KiB of KV per token, and the byte tokenizer's vocabulary.
    fn default() -> Self {
        Self {
            layers: 4,
            sliding: None,
            state_layers: 0,
            kv_heads: 2,
            head_dim: 32,
            vocabulary: 259,
            max_positions: 131_072,
            kv_dtype: Dtype::F32,
        }
    }
}

impl Executor for Synthetic {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    #[expect(clippy::disallowed_methods, reason = "taking time is what this executor models")]
    fn forward_by_layer(
        &mut self,
        kv: &mut KvMemory,
        batch: &Batch,
        layers_done: &mut LayersDone<'_>,
    ) -> Result<Vec<SequenceOutput>, ExecutorError> {
        if let Some(hold) = &self.hold {
            hold.wait(batch);
        }
        let started = Instant::now();
        let mut turn = self.seat.turn()?;
        let whole = self.cost.of(batch);
        // The thread sleeps as long as the modelled accelerator would compute.
        let until = |end: Duration| sleep(end.saturating_sub(started.elapsed()));
        let ModelShape { layers, kv_heads, .. } = self.shape;
        let heads = rank_heads(kv_heads, turn.ranks(), turn.rank());
        let full = self.shape.page_layers();
        let pool = (kv.layout().shape.layers, kv.heads());
        if pool != (full, heads.clone()) {
            return Err(ExecutorError::Failed(format!(
                "the KV pool has (layers, heads) {pool:?}, this rank {:?}",
                (full, heads)
            )));
        }
        kv.expect_host()?;
        let content = &self.content;
        batch.sequences.iter().try_for_each(|sequence| content.check(kv, sequence))?;
        if let Some(shape) = self.shape.window() {
            let layers = self.shape.beside_layers();
            batch.sequences.iter().for_each(|sequence| window::empty_unused(kv, sequence, shape, layers));
        }
        let prefixes: Vec<Vec<u64>> =
            batch.sequences.iter().map(|sequence| content.prefixes(kv, sequence)).collect();
        // Digests of the KV that each draw depends on, one per head.
        let draws: usize = batch.sequences.iter().map(|sequence| draws_of(sequence).count()).sum();
        let mut digests = vec![0u64; draws * heads.len()];
        for layer in 0..layers {
            let mut digests = digests.chunks_exact_mut(heads.len());
            for (sequence, prefixes) in batch.sequences.iter().zip(&prefixes) {
                content.write(kv, sequence, prefixes, layer);
                for (end, digests) in draws_of(sequence).zip(&mut digests) {
                    content.read(kv, sequence, end, layer, digests);
                }
            }
            if batch.layer_group > 0 && layer + 1 < layers {
                until(whole.mul_f64((layer + 1) as f64 / layers as f64));
                layers_done(layer + 1);
            }
        }
        let found = turn.gather(&digests)?;
        turn.finish();
        let mut states = Self::states(kv_heads, draws, &found).into_iter();
        let outputs = batch.sequences.iter().map(|sequence| {
            let states: Vec<u64> = states.by_ref().take(draws_of(sequence).count()).collect();
            let draw = |before: usize, draw: &Draw| Ok::<_, Infallible>(self.draw(states[before], draw));
            let (drawn, _none) = sequence.sampled(draw);
            let scored = sequence.scored.iter().flat_map(|scored| {
                scored.next.iter().zip(&states).map(|(token, state)| self.score(*state, *token, scored.top))
            });
            SequenceOutput { room: sequence.room, sampled: drawn, undrawn: None, scored: scored.collect() }
        });
        let outputs = if self.seat.rank() == 0 { outputs.collect() } else { Vec::new() };
        until(whole);
        Ok(outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host_core::layout::{KvLayout, KvOrder, KvShape};
    use host_core::window::WindowPages;
    use host_core::{PageId, Room, Sampling};

    const GREEDY: Sampling = Sampling::GREEDY;

    fn pool(executor: &Synthetic, page_tokens: usize, order: KvOrder) -> KvMemory {
        let shape = KvShape {
            pages: 16,
            heads: executor.shape.kv_heads,
            layers: executor.shape.layers,
            page_tokens,
            head_dim: executor.shape.head_dim,
            value_dim: executor.shape.head_dim,
            dtype: executor.shape.kv_dtype,
        };
        KvMemory::new(KvLayout::new(shape, order)).unwrap()
    }

    fn run(kv: &mut KvMemory, tokens: &[u32], chunk: usize, first_page: u32) -> u32 {
        let mut executor = Synthetic::new(SyntheticShape::default(), Cost::default()).unwrap();
        let mut token = None;
        for start in (0..tokens.len()).step_by(chunk) {
            let end = tokens.len().min(start + chunk);
            let pages = (0..8).map(|page| PageId((first_page + page * 5) % 16)).collect();
            let sequence = Sequence {
                room: Room(1),
                tokens: tokens[start..end].to_vec(),
                start: start as u32,
                pages,
                window: WindowPages::default(),
                recompute: 0..0,
                drafted: 0,
                sample: (end == tokens.len()).then_some(GREEDY.into()),
                scored: None,
            };
            let outputs =
                executor.forward(kv, &Batch { id: 1, sequences: vec![sequence], layer_group: 0 }).unwrap();
            token = outputs[0].sampled.first().map(|sampled| sampled.token);
        }
        token.unwrap()
    }

    #[test]
    fn the_answer_depends_on_tokens_and_not_on_chunks_pages_or_layout() {
        let executor = Synthetic::new(SyntheticShape::default(), Cost::default()).unwrap();
        let tokens: Vec<u32> = (0..29).map(|i| i * 7 % 250).collect();
        let mut answers = std::collections::BTreeSet::new();
        for order in [KvOrder::PageHeadLayerKvTokenDim, KvOrder::LayerKvPageTokenHeadDim] {
            for (chunk, first_page) in [(1, 0), (7, 3), (29, 9)] {
                let mut kv = pool(&executor, 8, order);
                answers.insert(run(&mut kv, &tokens, chunk, first_page));
            }
        }
        assert_eq!(answers.len(), 1);
    }

    /// An executor with one full layer and three with a state. A page of the pool holds one layer.
    fn stateful() -> Synthetic {
        let shape = SyntheticShape {
            vocabulary: 1 << 30,
            layers: 4,
            state_layers: 3,
            head_dim: 4,
            ..SyntheticShape::default()
        };
        Synthetic::new(shape, Cost::default()).unwrap()
    }

    /// The pool of `stateful`, its full parts and its states for 3 token pages of 4 tokens.
    fn states() -> (KvMemory, Vec<PageId>, WindowPages) {
        let executor = stateful();
        let mut shape = pool(&executor, 4, KvOrder::PageHeadLayerKvTokenDim).layout().shape;
        shape.layers = executor.shape().page_layers();
        let kv = KvMemory::new(KvLayout::new(shape, KvOrder::PageHeadLayerKvTokenDim)).unwrap();
        let pages = [3, 1, 14].map(PageId).to_vec();
        (kv, pages, WindowPages { first: 0, pages: [0, 2, 4, 5, 6, 7, 8, 9, 10].map(PageId).to_vec() })
    }

    #[test]
    fn a_state_depends_on_the_tokens_and_not_on_chunks() {
        let tokens: Vec<u32> = (0..11).map(|i| i * 7 % 250).collect();
        let answers: std::collections::BTreeSet<u32> = [1, 2, 3, 4, 7, 11]
            .into_iter()
            .map(|chunk| {
                let (mut kv, pages, window) = states();
                let mut executor = stateful();
                let mut token = None;
                for start in (0..tokens.len()).step_by(chunk) {
                    let end = tokens.len().min(start + chunk);
                    let sequence = Sequence {
                        room: Room(1),
                        tokens: tokens[start..end].to_vec(),
                        start: start as u32,
                        pages: pages.clone(),
                        window: window.clone(),
                        recompute: 0..0,
                        drafted: 0,
                        sample: (end == tokens.len()).then_some(GREEDY.into()),
                        scored: None,
                    };
                    let batch = Batch { id: 1, sequences: vec![sequence], layer_group: 0 };
                    let outputs = executor.forward(&mut kv, &batch).unwrap();
                    token = outputs[0].sampled.first().map(|sampled| sampled.token);
                }
                token.unwrap()
            })
            .collect();
        assert_eq!(answers.len(), 1);
    }

    #[test]
    fn every_byte_of_the_state_before_matters_and_no_byte_of_an_older_one() {
        let (mut kv, pages, window) = states();
        let mut executor = stateful();
        let step = |tokens: Vec<u32>, start, sample| {
            let (pages, window) = (pages.clone(), window.clone());
            let sequence = Sequence {
                room: Room(1),
                tokens,
                start,
                pages,
                window,
                recompute: 0..0,
                drafted: 0,
                sample,
                scored: None,
            };
            Batch { id: 1, sequences: vec![sequence], layer_group: 0 }
        };
        executor.forward(&mut kv, &step(vec![5; 8], 0, None)).unwrap();
        // The first position of the third token page reads the state of the second, which stays as it is.
        let mut next = |kv: &mut KvMemory| {
            let outputs = executor.forward(kv, &step(vec![6], 8, Some(GREEDY.into()))).unwrap();
            outputs[0].sampled.first().map(|sampled| sampled.token)
        };
        let before = next(&mut kv);
        for (part, page) in window.pages[..6].iter().enumerate() {
            for (head, side, slot) in (0..2 * 2 * 4).map(|i| (i / 8, i / 4 % 2, i % 4)) {
                for byte in 0..16 {
                    kv.write_row(*page, head, 0, side, slot)[byte] ^= 0x10;
                    let changed = next(&mut kv) != before;
                    assert_eq!(
                        changed,
                        part >= 3,
                        "part {part}, head {head}, side {side}, slot {slot}, byte {byte}"
                    );
                    kv.write_row(*page, head, 0, side, slot)[byte] ^= 0x10;
                }
            }
        }
        assert_eq!(next(&mut kv), before);
    }

    #[test]
    fn sizes_that_cannot_be_are_refused_by_name() {
        let standard = SyntheticShape::default();
        let with = |layers, window| SyntheticShape { sliding: Some(Sliding { layers, window }), ..standard };
        for (shape, sentence) in [
            (SyntheticShape { layers: 0, ..standard }, "layers is 0"),
            (SyntheticShape { kv_heads: 0, ..standard }, "kv-heads is 0"),
            (SyntheticShape { kv_heads: usize::MAX, ..standard }, "kv-heads is 18446744073709551615"),
            (SyntheticShape { head_dim: usize::MAX, ..standard }, "head-dim is 18446744073709551615"),
            (SyntheticShape { vocabulary: 0, ..standard }, "vocabulary is 0"),
            (SyntheticShape { max_positions: 0, ..standard }, "max-positions is 0"),
            (with(0, 5), "sliding-layers is 0: with layers = 4 it must be 1 to 3"),
            (with(4, 5), "sliding-layers is 4: with layers = 4 it must be 1 to 3"),
            (with(3, 0), "window is 0"),
            (SyntheticShape { state_layers: 4, ..standard }, "state-layers is 4: with layers = 4"),
            (SyntheticShape { state_layers: 1, ..with(1, 5) }, "no layers may slide"),
        ] {
            let refused = Synthetic::new(shape, Cost::default()).unwrap_err().to_string();
            assert!(refused.contains(sentence), "{refused}");
        }
    }

    #[test]
    fn a_step_takes_what_its_parts_take_and_never_more_than_can_be_counted() {
        let second = Duration::from_secs(1);
        let cost = Cost { step: 100 * second, prefill_token: second, sequence: 10 * second };
        assert_eq!(cost.step_of(5, 2), 125 * second);
        for cost in [
            Cost { step: Duration::MAX, ..cost },
            Cost { prefill_token: Duration::MAX, ..cost },
            Cost { sequence: Duration::MAX, ..cost },
        ] {
            assert_eq!(cost.step_of(5, 2), Duration::MAX);
        }
    }

    #[test]
    fn every_byte_of_every_page_matters() {
        let mut executor = Synthetic::new(
            SyntheticShape { vocabulary: 1 << 30, layers: 2, head_dim: 4, ..SyntheticShape::default() },
            Cost::default(),
        )
        .unwrap();
        let mut kv = pool(&executor, 4, KvOrder::PageHeadLayerKvTokenDim);
        let pages = vec![PageId(3), PageId(1)];
        let step = |tokens: Vec<u32>, start, sample| {
            let (pages, window) = (pages.clone(), WindowPages::default());
            let sequence = Sequence {
                room: Room(1),
                tokens,
                start,
                pages,
                window,
                recompute: 0..0,
                drafted: 0,
                sample,
                scored: None,
            };
            Batch { id: 1, sequences: vec![sequence], layer_group: 0 }
        };
        executor.forward(&mut kv, &step(vec![5; 7], 0, None)).unwrap();
        let mut next = |kv: &mut KvMemory| {
            let outputs = executor.forward(kv, &step(vec![6], 7, Some(GREEDY.into()))).unwrap();
            outputs[0].sampled.first().map(|sampled| sampled.token)
        };
        let before = next(&mut kv);
        for position in 0..7 {
            for (head, layer, side) in (0..2 * 2 * 2).map(|i| (i / 4, i / 2 % 2, i % 2)) {
                for byte in 0..16 {
                    let (page, token) = (pages[position / 4], position % 4);
                    kv.write_row(page, head, layer, side, token)[byte] ^= 0x10;
                    assert_ne!(next(&mut kv), before);
                    kv.write_row(page, head, layer, side, token)[byte] ^= 0x10;
                }
            }
        }
        assert_eq!(next(&mut kv), before);
    }
}
