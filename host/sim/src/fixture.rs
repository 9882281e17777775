//! Values that tests and simulated clients hand to a scheduler, with defaults for every field that they do not care
//! about.

use std::convert::Infallible;
use std::time::Duration;

use host_core::layer_groups::{LayerGroups, Wish};
use host_core::layout::{Dtype, KvLayout, KvOrder, KvShape};
use host_core::radix::{NamespaceKey, PageHash};
use host_core::request::{PeerRef, Request};
use host_core::{Batch, Config, Instance, Role, Room, Sampled, Sampling, Sequence, SequenceOutput};

/// A worker of so many pages of [`PAGE`] tokens, without a cache, in which only pages are scarce.
///
/// Override the fields that a test is about:
///
/// ```
/// # use host_core::{Config, Role};
/// let tiny = Config { page_tokens: 1, max_batch: 3, ..host_sim::config(Role::Aggregated, 10) };
/// # assert!(tiny.radix_cache.is_none());
/// ```
#[must_use]
pub fn config(role: Role, pages: u32) -> Config {
    Config {
        role,
        pages,
        page_tokens: PAGE as u32,
        // One token more than has KV: the last token drawn.
        max_tokens: pages * PAGE as u32 + 1,
        vocabulary: 1000,
        chunk_tokens: 8,
        radix_cache: None,
        hierarchy: None,
        cache_events: false,
        identity: PageHash([0; 32]),
        reserved_decode_tokens: 1_000,
        draft_tokens: 0,
        target_itl: None,
        share_transfers: true,
        seed: 3,
        settles: true,
        window: None,
        layer_groups: LayerGroups::off(1),
        max_batch: 64,
        max_running: 64,
        max_queued: 10_000,
        max_attempts: 3,
        bootstrap_timeout: Duration::from_secs(30),
        request_timeout: Duration::from_secs(1000),
        transfer_patience: Duration::from_secs(120),
        peer_patience: Duration::from_secs(10),
    }
}

/// Tokens in a page of [`config`].
pub const PAGE: usize = 4;

/// The rule that sends pages of this shape in so many groups of layers.
///
/// # Panics
/// When the layers cannot be cut into so many groups.
#[must_use]
pub fn layer_groups(order: KvOrder, layers: u32, page_tokens: u32, groups: u32) -> LayerGroups {
    let shape = KvShape {
        pages: 1,
        heads: 1,
        layers: layers as usize,
        page_tokens: page_tokens as usize,
        head_dim: 1,
        value_dim: 1,
        dtype: Dtype::F32,
    };
    let made = LayerGroups::new(Wish::Groups(groups), &KvLayout::new(shape, order));
    made.unwrap_or_else(|error| panic!("{error}"))
}

/// A request for `count` tokens, each the likeliest, whatever is drawn.
#[must_use]
pub fn request(room: u64, prompt: &[u32], count: u32) -> Request {
    Request {
        room: Room(room),
        prompt: prompt.to_vec(),
        answered: 0,
        max_new_tokens: count,
        stop_tokens: Vec::new(),
        ignore_stop: true,
        sampling: Sampling::GREEDY,
        priority: 0,
        client: 0,
        prefill: None,
        namespace: NamespaceKey::default(),
        no_cache: false,
        scores: None,
        names: Vec::new(),
    }
}

/// A worker as a decode leg names it.
#[must_use]
pub fn peer(instance: Instance) -> Option<PeerRef> {
    Some(PeerRef { instance, address: String::new() })
}

/// A drawn token of which nothing more is known.
#[must_use]
pub fn sampled(token: u32) -> Sampled {
    Sampled { token, logprob: None, top: Vec::new() }
}

/// The results of a batch. `draw` gets a sequence that ends with the token to draw behind, and returns the next token.
pub fn outputs(batch: &Batch, mut draw: impl FnMut(&Sequence) -> u32) -> Vec<SequenceOutput> {
    let output = |sequence: &Sequence| {
        let (drawn, _none) = sequence.sampled(|before, _draw| {
            if sequence.draft().is_empty() {
                return Ok::<_, Infallible>(sampled(draw(sequence)));
            }
            let mut so_far = sequence.clone();
            so_far.tokens.truncate(sequence.tokens.len() - sequence.draft().len() + before);
            so_far.drafted = 0;
            Ok(sampled(draw(&so_far)))
        });
        let next = sequence.scored.iter().flat_map(|scored| &scored.next);
        let scored = next.map(|token| Sampled { logprob: Some(-1.0), ..sampled(*token) }).collect();
        SequenceOutput { room: sequence.room, sampled: drawn, undrawn: None, scored }
    };
    batch.sequences.iter().map(output).collect()
}

/// Names of the whole pages of a prompt on the worker of a [`config`].
#[must_use]
pub fn names(prompt: &[u32]) -> Vec<PageHash> {
    let mut request = request(0, prompt, 1);
    request.name(&PageHash([0; 32]), PAGE as u32);
    request.names
}
