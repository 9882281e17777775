//! Applies a request's settings to logits before a token is drawn from them.
//!
//! The order and the formulas are those of vLLM (`vllm/v1/sample/sampler.py` and `vllm/model_executor/layers/utils.py`): allowed
//! tokens, bad words, `min_tokens`, bias, and then the penalties of repetition, frequency and presence. So a bias can change the
//! sign of a logit, and with it the rule by which a repeated token is penalised. A grammar's mask is applied before all of these,
//! and before log probabilities are taken. If allowed tokens, bad words and `min_tokens` leave none of the tokens that a grammar
//! allows, they are ignored for this draw: the grammar has precedence.
//!
//! | Setting | What becomes of a logit x |
//! | --- | --- |
//! | `allowed_tokens` | -inf, unless the token is among them |
//! | `bad_words` | -inf, if the token would end one of them |
//! | `min_tokens` | -inf, if the token ends answers and the answer has fewer tokens |
//! | `logit_bias` | x + bias |
//! | `repetition_penalty` r | x / r if x > 0, else x * r, if the prompt or the answer has the token |
//! | `frequency_penalty` f | x - f * (how often the answer has the token) |
//! | `presence_penalty` p | x - p, if the answer has the token |

use host_core::{Draw, Shaping};

/// Applies the settings of a draw to a row of logits. Token ids beyond the row are ignored.
pub fn shape(logits: &mut [f32], shaping: &Shaping, draw: &Draw) {
    let is_short = draw.output.len() < shaping.min_tokens as usize;
    let bans = is_short || !(shaping.allowed_tokens.is_empty() && shaping.bad_words.is_empty());
    let before = bans.then(|| logits.to_vec());
    ban_and_allow(logits, shaping, draw);
    if let Some(before) = before
        && logits.iter().all(|logit| *logit == f32::NEG_INFINITY)
    {
        logits.copy_from_slice(&before);
    }
    for (token, bias) in &shaping.logit_bias {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit += bias;
        }
    }
    penalize(logits, shaping, draw);
}

fn ban_and_allow(logits: &mut [f32], shaping: &Shaping, draw: &Draw) {
    if !shaping.allowed_tokens.is_empty() {
        allow(logits, &shaping.allowed_tokens);
    }
    for word in &shaping.bad_words {
        let Some((last, before)) = word.split_last() else { continue };
        if draw.output.ends_with(before) {
            ban(logits, *last);
        }
    }
    if draw.output.len() < shaping.min_tokens as usize {
        shaping.end_tokens.iter().for_each(|token| ban(logits, *token));
    }
}

fn ban(logits: &mut [f32], token: u32) {
    if let Some(logit) = logits.get_mut(token as usize) {
        *logit = f32::NEG_INFINITY;
    }
}

fn allow(logits: &mut [f32], tokens: &[u32]) {
    let kept: Vec<(usize, f32)> =
        tokens.iter().filter_map(|token| Some((*token as usize, *logits.get(*token as usize)?))).collect();
    logits.fill(f32::NEG_INFINITY);
    kept.into_iter().for_each(|(token, logit)| logits[token] = logit);
}

/// Applies the penalties. The time grows with the tokens so far, because nothing is kept from one draw to the next.
fn penalize(logits: &mut [f32], shaping: &Shaping, draw: &Draw) {
    let Shaping { presence_penalty, frequency_penalty, repetition_penalty, .. } = *shaping;
    if presence_penalty == 0.0 && frequency_penalty == 0.0 && !shaping.reads_prompt() {
        return;
    }
    let answer = sorted(&draw.output);
    if shaping.reads_prompt() {
        let mut seen = sorted(&draw.prompt);
        seen.extend_from_slice(&answer);
        seen.sort_unstable();
        seen.dedup();
        for token in seen {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
        }
    }
    for same in answer.chunk_by(|one, other| one == other) {
        let Some(logit) = logits.get_mut(same[0] as usize) else { continue };
        *logit -= frequency_penalty * same.len() as f32;
        *logit -= presence_penalty;
    }
}

