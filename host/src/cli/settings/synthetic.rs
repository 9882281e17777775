//! The synthetic executor's settings, which the file alone has.

use std::path::PathBuf;

use serde::Deserialize;

/// `[synthetic]` of the configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct SyntheticSettings {
    /// Transformer layers, the sliding ones included.
    pub layers: Option<usize>,
    /// Sliding layers.
    pub sliding_layers: Option<usize>,
    /// Tokens in the window of sliding layers, the newest included.
    pub window: Option<usize>,
    /// Layers that keep a state of fixed size, as recurrent layers do. They do not go together with sliding layers.
    pub state_layers: usize,
    /// KV heads.
    pub kv_heads: Option<usize>,
    /// Elements of one head.
    pub head_dim: Option<usize>,
    /// Token ids are less than this.
    pub vocabulary: Option<usize>,
    /// Longest sequence.
    pub max_positions: Option<usize>,
    /// Microseconds per step.
    pub step_us: u64,
    /// Microseconds per prompt token.
    pub prefill_token_us: u64,
    /// Microseconds per sequence that decodes.
    pub sequence_us: u64,
    /// As long as this file is there, prompts are computed up to `hold_from` only.
    pub hold_file: Option<PathBuf>,
    /// Position of the first prompt token that is held.
    pub hold_from: u32,
}
