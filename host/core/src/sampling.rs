//! How the next token of a request is drawn.
//!
//! Drawing keeps no state. A draw depends on earlier tokens only as a function of the prompt and of the answer so far. Both are
//! known wherever a request continues: after a hand-over, a preemption, or the death of a worker. So the request gets the same
//! tokens there.

/// A request's sampling settings. A draw depends on them, on the logits, on the tokens so far, and on its position.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token (the lowest id among equals).
    pub temperature: f32,
    /// Draw from the smallest set of likeliest tokens whose probabilities sum to this. In (0, 1].
    pub top_p: f32,
    /// Draw from this many likeliest tokens, or from all with 0.
    pub top_k: u32,
    /// Draw from tokens whose probability is at least this share of the likeliest token's, or from all with 0.
    pub min_p: f32,
    /// Randomness of the request.
    pub seed: u64,
    /// `Some(n)`: report the sampled token's log probability and those of the n likeliest.
    pub logprobs: Option<u8>,
    /// Changes of the logits before the draw, or `None` without any.
    pub shaping: Option<Box<Shaping>>,
}

impl Sampling {
    /// Always the likeliest token.
    pub const GREEDY: Self =
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0, logprobs: None, shaping: None };
}

/// Changes of a request's logits before a token is drawn from them.
#[derive(Clone, Debug, PartialEq)]
pub struct Shaping {
    /// Subtracted from the logits of tokens that the answer has.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens that the answer has, once for each time.
    pub frequency_penalty: f32,
    /// Divides positive logits of tokens that the prompt or the answer has, and multiplies negative ones. 1 changes nothing.
    pub repetition_penalty: f32,
    /// Tokens of the answer before which no token of `end_tokens` is drawn.
    pub min_tokens: u32,
    /// Tokens that end the answer. Empty unless `min_tokens` is more than 0.
    pub end_tokens: Vec<u32>,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// The only tokens that are drawn, or all tokens when this is empty.
    pub allowed_tokens: Vec<u32>,
    /// Forbidden sequences: the last token of a sequence is not drawn behind the others.
    pub bad_words: Vec<Vec<u32>>,
}

impl Default for Shaping {
    /// Changes nothing.
    fn default() -> Self {
        Self {
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            min_tokens: 0,
            end_tokens: Vec::new(),
            logit_bias: Vec::new(),
            allowed_tokens: Vec::new(),
            bad_words: Vec::new(),
        }
    }
}

impl Shaping {
    /// Whether the changes depend on the tokens of the prompt.
    #[must_use]
    pub fn reads_prompt(&self) -> bool {
        self.repetition_penalty != 1.0
    }

    /// Whether all numbers are finite, and the repetition penalty is positive.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let finite = [self.presence_penalty, self.frequency_penalty, self.repetition_penalty];
        let mut numbers = finite.into_iter().chain(self.logit_bias.iter().map(|(_, bias)| *bias));
        numbers.all(f32::is_finite) && self.repetition_penalty > 0.0
    }
}

/// One draw: the settings, and the tokens that they depend on.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// The settings.
    pub sampling: Sampling,
    /// Tokens of the prompt, if the settings depend on them.
    pub prompt: Vec<u32>,
    /// Tokens of the answer so far, if the settings change logits.
    pub output: Vec<u32>,
}

impl From<Sampling> for Draw {
    /// The first draw behind an empty prompt, or one that depends on no token.
    fn from(sampling: Sampling) -> Self {
        Self { sampling, prompt: Vec::new(), output: Vec::new() }
    }
}

impl Draw {
    /// The next draw of a request that has drawn `output` here. The last `answered` tokens of its prompt are part of the answer.
    #[must_use]
    pub fn next(sampling: &Sampling, prompt: &[u32], answered: u32, output: &[u32]) -> Self {
        let mut draw = Self::from(sampling.clone());
        let Some(shaping) = &sampling.shaping else { return draw };
        let answered = (answered as usize).min(prompt.len());
        let (prompt, earlier) = prompt.split_at(prompt.len() - answered);
        draw.output = [earlier, output].concat();
        if shaping.reads_prompt() {
            draw.prompt = prompt.to_vec();
        }
        draw
    }

    /// Becomes the draw behind this one, which drew `token`.
    pub fn goes_on(&mut self, token: u32) {
        if self.sampling.shaping.is_some() {
            self.output.push(token);
        }
    }
}
