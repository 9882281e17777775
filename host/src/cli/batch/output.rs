//! The file of answers. Each answer is appended when it comes.

use std::collections::HashSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufRead as _, BufReader, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use host_wire::random::random_u64;
use serde_json::Value;

use super::input::Input;
use crate::cli::Refused;

/// Beginning of every line that this program writes.
const START: &[u8] = br#"{"id":"batch_req_"#;

/// A file to which answers are appended.
pub struct Output {
    file: File,
    /// The file that this one has replaced. It stays open, so that its lock is held.
    _replaced: Option<File>,
}

/// The state that an earlier run has left.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Earlier {
    /// Requests that have an answer.
    pub answered: HashSet<String>,
    /// How many of these answers are failures.
    pub failed: usize,
}

impl Output {
    /// Opens or creates the file. Cuts off an incomplete last line, and removes lines that report a failed request, so that every
    /// id appears once.
    ///
    /// # Errors
    /// When the file cannot be written, is the input, has other content, or another process writes to it.
    pub fn open(path: &Path, input_path: &Path, input: &Input) -> anyhow::Result<(Self, Earlier)> {
        let shown = path.display();
        // Resolves a link, because the file that it names may be replaced.
        let path = &path.canonicalize().unwrap_or_else(|_new| path.to_owned());
        if input_path.canonicalize().is_ok_and(|input| input == *path) {
            return Err(
                Refused(format!("{shown} is --input and --output: give the answers another file")).into()
            );
        }
        let unwritable = || format!("{shown} (--output) cannot be written");
        if path.metadata().is_ok_and(|about| !about.is_file()) {
            return Err(Refused(format!("{shown} (--output) must be a regular file")).into());
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .with_context(unwritable)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Refused(format!(
                    "another process writes to {shown} (--output): wait for its end"
                ))
                .into());
            }
            Err(TryLockError::Error(error)) => return Err(error).with_context(unwritable),
        }
        let found = read(&file, input).map_err(|error| error.context(format!("{shown} (--output)")))?;
        let (mut file, replaced) = match found.answers {
            Some(answers) => (without_others(path, &file, &answers).with_context(unwritable)?, Some(file)),
            None => {
                file.set_len(found.whole).with_context(unwritable)?;
                (file, None)
            }
        };
        file.seek(SeekFrom::End(0)).with_context(unwritable)?;
        Ok((Self { file, _replaced: replaced }, found.earlier))
    }

    /// Appends a line.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn append(&mut self, line: &Value) -> anyhow::Result<()> {
        let line = format!("{line}\n");
        self.file.write_all(line.as_bytes()).context("an answer cannot be written to --output")
    }

    /// Ends the output and syncs the file.
    ///
    /// # Errors
    /// When the file cannot be synced.
    pub fn finish(self) -> anyhow::Result<()> {
        self.file.sync_all().context("answers cannot be written to --output")
    }
}

/// The content of a file of answers.
struct AnswerFile {
    earlier: Earlier,
    /// Number of bytes up to the end of the last complete line.
    whole: u64,
    /// Offsets and lengths of the lines with answers, if there are other lines between them.
    answers: Option<Vec<(u64, usize)>>,
}

/// Reads the state that an earlier run has left.
///
/// # Errors
/// When the file has other content.
fn read(file: &File, input: &Input) -> anyhow::Result<AnswerFile> {
    let mut reader = BufReader::new(file);
    let (mut earlier, mut answers) = (Earlier::default(), Vec::new());
    let (mut number, mut whole, mut all_answered) = (0, 0, true);
    loop {
        let mut bytes = Vec::new();
        let length = reader.read_until(b'\n', &mut bytes)?;
        number += 1;
        let other = |why: &str| {
            Refused(format!("line {number} {why}: give a new file, or the one with answers to this --input"))
        };
        if !bytes.ends_with(b"\n") {
            // Cuts off only an incomplete line of this program.
            if !bytes.starts_with(START) && !START.starts_with(&bytes) {
                return Err(other("is no answer of a batch").into());
            }
            let answers = (!all_answered).then_some(answers);
            return Ok(AnswerFile { earlier, whole, answers });
        }
        let line: Value =
            serde_json::from_slice(&bytes).map_err(|_error| other("is no answer of a batch"))?;
        let custom_id = line["custom_id"].as_str().ok_or_else(|| other("is no answer of a batch"))?;
        if !input.has(custom_id) {
            return Err(other(&format!("answers custom_id {custom_id:?}, which --input has not")).into());
        }
        if let Some(status) = line["response"]["status_code"].as_u64() {
            if !earlier.answered.insert(custom_id.to_owned()) {
                return Err(other(&format!("is another answer to custom_id {custom_id:?}")).into());
            }
            earlier.failed += usize::from(!(200..300).contains(&status));
            answers.push((whole, length));
        } else if line["response"].is_null() && line["error"].is_object() {
            all_answered = false;
        } else {
            return Err(other("is no answer of a batch").into());
        }
        whole += length as u64;
    }
}

