//! Stop strings: the answer ends before the first of them that is complete, wherever token borders lie.

/// Watches an answer's text for stop strings, and holds back text that may begin one.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    /// The index of the stop string that was seen.
    matched: Option<usize>,
    /// Whether the stop string is part of the shown text.
    shows: bool,
}

impl StopMatcher {
    /// Watches for these strings. Empty strings are ignored.
    #[must_use]
    pub fn new(stops: Vec<String>) -> Self {
        Self {
            stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(),
            held: String::new(),
            matched: None,
            shows: false,
        }
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
        Some(self.stops.get(self.matched?)?.as_str())
    }

    /// Takes more text and returns the text that is safe to show.
    pub fn push(&mut self, text: &str) -> String {
        if self.stopped() {
            return String::new();
        }
        self.held.push_str(text);
        // Takes the stop string that ends first, so that the result does not depend on where the pieces are cut. Of stop strings
        // that end together, takes the longest.
        let places = self.stops.iter().enumerate();
        let complete = |(index, stop): (usize, &String)| {
            let begin = self.held.find(stop.as_str())?;
            Some((begin + stop.len(), begin, index))
        };
        if let Some((_, cut, index)) = places.filter_map(complete).min() {
            self.matched = Some(index);
            let mut shown = std::mem::take(&mut self.held);
            shown.truncate(if self.shows { cut + self.stops[index].len() } else { cut });
            return shown;
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// Returns the held text at the end of the answer: it did not become a stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest suffix of `text` that is a prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    stop.char_indices()
        .map(|(index, _)| index)
        .filter(|&length| length > 0 && text.ends_with(stop.get(..length).unwrap_or_default()))
        .max()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(ToString::to_string).collect());
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
    fn only_what_may_become_a_stop_string_is_held() {
        let mut matcher = StopMatcher::new(vec!["<end>".into()]);
        assert_eq!(matcher.push("a < b <e"), "a < b ");
        assert_eq!(matcher.push("x"), "<ex");
    }
}
