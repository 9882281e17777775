//! Holds prompts as long as a file exists.

use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use host_core::Batch;

/// Time between two checks of the file.
const PAUSE: Duration = Duration::from_millis(2);

/// Keeps prompts from being computed further than a position, as long as a file exists.
///
/// So an operator or a test can act while a request is certainly under way, for as long as it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// Prompts are held while this file exists.
    pub file: PathBuf,
    /// Position of the first prompt token that is held.
    pub from: u32,
}

impl Hold {
    /// Blocks before a batch that has prompt tokens from the position on. Sequences that compute one token are no prompts.
    #[expect(clippy::disallowed_methods, reason = "taking time is what this executor models")]
    pub(super) fn wait(&self, batch: &Batch) {
        while self.holds(batch) && self.file.exists() {
            sleep(PAUSE);
        }
    }

    fn holds(&self, batch: &Batch) -> bool {
        batch.sequences.iter().any(|sequence| {
            let end = u64::from(sequence.start) + sequence.tokens.len() as u64;
            sequence.tokens.len() - sequence.draft().len() > 1 && end > u64::from(self.from)
        })
    }
}

#[cfg(test)]
mod tests {
    use host_core::window::WindowPages;
    use host_core::{Room, Sequence};

    use super::*;

    #[test]
    fn prompts_are_held_from_the_position_on_and_decoding_is_not() {
        let hold = Hold { file: PathBuf::from("hold"), from: 32 };
        let batch = |start, count| {
            let sequence = Sequence {
                room: Room(1),
                tokens: vec![1; count],
                start,
                pages: Vec::new(),
                window: WindowPages::default(),
                recompute: 0..0,
                drafted: 0,
                sample: None,
                scored: None,
            };
            Batch { id: 1, sequences: vec![sequence], layer_group: 0 }
        };
        assert!(!hold.holds(&batch(16, 16)), "up to the position");
        assert!(hold.holds(&batch(16, 17)));
        assert!(hold.holds(&batch(48, 16)));
        assert!(!hold.holds(&batch(48, 1)), "a sequence that decodes");
    }
}
