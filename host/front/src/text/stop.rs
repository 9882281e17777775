//! Stop strings: the answer ends before the first of them that is complete, wherever token borders lie.

use std::sync::Arc;

use super::work::looked_at;

/// The stop strings of a request, prepared for the search. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Stops(Arc<[Stop]>);

/// A stop string.
#[derive(Debug)]
struct Stop {
    text: String,
    /// For each beginning of `text`, by its last byte: the length of the longest shorter beginning that it ends with.
    borders: Vec<u32>,
}

impl Stop {
    fn new(text: String) -> Self {
        let mut stop = Self { borders: vec![0; text.len().min(1)], text };
        let mut border = 0;
        for &byte in stop.text.as_bytes().iter().skip(1) {
            border = stop.after(border, byte);
            stop.borders.push(border);
        }
        stop
    }

    /// The length of the longest beginning that the read text ends with, after one more byte. `begun`: this length before the byte,
    /// less than all of the stop string. This is the search of Knuth, Morris and Pratt: a byte takes two steps on average.
    fn after(&self, mut begun: u32, byte: u8) -> u32 {
        loop {
            looked_at(1);
            if self.text.as_bytes()[begun as usize] == byte {
                return begun + 1;
            }
            if begun == 0 {
                return 0;
            }
            begun = self.borders[begun as usize - 1];
        }
    }
}

impl From<Vec<String>> for Stops {
    /// Prepares these strings. Empty strings are ignored.
    fn from(stops: Vec<String>) -> Self {
        Self(stops.into_iter().filter(|stop| !stop.is_empty()).map(Stop::new).collect())
    }
}

impl Stops {
    /// Bytes in memory.
    #[must_use]
    pub fn memory(&self) -> usize {
        let bytes = |stop: &Stop| size_of_val(stop) + stop.text.len() + size_of_val(&stop.borders[..]);
        self.0.iter().map(bytes).sum()
    }
}

/// Watches an answer's text for stop strings, and holds back text that may begin one.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Stops,
    /// For each stop string: the length of the longest beginning that the read text ends with.
    begun: Vec<u32>,
    /// The end of the read text: as much as the longest of `begun`.
    held: String,
    /// The index of the stop string that was seen.
    matched: Option<usize>,
    /// Whether the stop string is part of the shown text.
    shows: bool,
}

impl StopMatcher {
    /// Watches for these strings.
    #[must_use]
    pub fn new(stops: impl Into<Stops>) -> Self {
        let stops = stops.into();
        let begun = vec![0; stops.0.len()];
        Self { stops, begun, held: String::new(), matched: None, shows: false }
    }

    /// Sets whether the stop string at which the answer ends is shown.
    #[must_use]
    pub fn showing(self, shows: bool) -> Self {
        Self { shows, ..self }
    }

    /// True once a stop string was seen. The text after it is dropped.
    #[must_use]
    pub fn stopped(&self) -> bool {
        self.matched.is_some()
    }

    /// The stop string that was seen.
    #[must_use]
    pub fn matched(&self) -> Option<&str> {
        Some(self.stops.0.get(self.matched?)?.text.as_str())
    }

    /// Takes more text and returns the text that is safe to show.
    pub fn push(&mut self, text: &str) -> String {
        if self.stopped() {
            return String::new();
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (at, byte) in text.bytes().enumerate() {
            if let Some(index) = self.read(byte) {
                let end = before + at + 1;
                let stop = self.stops.0[index].text.len();
                self.matched = Some(index);
                self.held.truncate(if self.shows { end } else { end - stop });
                return std::mem::take(&mut self.held);
            }
        }
        self.safe()
    }

    /// Takes text within which no stop string ends the answer. One that begins in it may end behind it. Returns the text that is safe to
    /// show.
    pub fn pass(&mut self, text: &str) -> String {
        if self.stopped() {
            return String::new();
        }
        self.held.push_str(text);
        for byte in text.bytes() {
            if self.read(byte).is_some() {
                for (stop, begun) in self.stops.0.iter().zip(&mut self.begun) {
                    if *begun as usize == stop.text.len() {
                        *begun = stop.borders[*begun as usize - 1];
                    }
                }
            }
        }
        self.safe()
    }

    /// The held text that begins no stop string.
    fn safe(&mut self) -> String {
        let keep = self.begun.iter().max().map_or(0, |begun| *begun as usize);
        self.held.drain(..self.held.len() - keep).collect()
    }

    /// Reads one byte. Returns the index of the stop string that is complete.
    ///
    /// This is the stop string that ends first, so that the result does not depend on where the pieces are cut. Of stop strings that
    /// end together, it is the longest, and of equal ones the first.
    fn read(&mut self, byte: u8) -> Option<usize> {
        let mut complete: Option<usize> = None;
        for (index, (stop, begun)) in self.stops.0.iter().zip(&mut self.begun).enumerate() {
            *begun = stop.after(*begun, byte);
            let is_complete = *begun as usize == stop.text.len();
            if is_complete && complete.is_none_or(|other| stop.text.len() > self.stops.0[other].text.len()) {
                complete = Some(index);
            }
        }
        complete
    }

    /// Returns the held text at the end of the answer: it did not become a stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::super::work::steps;
    use super::*;

    fn cut(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(ToString::to_string).collect::<Vec<_>>());
        let mut shown: String = pieces.iter().map(|piece| matcher.push(piece)).collect();
        shown.push_str(&matcher.finish());
        (shown, matcher.stopped())
    }

