//! A case, and the text by which it can be run again.

use std::collections::BTreeSet;
use std::fmt::{self, Display};
use std::str::FromStr;

/// A seed, and the requests and mishaps that are kept of everything it draws.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// Draws cluster, requests and mishaps.
    pub seed: u64,
    /// The numbers of the requests that are sent, or `None` for all of them.
    pub requests: Option<BTreeSet<u64>>,
    /// The numbers of the mishaps that strike, or `None` for all of them.
    pub mishaps: Option<BTreeSet<u64>>,
}

impl Case {
    /// The case of everything that a seed draws.
    #[must_use]
    pub fn of(seed: u64) -> Self {
        Self { seed, requests: None, mishaps: None }
    }
}

impl Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.seed)?;
        for (name, numbers) in [("requests", &self.requests), ("mishaps", &self.mishaps)] {
            if let Some(numbers) = numbers {
                let list: Vec<String> = numbers.iter().map(u64::to_string).collect();
                write!(f, " {name} {}", if list.is_empty() { "none".to_owned() } else { list.join(",") })?;
            }
        }
        Ok(())
    }
}

/// A text that is not a case.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no case: give a seed, or a seed and what is left of it, as in \"7 requests 0,3 mishaps 12,40\""
)]
pub struct NoCase(String);

impl FromStr for Case {
    type Err = NoCase;

    fn from_str(text: &str) -> Result<Self, NoCase> {
        let wrong = || NoCase(text.to_owned());
        let mut words = text.split_whitespace();
        let seed = words.next().and_then(|seed| seed.parse().ok()).ok_or_else(wrong)?;
        let mut case = Case::of(seed);
        while let Some(name) = words.next() {
            let list = words.next().ok_or_else(wrong)?;
            let numbers = match list {
                "none" => BTreeSet::new(),
                list => {
                    list.split(',').map(str::parse).collect::<Result<_, _>>().map_err(|_number| wrong())?
                }
            };
            match name {
                "requests" => case.requests = Some(numbers),
                "mishaps" => case.mishaps = Some(numbers),
                _ => return Err(wrong()),
            }
        }
        Ok(case)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_read_as_it_is_written() {
        let all = Case::of(7);
        let some = Case { requests: Some([0, 3].into()), mishaps: Some(BTreeSet::new()), ..Case::of(9) };
        for (case, text) in [(all, "7"), (some, "9 requests 0,3 mishaps none")] {
            assert_eq!(case.to_string(), text);
            assert_eq!(text.parse(), Ok(case));
        }
        for text in ["", "x", "7 requests", "7 faults 1", "7 mishaps 1,,2"] {
            assert!(text.parse::<Case>().is_err(), "{text:?}");
        }
    }
}
