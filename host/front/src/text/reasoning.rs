//! Thoughts before an answer, which some models write between `<think>` and `</think>`.

use super::held::{Held, Marker};

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Thoughts may begin.
    Start,
    Inside,
    /// Between the thoughts and the answer: white space here belongs to neither.
    Behind,
    Answer,
}

/// Splits an answer's text into thoughts and the rest. The pieces may be cut anywhere.
#[derive(Clone, Debug)]
pub struct Thoughts {
    stage: Stage,
    held: Held,
}

/// A piece of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Split {
    /// Text of the thoughts.
    pub thoughts: String,
    /// The same as the model wrote it: with its marks, and with the white space that belongs to neither.
    pub written: String,
    /// Text of the answer.
    pub text: String,
}

/// Whether a prompt ends within thoughts.
#[must_use]
pub fn opens_thoughts(prompt: &str) -> bool {
    prompt.trim_end().ends_with(OPEN)
}

/// Whether a prompt ends after thoughts, so that none follow.
#[must_use]
pub fn closes_thoughts(prompt: &str) -> bool {
    prompt.trim_end().ends_with(CLOSE)
}

impl Thoughts {
    /// Splits the answer to this prompt.
    #[must_use]
    pub fn after(prompt: &str) -> Self {
        let stage = match (opens_thoughts(prompt), closes_thoughts(prompt)) {
            (true, _) => Stage::Inside,
            (_, true) => Stage::Answer,
            _ => Stage::Start,
        };
        Self { stage, held: Held::default() }
    }

    /// Whether the answer, or the white space before it, has begun.
    #[must_use]
    pub fn are_over(&self) -> bool {
        matches!(self.stage, Stage::Behind | Stage::Answer)
    }

    /// Takes more text.
    pub fn push(&mut self, text: &str) -> Split {
        let mut split = Split::default();
        self.held.push(text);
        loop {
            match self.stage {
                Stage::Start => {
                    let begin = self.held.skip_space();
                    let is_open = begin.starts_with(OPEN);
                    if !is_open && OPEN.starts_with(begin) {
                        return split;
                    }
                    if is_open {
                        self.held.advance(OPEN.len());
                        split.written.push_str(&self.held.take_seen());
                        self.stage = Stage::Inside;
                    } else {
                        self.held.rewind();
                        self.stage = Stage::Answer;
                    }
                }
                Stage::Inside => {
                    let (thoughts, marker) = self.held.take_until(&[CLOSE]);
                    split.thoughts.push_str(&thoughts);
                    split.written.push_str(&thoughts);
                    let Some(Marker { space, marker }) = marker else { return split };
                    split.written.push_str(&space);
                    split.written.push_str(marker);
                    self.held.drop(CLOSE.len());
                    self.stage = Stage::Behind;
                }
                Stage::Behind => {
                    let is_over = !self.held.skip_space().is_empty();
                    split.written.push_str(&self.held.take_seen());
                    if !is_over {
                        return split;
                    }
                    self.stage = Stage::Answer;
                }
                Stage::Answer => {
                    split.text.push_str(&self.held.take());
                    return split;
                }
            }
        }
    }

    /// Returns the held text, at the end of the answer.
    pub fn finish(&mut self) -> Split {
        let held = self.held.take();
        match self.stage {
            Stage::Inside => {
                Split { thoughts: held.trim_end().to_owned(), written: held, ..Split::default() }
            }
            Stage::Behind => Split { written: held, ..Split::default() },
            Stage::Start | Stage::Answer => Split { text: held, ..Split::default() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::work::steps;

    fn split(prompt: &str, pieces: &[&str]) -> (String, String) {
        let mut thoughts = Thoughts::after(prompt);
        let mut parts: Vec<Split> = pieces.iter().map(|piece| thoughts.push(piece)).collect();
        parts.push(thoughts.finish());
        let join = |of: fn(&Split) -> &str| parts.iter().map(of).collect::<String>();
        assert_eq!(join(|split| &split.written) + &join(|split| &split.text), pieces.concat());
        (join(|split| &split.thoughts), join(|split| &split.text))
    }

    #[test]
    fn thoughts_are_split_off_wherever_the_pieces_are_cut() {
        for (prompt, answer, thoughts, text) in [
            ("x", "<think>\nso < 1 </thin\n</think>\n\nYes <b>", "\nso < 1 </thin", "Yes <b>"),
            ("x<think>\n", "so</think>Yes", "so", "Yes"),
            ("x<think>\n\n</think>\n\n", "<think>Yes", "", "<think>Yes"),
            ("x", "Yes <think>no</think>", "", "Yes <think>no</think>"),
            ("x", "<think>cut off ", "cut off", ""),
            ("x", " <thi", "", " <thi"),
            ("x", "", "", ""),
        ] {
            for cut in (0..=answer.len()).filter(|cut| answer.is_char_boundary(*cut)) {
                let (first, second) = answer.split_at(cut);
                assert_eq!(
                    split(prompt, &[first, second]),
                    (thoughts.into(), text.into()),
                    "{answer:?} at {cut}"
                );
            }
            let letters: Vec<&str> = answer.split("").collect();
            assert_eq!(split(prompt, &letters), (thoughts.into(), text.into()), "{answer:?}");
        }
    }

    #[test]
    fn each_letter_is_looked_at_few_times() {
        for (prompt, before, unit) in [
            ("x", "", " "),
            ("x", "<think>", " "),
            ("x", "<think>so", " \n"),
            ("x", "<think>so", " </thin"),
            ("x", "<think>so", "<"),
            ("x", "<think>so</think>", " "),
            ("x", "<think>so</think>yes", " "),
        ] {
            let answer = before.to_owned() + &unit.repeat(20_000 / unit.len());
            let pieces: Vec<&str> = answer.split("").collect();
            let (taken, _) = steps(|| split(prompt, &pieces));
            assert!(taken <= 8 * answer.len(), "{before}{unit}: {taken} steps for {} bytes", answer.len());
        }
    }

    #[test]
    fn any_answer_is_split_the_same_wherever_it_is_cut() {
        const PIECES: [&str; 9] = ["<think>", "</think>", "</thi", " ", "\n\n  ", "\u{3000}", "<", "so", "é"];
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        for _ in 0..10_000 {
            let answer: String = (0..random.usize(1..10)).map(|_| *random.choice(&PIECES).unwrap()).collect();
            let prompt = *random.choice(&["x", "x<think>\n", "x</think>"]).unwrap();
            let whole = split(prompt, &[&answer]);
            let letters: Vec<&str> = answer.split("").collect();
            assert_eq!(split(prompt, &letters), whole, "{prompt} {answer:?}");
            let cut = answer.floor_char_boundary(random.usize(0..=answer.len()));
            assert_eq!(
                split(prompt, &[&answer[..cut], &answer[cut..]]),
                whole,
                "{prompt} {answer:?} at {cut}"
            );
        }
    }
}