/// These tokens in order. There are far fewer than the vocabulary has.
fn sorted(tokens: &[u32]) -> Vec<u32> {
    let mut sorted = tokens.to_vec();
    sorted.sort_unstable();
    sorted
}

#[cfg(test)]
mod tests {
    use host_core::Sampling;

    use super::*;

    const NONE: f32 = f32::NEG_INFINITY;

    fn shaped(logits: &[f32], shaping: &Shaping, prompt: &[u32], output: &[u32]) -> Vec<f32> {
        let draw = Draw { sampling: Sampling::GREEDY, prompt: prompt.to_vec(), output: output.to_vec() };
        let mut logits = logits.to_vec();
        shape(&mut logits, shaping, &draw);
        logits
    }

    #[test]
    fn each_setting_does_what_its_formula_says() {
        let none = Shaping::default;
        let row = [2.0, -2.0, 4.0, 0.0];
        for (name, shaping, prompt, output, expected) in [
            ("nothing", none(), &[0][..], &[1][..], row),
            (
                "repetition counts prompt and answer, each token once",
                Shaping { repetition_penalty: 2.0, ..none() },
                &[0, 3, 0],
                &[1, 1],
                [1.0, -4.0, 4.0, 0.0],
            ),
            (
                "frequency counts each time in the answer",
                Shaping { frequency_penalty: 0.5, ..none() },
                &[0],
                &[2, 2, 1],
                [2.0, -2.5, 3.0, 0.0],
            ),
            (
                "presence counts a token of the answer once",
                Shaping { presence_penalty: -1.5, ..none() },
                &[0],
                &[2, 2, 1],
                [2.0, -0.5, 5.5, 0.0],
            ),
            (
                "a bias comes before the penalty that looks at the sign",
                Shaping { repetition_penalty: 2.0, logit_bias: vec![(1, 6.0), (9, 1.0)], ..none() },
                &[1],
                &[],
                [2.0, 2.0, 4.0, 0.0],
            ),
            (
                "all others are not drawn",
                Shaping { allowed_tokens: vec![3, 1, 77], ..none() },
                &[],
                &[],
                [NONE, -2.0, NONE, 0.0],
            ),
            (
                "a bias does not bring back what is not allowed",
                Shaping { allowed_tokens: vec![3], logit_bias: vec![(0, 100.0)], ..none() },
                &[],
                &[],
                [NONE, NONE, NONE, 0.0],
            ),
            (
                "a word of one token is never drawn, one of two only behind its first",
                Shaping { bad_words: vec![vec![0], vec![3, 1], vec![2, 2]], ..none() },
                &[2],
                &[3],
                [NONE, NONE, 4.0, 0.0],
            ),
            (
                "ends are held back while the answer is short",
                Shaping { min_tokens: 2, end_tokens: vec![2], ..none() },
                &[0, 0],
                &[1],
                [2.0, -2.0, NONE, 0.0],
            ),
            (
                "and are not when it is long enough",
                Shaping { min_tokens: 1, end_tokens: vec![2], ..none() },
                &[],
                &[1],
                row,
            ),
        ] {
            assert_eq!(shaped(&row, &shaping, prompt, output), expected, "{name}");
        }
    }

    #[test]
    fn settings_that_leave_no_token_of_a_grammar_do_not_hold() {
        let none = Shaping::default;
        // The grammar allows only the end of the answer.
        let row = [NONE, NONE, 4.0, NONE];
        for shaping in [
            Shaping { min_tokens: 9, end_tokens: vec![2], ..none() },
            Shaping { allowed_tokens: vec![0, 1], ..none() },
            Shaping { bad_words: vec![vec![2]], ..none() },
        ] {
            assert_eq!(shaped(&row, &shaping, &[], &[1]), row, "{shaping:?}");
        }
    }

    #[test]
    fn tokens_beyond_the_row_are_ignored() {
        let shaping = Shaping {
            repetition_penalty: 2.0,
            frequency_penalty: 1.0,
            bad_words: vec![vec![50], vec![]],
            min_tokens: 9,
            end_tokens: vec![60],
            ..Shaping::default()
        };
        assert_eq!(shaped(&[1.0], &shaping, &[70], &[80]), [1.0]);
    }
}