/// Replaces a file by one that has only these of its lines.
fn without_others(path: &Path, file: &File, answers: &[(u64, usize)]) -> io::Result<File> {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{:016x}", random_u64()?));
    let new = PathBuf::from(name);
    let mut written = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&new)?;
    written.set_permissions(file.metadata()?.permissions())?;
    written.try_lock()?;
    for (at, length) in answers {
        let mut line = vec![0; *length];
        file.read_exact_at(&mut line, *at)?;
        written.write_all(&line)?;
    }
    written.sync_all()?;
    std::fs::rename(&new, path)?;
    Ok(written)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Opens files for three requests, with this text in the output.
    fn opened(output: &str) -> (tempfile::TempDir, Result<Earlier, String>) {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
        let request = |id: &str| {
            json!({"custom_id": id, "method": "POST", "url": "/v1/completions", "body": {}}).to_string()
                + "\n"
        };
        std::fs::write(&from, ["a", "b", "c"].map(request).concat()).unwrap();
        std::fs::write(&to, output).unwrap();
        let input = Input::check(&from).unwrap();
        let opened = Output::open(&to, &from, &input).map(|(mut output, earlier)| {
            output.append(&json!({"last": true})).unwrap();
            earlier
        });
        (folder, opened.map_err(|error| format!("{error:#}")))
    }

    fn answer(id: &str, status: u16) -> String {
        json!({"id": "batch_req_0", "custom_id": id, "response": {"status_code": status}, "error": null})
            .to_string()
            + "\n"
    }

    #[test]
    fn a_broken_last_line_is_cut_off_and_the_next_answer_takes_its_place() {
        for broken in ["", "{\"i", "{\"id\":\"batch_req_77", answer("b", 200).trim_end()] {
            let (folder, earlier) = opened(&format!("{}{broken}", answer("a", 400)));
            assert_eq!(earlier, Ok(Earlier { answered: HashSet::from(["a".to_owned()]), failed: 1 }));
            let text = std::fs::read_to_string(folder.path().join("out.jsonl")).unwrap();
            assert_eq!(text, format!("{}{{\"last\":true}}\n", answer("a", 400)), "{broken}");
        }
    }

    #[test]
    fn lines_without_an_answer_are_taken_out_and_count_as_not_sent() {
        let none = json!({"custom_id": "b", "response": null, "error": {}}).to_string() + "\n";
        let (folder, earlier) = opened(&format!("{none}{}{none}{}{{", answer("a", 200), answer("c", 200)));
        assert_eq!(earlier.unwrap().answered, HashSet::from(["a".to_owned(), "c".to_owned()]));
        let text = std::fs::read_to_string(folder.path().join("out.jsonl")).unwrap();
        assert_eq!(text, format!("{}{}{{\"last\":true}}\n", answer("a", 200), answer("c", 200)));
    }

    #[test]
    fn a_file_that_has_something_else_is_refused_and_stays_as_it_is() {
        for (line, words) in [
            ("poems\n".to_owned(), "line 1 is no answer"),
            ("poems".to_owned(), "line 1 is no answer"),
            (answer("a", 200) + "{\"a\": 1}", "line 2 is no answer"),
            (json!({"custom_id": "a", "method": "POST"}).to_string() + "\n", "line 1 is no answer"),
            (answer("d", 200), "which --input has not"),
            ([answer("a", 200), answer("a", 200)].concat(), "line 2 is another answer"),
        ] {
            let (folder, earlier) = opened(&line);
            let error = earlier.unwrap_err();
            assert!(error.contains(words) && error.contains("out.jsonl"), "{error}");
            assert_eq!(std::fs::read_to_string(folder.path().join("out.jsonl")).unwrap(), line);
        }
    }

    #[test]
    fn the_input_is_no_output_and_two_jobs_do_not_share_one() {
        let (folder, earlier) = opened("");
        earlier.unwrap();
        let (from, to) = (folder.path().join("in.jsonl"), folder.path().join("other.jsonl"));
        let input = Input::check(&from).unwrap();
        let refused = |to: &Path| Output::open(to, &from, &input).err().map(|error| format!("{error:#}"));
        assert!(refused(&from).unwrap().contains("is --input and --output"));
        let _first = Output::open(&to, &from, &input).unwrap();
        assert!(refused(&to).unwrap().contains("another process writes to"));
    }
}
