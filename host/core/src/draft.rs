//! Drafts: guesses at an answer's next tokens, which one step verifies together.
//!
//! An answer often repeats earlier text: it quotes its prompt, edits code, fills a table. So the tokens that followed an earlier
//! occurrence of the last tokens are a good guess at the next ones. A step computes a draft behind the last known token and draws a
//! token behind each drafted one. A draw is valid as long as all drafted tokens before it equal the drawn ones. A wrong guess costs
//! its part of the step and changes no token.
//!
//! ```text
//! tokens   … the quick brown fox … the quick brown        known
//!                ^ newest place with the same last tokens
//! draft                                            fox …   computed in the same step
//! ```
//!
//! A request drafts from its own tokens alone, so the speed of a request reveals nothing about the text of another one.

use std::collections::BTreeMap;

/// Fewest tokens that must match an earlier place before a guess is made. The index has keys of this length.
const KEY: usize = 2;
/// Most tokens that must match, after repeated wrong guesses.
const MOST_ALIKE: usize = 24;
/// Additional tokens that must match after a guess without any right token.
const STRICTER: usize = 3;
/// Earlier places that are looked at for one guess, newest first.
const PLACES: usize = 8;
/// Tokens of a request's first guess.
const FIRST_LENGTH: usize = 4;

/// Makes the guesses of one request, and adapts to how many of them were right.
#[derive(Debug)]
pub(crate) struct Drafter {
    /// The newest place of each pair of tokens that follow one another: the position behind them.
    newest: BTreeMap<[u32; KEY], u32>,
    /// For each position from `KEY` on, the next older place of the tokens before it, or 0.
    older: Vec<u32>,
    /// Tokens that must match an earlier place.
    alike: usize,
    /// Tokens of the next guess.
    length: usize,
}

impl Default for Drafter {
    fn default() -> Self {
        Self { newest: BTreeMap::new(), older: Vec::new(), alike: KEY, length: FIRST_LENGTH }
    }
}

impl Drafter {
    /// Guesses at most `most` tokens behind `known` ones. `at` gives the token at a position below `known`. At most `unindexed`
    /// tokens are added to the index, and their number is subtracted from `unindexed`.
    pub(crate) fn guess(
        &mut self,
        known: usize,
        most: usize,
        at: impl Fn(usize) -> u32,
        unindexed: &mut usize,
    ) -> Vec<u32> {
        self.index(known, &at, unindexed);
        let most = most.min(self.length);
        let mut draft = Vec::new();
        if most == 0 {
            return draft;
        }
        let Some(place) = self.place(known, &at) else { return draft };
        // A guess may run past `known`: from there on it repeats its own tokens.
        for position in place..place + most {
            let token = position.checked_sub(known).map_or_else(|| at(position), |guessed| draft[guessed]);
            draft.push(token);
        }
        draft
    }

    /// Adapts to how many tokens of a guess were right.
    pub(crate) fn learn(&mut self, guessed: usize, right: usize, most: usize) {
        match right {
            0 => {
                self.alike = (self.alike + STRICTER).min(MOST_ALIKE);
                self.length = (self.length / 2).max(1);
            }
            _ if right == guessed => {
                self.alike = (self.alike - 1).max(KEY);
                self.length = (self.length * 2).min(most.max(1));
            }
            _ => self.length = right + 1,
        }
    }

    /// Adds to the index the tokens that have become known since the last call.
    fn index(&mut self, known: usize, at: &impl Fn(usize) -> u32, unindexed: &mut usize) {
        let first = KEY + self.older.len();
        for place in (first..=known).take(*unindexed) {
            let Ok(behind) = u32::try_from(place) else { return };
            *unindexed -= 1;
            let older = self.newest.insert(std::array::from_fn(|token| at(place - KEY + token)), behind);
            self.older.push(older.unwrap_or(0));
        }
    }

