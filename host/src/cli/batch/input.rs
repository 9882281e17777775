//! The file of requests. It is read twice: once to check every line, and once to send them.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::cli::Refused;

/// Limit of the lines in a file, the same as OpenAI's.
const MOST_LINES: usize = 50_000;
/// Longest line, in bytes.
const LONGEST_LINE: u64 = 64 << 20;
/// Longest id, in bytes. All are kept in memory.
const LONGEST_ID: usize = 512;
/// Endpoints that a line may name.
const ENDPOINTS: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/v1/responses"];

/// A file whose lines have all been checked.
pub struct Input {
    path: PathBuf,
    /// The number of the line for each id.
    ids: HashMap<String, usize>,
}

/// A request of the file.
#[derive(Debug, PartialEq)]
pub struct Line {
    /// The id that its answer will have, too.
    pub custom_id: String,
    /// The path of its endpoint.
    pub endpoint: &'static str,
    /// The body that is sent.
    pub body: Map<String, Value>,
}

impl Input {
    /// Checks every line.
    ///
    /// # Errors
    /// When the file cannot be read, or a line is wrong. The error has the line's number.
    pub fn check(path: &Path) -> Result<Self, Refused> {
        let mut ids = HashMap::new();
        for line in lines(path)? {
            let (number, line) = line?;
            if ids.len() == MOST_LINES {
                return Err(wrong(
                    path,
                    number,
                    &format!("{MOST_LINES} requests are the limit: split the file"),
                ));
            }
            if let Some(first) = ids.get(&line.custom_id) {
                let why = format!(
                    "custom_id {:?} is already used in line {first}: give each line its own",
                    line.custom_id
                );
                return Err(wrong(path, number, &why));
            }
            ids.insert(line.custom_id, number);
        }
        if ids.is_empty() {
            return Err(Refused(format!("{} (--input) has no request", path.display())));
        }
        Ok(Self { path: path.to_owned(), ids })
    }

    /// Requests in the file.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether a line has this id.
    pub fn has(&self, custom_id: &str) -> bool {
        self.ids.contains_key(custom_id)
    }

    /// The lines again, one at a time.
    ///
    /// # Errors
    /// When the file has changed since it was checked.
    pub fn lines(&self) -> Result<impl Iterator<Item = Result<Line, Refused>>, Refused> {
        let same = |(number, line): (usize, Line)| match self.ids.get(&line.custom_id) {
            Some(known) if *known == number => Ok(line),
            _ => Err(wrong(
                &self.path,
                number,
                "the file was changed while it was read: run the command again",
            )),
        };
        Ok(lines(&self.path)?.map(move |line| line.and_then(same)))
    }
}

fn wrong(path: &Path, number: usize, why: &str) -> Refused {
    Refused(format!("{} (--input), line {number}: {why}", path.display()))
}

/// The lines of a file with their numbers. Empty ones are left out.
fn lines(path: &Path) -> Result<impl Iterator<Item = Result<(usize, Line), Refused>>, Refused> {
    let unreadable = |error| Refused(format!("{} (--input) cannot be read: {error}", path.display()));
    let file = File::open(path).map_err(unreadable)?;
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(Refused(format!(
            "{} (--input) must be a regular file, because it is read twice",
            path.display()
        )));
    }
    let path = path.to_owned();
    let (mut reader, mut number) = (BufReader::new(file), 0);
    Ok(std::iter::from_fn(move || {
        loop {
            let mut bytes = Vec::new();
            number += 1;
            match reader.by_ref().take(LONGEST_LINE + 1).read_until(b'\n', &mut bytes) {
                Ok(0) => return None,
                Err(error) => return Some(Err(wrong(&path, number, &format!("it cannot be read: {error}")))),
                Ok(_) if bytes.len() as u64 > LONGEST_LINE => {
                    let why = format!("it is longer than {} MiB, which is the limit", LONGEST_LINE >> 20);
                    return Some(Err(wrong(&path, number, &why)));
                }
                Ok(_) if bytes.trim_ascii().is_empty() => {}
                Ok(_) => {
                    let line = Line::read(&bytes).map_err(|why| wrong(&path, number, &why));
                    return Some(line.map(|line| (number, line)));
                }
            }
        }
    }))
}

