//! Decides which mishaps strike. Each has a number, so that a run can be repeated with some of them only.

use std::collections::BTreeSet;

use host_core::Time;

use super::{Clients, World};

/// Something that went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mishap {
    /// Its number among all mishaps that were drawn, from 0.
    pub number: u64,
    /// When.
    pub at: Time,
    /// What happened, as a clause.
    pub what: String,
}

/// The mishaps that were drawn so far.
#[derive(Debug, Default)]
pub(super) struct Mishaps {
    drawn: u64,
    only: Option<BTreeSet<u64>>,
    struck: Option<Vec<Mishap>>,
}

impl<C: Clients> World<C> {
    /// Lets only the mishaps with these numbers strike. The draws stay the same, as long as the run does.
    pub fn only_mishaps(&mut self, numbers: BTreeSet<u64>) {
        self.mishaps.only = Some(numbers);
    }

    /// Records from now on which mishaps strike.
    pub fn keep_mishaps(&mut self) {
        self.mishaps.struck.get_or_insert_default();
    }

    /// The mishaps that have struck since recording began.
    #[must_use]
    pub fn mishaps(&self) -> &[Mishap] {
        self.mishaps.struck.as_deref().unwrap_or_default()
    }

    /// Whether a mishap of this probability strikes.
    pub(super) fn strikes(&mut self, probability: f64, what: impl FnOnce() -> String) -> bool {
        let now = self.agenda.now();
        if !self.random.chance(probability) || self.faults.until.is_some_and(|until| now >= until) {
            return false;
        }
        let number = self.mishaps.drawn;
        self.mishaps.drawn += 1;
        if self.mishaps.only.as_ref().is_some_and(|only| !only.contains(&number)) {
            return false;
        }
        if let Some(struck) = &mut self.mishaps.struck {
            struck.push(Mishap { number, at: now, what: what() });
        }
        true
    }
}
