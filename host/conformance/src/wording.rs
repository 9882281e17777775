//! Texts of messages: the last words of a process, and how codes and names are written.

use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use host_plugin_api::ErrorCode;

/// A word with its article before it.
pub fn with_article(word: &str) -> String {
    let article = if word.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    format!("{article} {word}")
}

/// How a page or call ended: a status as its number, an error code with its name.
pub fn status(status: i32) -> String {
    if status < 0 { format!("{:?}", ErrorCode(status)) } else { status.to_string() }
}

/// The message about a process that ended without a verdict.
pub fn ended(exit: ExitStatus, errors: &str) -> String {
    let touched = ["SIGSEGV", "SIGBUS"].iter().any(|signal| exit.to_string().contains(signal));
    match last_words(errors) {
        Some(said) => format!("the process ended with {exit}: {said}"),
        None if touched => format!(
            "the process ended with {exit} and left no text on standard error: a usual cause is memory that was given back \
             and is touched all the same"
        ),
        None if exit.signal().is_some() => {
            format!("the process ended with {exit} and left no text on standard error")
        }
        None => {
            format!("the process ended with {exit}, without a verdict and without text on standard error")
        }
    }
}

/// The line that most likely says why the process ended: the finding of a sanitizer, a failed allocation, the last panic's text, or
/// else the last line.
fn last_words(errors: &str) -> Option<&str> {
    let lines = || errors.lines().filter(|line| !line.trim().is_empty());
    // A sanitizer's finding is not the last line: stacks and a map of the memory follow it.
    let found = lines().find(|line| line.contains("ERROR:") && line.contains("Sanitizer"));
    let allocation = || lines().rev().find(|line| line.starts_with("memory allocation of"));
    let panic = || {
        let start = errors.rfind(" panicked at ")?;
        errors[start..].lines().nth(1).filter(|line| !line.trim().is_empty())
    };
    found.or_else(allocation).or_else(panic).or_else(|| lines().next_back())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_ended_without_text_is_not_said_to_have_lost_data() {
        let said = ended(ExitStatus::from_raw(11), " \n");
        assert_eq!(
            said,
            "the process ended with signal: 11 (SIGSEGV) and left no text on standard error: a usual cause is memory that was \
             given back and is touched all the same"
        );
        let said = ended(ExitStatus::from_raw(24), "");
        assert_eq!(said, "the process ended with signal: 24 (SIGXCPU) and left no text on standard error");
        let said = ended(ExitStatus::from_raw(3 << 8), "");
        assert!(said.contains("ended with exit status: 3, without a verdict"), "{said}");
    }

    #[test]
    fn the_line_that_says_why_is_picked_from_what_a_process_wrote() {
        let sanitizer = "a log line\n=====\n==7==ERROR: AddressSanitizer: heap-use-after-free on 0x60\n    #0 f\n==7==ABORTING\n";
        let cases = [
            (sanitizer, "==7==ERROR: AddressSanitizer: heap-use-after-free on 0x60"),
            ("an ERROR: of a log\nthe end\n", "the end"),
            ("memory allocation of 9 bytes failed\nthe end\n", "memory allocation of 9 bytes failed"),
            ("thread 'a' panicked at src/lib.rs:1:\nwhy\nnote\n", "why"),
            ("first\nlast\n\n", "last"),
        ];
        for (errors, expected) in cases {
            assert_eq!(last_words(errors), Some(expected));
        }
    }

    #[test]
    fn codes_have_names_and_words_their_article() {
        assert_eq!((status(0), status(1), status(-1)), ("0".into(), "1".into(), "INTERNAL(-1)".into()));
        assert_eq!((with_article("put"), with_article("exists")), ("a put".into(), "an exists".into()));
    }
}
