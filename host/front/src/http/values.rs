//! How many values a body's JSON has, before any of them takes memory.
//!
//! A list that is two bytes in a body takes some hundred as a value: a body of 8 MiB, parsed, took 1.2 GB at worst. With these
//! limits it takes 110 MB (`host/front/tests/amplification.rs`).

/// Most values of a body: the tokens of a prompt, and some fields.
const MOST_VALUES: usize = 1 << 20;
/// Most lists and objects of a body: three for each message of a long conversation.
const MOST_LISTS: usize = 1 << 16;

/// A body of more values than are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TooMany {
    #[error("the body has more than {MOST_VALUES} values, which is the limit; send a prompt as text")]
    Values,
    #[error("the body has more than {MOST_LISTS} lists and objects, which is the limit; send fewer messages")]
    Lists,
}

/// Counts what a parser would make of a body. What is no JSON is counted as far as it is.
///
/// # Errors
/// When there are more values, or more lists and objects, than are read.
pub(super) fn check(body: &[u8]) -> Result<(), TooMany> {
    let (mut values, mut lists) = (1_usize, 0_usize);
    let mut bytes = body.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => skip_text(&mut bytes),
            b',' => values += 1,
            b'[' | b'{' => {
                values += 1;
                lists += 1;
            }
            _ => {}
        }
    }
    match (lists > MOST_LISTS, values > MOST_VALUES) {
        (true, _) => Err(TooMany::Lists),
        (false, true) => Err(TooMany::Values),
        (false, false) => Ok(()),
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
            // The list is one, too.
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
}
