//! Thoughts before an answer, which some models write between `<think>` and `</think>`.

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
    held: String,
}

/// A piece of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Split {
    /// Text of the thoughts.
    pub thoughts: String,
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
        Self { stage, held: String::new() }
    }

    /// Whether the answer, or the white space before it, has begun.
    #[must_use]
    pub fn are_over(&self) -> bool {
        matches!(self.stage, Stage::Behind | Stage::Answer)
    }

    /// Takes more text.
    pub fn push(&mut self, text: &str) -> Split {
        let mut split = Split::default();
        self.held.push_str(text);
        loop {
            match self.stage {
                Stage::Start => {
                    let begin = self.held.trim_start();
                    if let Some(rest) = begin.strip_prefix(OPEN) {
                        (self.held, self.stage) = (rest.to_owned(), Stage::Inside);
                    } else if OPEN.starts_with(begin) {
                        return split;
                    } else {
                        self.stage = Stage::Answer;
                    }
                }
                Stage::Inside => {
                    if let Some(at) = self.held.find(CLOSE) {
                        split.thoughts.push_str(self.held[..at].trim_end());
                        (self.held, self.stage) = (self.held[at + CLOSE.len()..].to_owned(), Stage::Behind);
                        continue;
                    }
                    let held = (1..CLOSE.len()).rev().find(|length| self.held.ends_with(&CLOSE[..*length]));
                    let known = self.held[..self.held.len() - held.unwrap_or(0)].trim_end().len();
                    let rest = self.held.split_off(known);
                    split.thoughts.push_str(&std::mem::replace(&mut self.held, rest));
                    return split;
                }
                Stage::Behind => {
                    let rest = self.held.trim_start().to_owned();
                    if rest.is_empty() {
                        self.held.clear();
                        return split;
                    }
                    (self.held, self.stage) = (rest, Stage::Answer);
                }
                Stage::Answer => {
                    split.text.push_str(&std::mem::take(&mut self.held));
                    return split;
                }
            }
        }
    }

    /// Returns the held text, at the end of the answer.
    pub fn finish(&mut self) -> Split {
        let held = std::mem::take(&mut self.held);
        match self.stage {
            Stage::Inside => Split { thoughts: held.trim_end().to_owned(), text: String::new() },
            Stage::Behind => Split::default(),
            Stage::Start | Stage::Answer => Split { thoughts: String::new(), text: held },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(prompt: &str, pieces: &[&str]) -> (String, String) {
        let mut thoughts = Thoughts::after(prompt);
        let mut parts: Vec<Split> = pieces.iter().map(|piece| thoughts.push(piece)).collect();
        parts.push(thoughts.finish());
        let join = |of: fn(&Split) -> &str| parts.iter().map(of).collect::<String>();
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
}
