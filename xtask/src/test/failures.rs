//! What failed in a test program, from what it printed: for a summary that is read without the rest of the output.

/// Characters of a failure in the summary at most.
const LENGTH: usize = 400;
/// How lines begin that follow a panic's message.
const ENDS: [&str; 5] = ["----", "note:", "stack backtrace:", "Error: ", "thread '"];
/// Lines of a panic's message at most.
const MESSAGE_LINES: usize = 3;
/// Lines of a program that ended without naming a test.
const LAST_LINES: usize = 3;

/// What a failed test printed.
#[derive(Default)]
struct Said {
    /// The panic of its own thread.
    own: Option<String>,
    /// The error that it returned.
    error: Option<String>,
    /// The last panic of another thread.
    other: Option<String>,
}

/// A line for each test that failed: its name, where it panicked, and the beginning of the message. Where the program names none, its
/// last lines.
pub fn failures(output: &str) -> Vec<String> {
    let mut lines = output.lines().peekable();
    let mut found = Vec::new();
    while let Some(line) = lines.next() {
        let Some(name) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) else {
            continue;
        };
        let mut said = Said::default();
        while let Some(line) = lines.next_if(|line| !line.starts_with("---- ") && *line != "failures:") {
            if let Some((thread, place)) = line.split_once(" panicked at ") {
                let mut panic = place.to_owned();
                for _ in 0..MESSAGE_LINES {
                    let is_more = |line: &&str| !ENDS.iter().any(|end| line.starts_with(end));
                    let Some(line) = lines.next_if(is_more).filter(|line| !line.is_empty()) else { break };
                    panic.push(' ');
                    panic.push_str(line.trim());
                }
                let is_own = thread.contains(&format!("'{name}'"));
                if is_own { said.own = Some(panic) } else { said.other = Some(panic) }
            } else if line.starts_with("Error: ") {
                said.error = Some(line.to_owned());
            }
        }
        let said = said.own.or(said.error).or(said.other);
        found.push(shortened(&format!("{name}: {}", said.unwrap_or_else(|| "see above".to_owned()))));
    }
    if found.is_empty() {
        let said: Vec<&str> = output.lines().filter(|line| !line.trim().is_empty()).collect();
        found.extend(said[said.len().saturating_sub(LAST_LINES)..].iter().map(|line| shortened(line)));
    }
    found
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(LENGTH) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_that_failed_are_named_with_the_place_and_the_message() {
        let output = "running 3 tests\ntest a::good ... ok\ntest a::bad ... FAILED\ntest b::worse ... FAILED\n\nfailures:\n\n\
            ---- a::bad stdout ----\nthread 'x' panicked at early.rs:1:1:\non purpose\n\n\
            thread 'a::bad' (12) panicked at tests/a.rs:3:5:\nno answer came\nsaid: 4\n\n\
            thread 'x' panicked at late.rs:1:1:\nsecond\n\n\
            ---- b::worse stdout ----\nthread 'y' panicked at y.rs:1:1:\non purpose\nError: \"it returned\"\n\n\
            ---- c::threads stdout ----\nthread '<unnamed>' panicked at z.rs:1:1:\nlost\n\n\
            ---- d::silent stdout ----\n\n\nfailures:\n    a::bad\n    b::worse\n\n\
            test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s\n";
        assert_eq!(
            failures(output),
            [
                "a::bad: tests/a.rs:3:5: no answer came said: 4",
                "b::worse: Error: \"it returned\"",
                "c::threads: z.rs:1:1: lost",
                "d::silent: see above"
            ]
        );
    }

    #[test]
    fn of_a_program_that_names_no_test_the_last_lines_are_told() {
        let output = format!("one\ntwo\n\n{}\nkilled\n", "ä".repeat(LENGTH + 1));
        assert_eq!(
            failures(&output),
            ["two".to_owned(), format!("{}…", "ä".repeat(LENGTH)), "killed".to_owned()]
        );
        assert_eq!(failures(""), [] as [&str; 0]);
    }
}