impl Line {
    /// Reads a line.
    ///
    /// # Errors
    /// What is wrong with the line, and what to do.
    fn read(bytes: &[u8]) -> Result<Self, String> {
        let example = r#"{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}"#;
        let line: Value = serde_json::from_slice(bytes)
            .map_err(|error| format!("it is no JSON ({error}): write one request on each line, {example}"))?;
        let Value::Object(mut line) = line else {
            return Err(format!("it is no JSON object: write {example}"));
        };
        let custom_id = match line.remove("custom_id") {
            Some(Value::String(id)) if !id.is_empty() && id.len() <= LONGEST_ID => id,
            _ => {
                return Err(format!(
                    "custom_id must be a text of 1 to {LONGEST_ID} bytes, a different one on each line"
                ));
            }
        };
        if line.get("method").and_then(Value::as_str) != Some("POST") {
            return Err("method must be \"POST\"".to_owned());
        }
        let url = line.get("url").and_then(Value::as_str).unwrap_or_default();
        let Some(endpoint) = ENDPOINTS.into_iter().find(|endpoint| *endpoint == url) else {
            return Err(format!("url must be one of {}", ENDPOINTS.join(", ")));
        };
        let Some(Value::Object(body)) = line.remove("body") else {
            return Err(format!("body must be an object, as it is sent to {endpoint}"));
        };
        if body.get("stream").is_some_and(|stream| !stream.is_null() && *stream != Value::Bool(false)) {
            return Err("body has stream, and answers of a batch are whole: leave it out".to_owned());
        }
        Ok(Self { custom_id, endpoint, body })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn line(id: &str) -> String {
        json!({"custom_id": id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}})
            .to_string()
    }

    fn checked(text: &str) -> Result<Input, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("in.jsonl");
        std::fs::write(&path, text).unwrap();
        Input::check(&path).map_err(|refused| refused.to_string())
    }

    #[test]
    fn a_wrong_line_is_named_with_what_to_do() {
        let with = |key: &str, value: Value| {
            let mut line: Value = serde_json::from_str(&line("b")).unwrap();
            line[key] = value;
            line.to_string()
        };
        for (wrong, words) in [
            ("{".to_owned(), "no JSON"),
            ("[1]".to_owned(), "no JSON object"),
            (with("custom_id", json!(1)), "custom_id must be a text"),
            (with("custom_id", json!("")), "custom_id must be a text"),
            (with("custom_id", json!("x".repeat(LONGEST_ID + 1))), "custom_id must be a text"),
            (with("method", json!("GET")), "method must be \"POST\""),
            (with("url", json!("/v1/embeddings")), "url must be one of /v1/chat/completions"),
            (with("body", json!("a")), "body must be an object"),
            (with("body", json!({"stream": true})), "leave it out"),
            (line("a"), "custom_id \"a\" is already used in line 1"),
        ] {
            let error = checked(&format!("{}\n\n{wrong}\n", line("a"))).err().unwrap();
            assert!(error.contains("line 3: ") && error.contains(words), "{wrong}: {error}");
        }
        assert!(checked("\n").err().unwrap().contains("has no request"));
    }

    #[test]
    fn lines_are_read_again_in_their_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("in.jsonl");
        std::fs::write(&path, format!("{}\n{}", line("b"), line("a"))).unwrap();
        let input = Input::check(&path).unwrap();
        let ids: Vec<String> = input.lines().unwrap().map(|line| line.unwrap().custom_id).collect();
        assert_eq!((input.len(), ids), (2, vec!["b".to_owned(), "a".to_owned()]));
        std::fs::write(&path, line("a")).unwrap();
        let changed = input.lines().unwrap().next().unwrap().unwrap_err().to_string();
        assert!(changed.contains("was changed"), "{changed}");
    }

    #[test]
    fn a_file_has_at_most_so_many_requests() {
        let text: String = (0..=MOST_LINES).map(|id| line(&id.to_string()) + "\n").collect();
        let error = checked(&text).err().unwrap();
        assert!(error.contains("line 50001") && error.contains("split the file"), "{error}");
    }
}
