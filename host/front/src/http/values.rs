//! Counts the values of a body's JSON before they are parsed and take memory.
//!
//! A list that is two bytes in a body takes some hundred as a value: a body of 8 MiB, parsed, took 1.2 GB at worst. With these
//! limits it takes 110 MB (`host/front/tests/amplification.rs`). A body may have texts that are JSON themselves. They have limits of
//! their own, because they are parsed later.

/// Most values of a body: the tokens of a prompt, and some fields.
const MOST_VALUES: usize = 1 << 20;
/// Most lists and objects of a body: three for each message of a long conversation.
const MOST_LISTS: usize = 1 << 16;
/// Most values of all texts of JSON within a body.
const MOST_NESTED_VALUES: usize = 1 << 17;
/// Most lists and objects of all texts of JSON within a body.
const MOST_NESTED_LISTS: usize = 1 << 15;

/// The body has more values than this server reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TooMany {
    #[error("the body has more than {MOST_VALUES} values, which is the limit; send a prompt as text")]
    Values,
    #[error("the body has more than {MOST_LISTS} lists and objects, which is the limit; send fewer messages")]
    Lists,
    #[error(
        "the arguments of all calls have more than {MOST_NESTED_VALUES} values or {MOST_NESTED_LISTS} lists and objects, which is the limit; send fewer calls"
    )]
    Nested,
}

/// Values that a parser would make of JSON texts.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    values: usize,
    lists: usize,
}

impl Counts {
    /// Adds the values of a text. Of a text that is not JSON, at least the values before its first error are counted.
    fn add(&mut self, json: &[u8]) {
        self.values += 1;
        let mut bytes = json.iter();
        while let Some(byte) = bytes.next() {
            match byte {
                b'"' => skip_text(&mut bytes),
                b',' => self.values += 1,
                b'[' | b'{' => {
                    self.values += 1;
                    self.lists += 1;
                }
                _ => {}
            }
        }
    }
}

/// Checks a body before it is parsed.
///
/// # Errors
/// When there are more values, or more lists and objects, than are read.
pub(super) fn check(body: &[u8]) -> Result<(), TooMany> {
    let mut counts = Counts::default();
    counts.add(body);
    match (counts.lists > MOST_LISTS, counts.values > MOST_VALUES) {
        (true, _) => Err(TooMany::Lists),
        (false, true) => Err(TooMany::Values),
        (false, false) => Ok(()),
    }
}

/// The texts of one body that are JSON themselves, counted together.
#[derive(Debug, Default)]
pub(super) struct Nested(Counts);

impl Nested {
    /// Counts another text, before it is parsed.
    ///
    /// # Errors
    /// When this text and those before have more values, or more lists and objects, than are read.
    pub fn check(&mut self, text: &str) -> Result<(), TooMany> {
        self.0.add(text.as_bytes());
        match self.0.values > MOST_NESTED_VALUES || self.0.lists > MOST_NESTED_LISTS {
            true => Err(TooMany::Nested),
            false => Ok(()),
        }
    }
}

/// To the end of a text that has begun.
fn skip_text(bytes: &mut std::slice::Iter<u8>) {
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => return,
            b'\\' => {
                bytes.next();
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_lists_have_limits_and_texts_do_not_count() {
        let list_of = |item: &str, count: usize| format!("[{}]", vec![item; count].join(","));
        for (body, checked) in [
            // The list itself is a value, too.
            (list_of("0", MOST_VALUES - 1), Ok(())),
            (list_of("0", MOST_VALUES), Err(TooMany::Values)),
            (list_of("[]", MOST_LISTS - 1), Ok(())),
            (list_of("[]", MOST_LISTS), Err(TooMany::Lists)),
            (list_of("{}", MOST_LISTS), Err(TooMany::Lists)),
            ("[".repeat(MOST_LISTS + 1), Err(TooMany::Lists)),
            (format!("\"{}\"", "[,\\\"".repeat(MOST_VALUES)), Ok(())),
            (format!("\"\\\\\"{}", "[".repeat(MOST_LISTS + 1)), Err(TooMany::Lists)),
            ("\"\\".to_owned(), Ok(())),
            (String::new(), Ok(())),
        ] {
            assert_eq!(check(body.as_bytes()), checked, "{:.20}", body);
        }
    }

    #[test]
    fn texts_within_a_body_are_counted_together() {
        let lists = |count: usize| format!("[{}]", vec!["[]"; count - 1].join(","));
        let mut nested = Nested::default();
        assert_eq!(nested.check(&lists(MOST_NESTED_LISTS / 2)), Ok(()));
        assert_eq!(nested.check(&lists(MOST_NESTED_LISTS / 2)), Ok(()));
        assert_eq!(nested.check("[]"), Err(TooMany::Nested));
        let values = format!("[{}]", vec!["0"; MOST_NESTED_VALUES].join(","));
        assert_eq!(Nested::default().check(&values), Err(TooMany::Nested));
    }
}