    /// The earlier place with the most tokens in front of it that match the last known ones, and the newest of equal
    /// places. `None` if fewer than `alike` tokens match.
    fn place(&self, known: usize, at: &impl Fn(usize) -> u32) -> Option<usize> {
        let first = known.checked_sub(KEY)?;
        let newest = self.newest.get(&std::array::from_fn(|token| at(first + token)))?;
        let older = |place: &u32| Some(self.older[*place as usize - KEY]).filter(|older| *older > 0);
        let places = std::iter::successors(Some(*newest), older).map(|place| place as usize);
        let alike = |place: usize| {
            let same = |before: &usize| at(place - before) == at(known - before);
            (KEY + 1..=place.min(MOST_ALIKE)).take_while(same).count() + KEY
        };
        let earlier = places.filter(|place| *place < known).take(PLACES);
        let best = earlier.map(|place| (alike(place), place)).max()?;
        (best.0 >= self.alike).then_some(best.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guess(drafter: &mut Drafter, tokens: &[u32], most: usize) -> Vec<u32> {
        drafter.guess(tokens.len(), most, |position| tokens[position], &mut 4_096)
    }

    #[test]
    fn what_followed_the_last_tokens_follows_them_again() {
        let tokens = [1, 2, 3, 4, 5, 6, 7, 9, 1, 2];
        assert_eq!(guess(&mut Drafter::default(), &tokens, 9), [3, 4, 5, 6]);
        assert_eq!(guess(&mut Drafter::default(), &tokens, 2), [3, 4]);
        assert_eq!(guess(&mut Drafter::default(), &tokens, 0), []);
        assert_eq!(guess(&mut Drafter::default(), &tokens[1..], 9), [], "one token alike is too few");
        for short in 0..=KEY {
            assert_eq!(guess(&mut Drafter::default(), &tokens[..short], 9), []);
        }
    }

    #[test]
    fn a_guess_goes_on_with_what_it_guessed() {
        assert_eq!(guess(&mut Drafter::default(), &[7, 8, 7, 8, 7, 8], 9), [7, 8, 7, 8]);
        assert_eq!(guess(&mut Drafter::default(), &[5; 6], 9), [5; 4]);
    }

    #[test]
    fn the_place_with_most_tokens_alike_is_taken_and_of_equal_ones_the_newest() {
        let longest = [8, 1, 2, 3, 4, 50, 9, 1, 2, 3, 4, 60, 8, 1, 2, 3, 4];
        assert_eq!(guess(&mut Drafter::default(), &longest, 1), [50]);
        let newest = [8, 1, 2, 3, 4, 50, 9, 1, 2, 3, 4, 60, 7, 1, 2, 3, 4];
        assert_eq!(guess(&mut Drafter::default(), &newest, 1), [60]);
    }

    #[test]
    fn wrong_guesses_make_it_cautious_and_right_ones_bold() {
        let (mut drafter, most) = (Drafter::default(), 16);
        let mut lengths = Vec::new();
        for (guessed, right) in [(4, 4), (8, 8), (16, 16), (16, 3), (4, 0), (2, 0), (1, 0), (1, 1), (2, 1)] {
            drafter.learn(guessed, right, most);
            lengths.push((drafter.length, drafter.alike));
        }
        let expected = [(8, 2), (16, 2), (16, 2), (4, 2), (2, 5), (1, 8), (1, 11), (2, 10), (2, 10)];
        assert_eq!(lengths, expected);
        for _ in 0..20 {
            drafter.learn(1, 0, most);
        }
        assert_eq!((drafter.length, drafter.alike), (1, MOST_ALIKE), "and it never gives up for good");
    }

    #[test]
    fn a_long_prompt_is_indexed_in_parts() {
        let tokens: Vec<u32> = (0..20_000).chain(9_000..9_010).collect();
        let mut drafter = Drafter::default();
        let guesses: Vec<_> = (0..6).map(|_step| guess(&mut drafter, &tokens, 4)).collect();
        assert_eq!(guesses[0], [], "not that far yet");
        assert_eq!(guesses[5], [9_010, 9_011, 9_012, 9_013]);
        let mut unindexed = 30;
        let at = |position: usize| tokens[position];
        assert_eq!(Drafter::default().guess(20, 4, at, &mut unindexed), []);
        assert_eq!(unindexed, 30 - 19, "what one request takes is not there for the next");
    }
}