    #[test]
    fn a_stop_string_is_found_wherever_the_pieces_are_cut() {
        for (stops, pieces, shown, stopped) in [
            (&["STOP"][..], &["one STOP two"][..], "one ", true),
            (&["STOP"], &["one S", "T", "OP two"], "one ", true),
            (&["STOP"], &["one STO", "RE"], "one STORE", false),
            (&["STOP"], &["one STO"], "one STO", false),
            (&["aab"], &["a", "a", "a", "b", "c"], "a", true),
            (&["b", "ab"], &["xab"], "x", true),
            (&["abc", "b"], &["xabc"], "xa", true),
            (&["abc", "b"], &["xab", "c"], "xa", true),
            (&["é!"], &["caf", "é", "!"], "caf", true),
            (&[""], &["all"], "all", false),
            (&[], &["all"], "all", false),
        ] {
            assert_eq!(cut(stops, pieces), (shown.to_owned(), stopped), "{stops:?} in {pieces:?}");
        }
    }

    #[test]
    fn a_stop_string_that_is_complete_in_passed_text_ends_nothing_and_one_that_ends_behind_it_does() {
        for (passed, pushed, shown, stopped) in [
            ("one STOP", " two", "one STOP two", false),
            ("one STOP", " STOP two", "one STOP ", true),
            ("one STO", "P two", "one ", true),
            ("aab", "aab", "aab", true),
            ("aaba", "ab", "aab", true),
            ("STOPSTOPST", "OP", "STOPSTOP", true),
        ] {
            let mut matcher = StopMatcher::new(vec!["STOP".to_owned(), "aab".to_owned()]);
            let mut found = matcher.pass(passed);
            found.push_str(&matcher.push(pushed));
            found.push_str(&matcher.finish());
            assert_eq!((found.as_str(), matcher.stopped()), (shown, stopped), "{passed:?}, {pushed:?}");
        }
    }

    #[test]
    fn only_what_may_become_a_stop_string_is_held() {
        let mut matcher = StopMatcher::new(vec!["<end>".into()]);
        assert_eq!(matcher.push("a < b <e"), "a < b ");
        assert_eq!(matcher.push("x"), "<ex");
    }

    /// The rule, without any care for time: what is shown and what is held after each piece, and the stop string that ended it.
    fn by_the_rule(
        stops: &[String],
        pieces: &[&str],
        shows: bool,
    ) -> (Vec<(String, String)>, Option<String>) {
        let (mut states, mut held) = (Vec::new(), String::new());
        for piece in pieces {
            held.push_str(piece);
            let complete = |(index, stop): (usize, &String)| {
                let begin = held.find(stop.as_str())?;
                Some((begin + stop.len(), begin, index))
            };
            let first =
                stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty()).filter_map(complete).min();
            if let Some((end, begin, index)) = first {
                states.push((held[..if shows { end } else { begin }].to_owned(), String::new()));
                return (states, Some(stops[index].clone()));
            }
            let begins = |suffix: &str| stops.iter().any(|stop| stop.starts_with(suffix));
            let starts = held.char_indices().map(|(at, _)| at).chain([held.len()]);
            let keep = starts.into_iter().find(|at| begins(&held[*at..]) || *at == held.len()).unwrap();
            let rest = held.split_off(keep);
            states.push((std::mem::replace(&mut held, rest.clone()), rest));
        }
        (states, None)
    }

    #[test]
    fn any_text_is_cut_shown_and_held_by_the_rule() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let mut ends = 0;
        for _ in 0..20_000 {
            let letters = &["a", "b", "é", "è", "漢"][..random.usize(1..=5)];
            let mut word = |most: usize| -> String {
                (0..random.usize(0..=most)).map(|_| letters[random.usize(..letters.len())]).collect()
            };
            let mut stops: Vec<String> = (0..word(5).len()).map(|_| word(6)).collect();
            if stops.len() > 2 {
                stops[2] = stops[0].clone();
            }
            let pieces: Vec<String> = (0..12).map(|_| word(4)).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            for shows in [false, true] {
                let (states, matched) = by_the_rule(&stops, &pieces, shows);
                let mut matcher = StopMatcher::new(stops.clone()).showing(shows);
                for (piece, (shown, held)) in pieces.iter().zip(&states) {
                    assert_eq!((&matcher.push(piece), &matcher.held), (shown, held), "{stops:?} {pieces:?}");
                }
                assert_eq!(matcher.matched(), matched.as_deref(), "{stops:?} {pieces:?}");
                ends += usize::from(matched.is_some());
            }
        }
        assert!((1_000..39_000).contains(&ends), "{ends} answers ended");
    }

    #[test]
    fn a_byte_takes_few_steps_even_where_many_stop_strings_nearly_match() {
        const BYTES: usize = 20_000;
        let all_but_last = |last: char| "a".repeat(1023) + &last.to_string();
        let nested = |length: usize| "a".repeat(length) + "b" + &"a".repeat(1023 - length);
        let same: Vec<String> = ('b'..='q').map(all_but_last).collect();
        let shifted: Vec<String> = (0..16).map(|index| nested(1023 - 60 * index)).collect();
        for (stops, answer) in [
            (&same, "a".repeat(BYTES)),
            (&same, ("a".repeat(1023) + "z").repeat(BYTES / 1024)),
            (&shifted, "a".repeat(BYTES)),
            (&shifted, ("a".repeat(1023) + "z").repeat(BYTES / 1024)),
        ] {
            let (preparing, prepared) = steps(|| Stops::from(stops.clone()));
            assert!(preparing <= 2 * 16 * 1024, "{preparing} steps to prepare 16 stop strings");
            let mut matcher = StopMatcher::new(prepared);
            let letters = answer.split("").filter(|letter| !letter.is_empty());
            let (taken, shown) = steps(|| letters.map(|letter| matcher.push(letter)).collect::<String>());
            assert_eq!(shown + &matcher.finish(), answer);
            assert!(taken <= 2 * 16 * answer.len(), "{taken} steps for {} bytes", answer.len());
        }
    }
}
