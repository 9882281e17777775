//! Finds out in which of two forms a model lies on disk.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use host_gguf::Gguf;

use super::error::LoadError;

/// Most GGUF files that a message names.
const NAMED: usize = 3;

/// The form of the model at a path.
pub(crate) enum Form {
    /// A Hugging Face directory.
    Directory,
    /// A GGUF file, whose header was read.
    Gguf(Gguf),
}

impl Form {
    pub fn of(path: &Path) -> Result<Self, LoadError> {
        let no_model = |found: String| LoadError::NoModel { path: path.to_owned(), found };
        let metadata = match fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(no_model("nothing is there".to_owned()));
            }
            Err(source) => return Err(LoadError::Read { file: path.to_owned(), source }),
        };
        if metadata.is_dir() {
            return match gguf_files(path) {
                Some(names) if !path.join("config.json").exists() => {
                    Err(no_model(format!("a directory without config.json that holds {names}")))
                }
                _ => Ok(Self::Directory),
            };
        }
        // Opening a pipe would wait for a process at its other end.
        if !metadata.is_file() {
            return Err(no_model("neither a file nor a directory".to_owned()));
        }
        match Gguf::open(path) {
            Ok(gguf) => Ok(Self::Gguf(gguf)),
            Err(error @ host_gguf::Error::NotGguf { .. }) => Err(no_model(error.to_string())),
            Err(source) => Err(LoadError::Gguf { file: path.to_owned(), source }),
        }
    }
}

/// The names of a directory's GGUF files in a form for messages, if there are any.
fn gguf_files(directory: &Path) -> Option<String> {
    let names = fs::read_dir(directory).ok()?.filter_map(Result::ok).map(|entry| entry.file_name());
    let mut names: Vec<_> =
        names.filter(|name| Path::new(name).extension().is_some_and(|e| e == "gguf")).collect();
    names.sort();
    let shown: Vec<_> = names.iter().take(NAMED).map(|name| name.to_string_lossy()).collect();
    let more = if names.len() > NAMED { " and more" } else { "" };
    (!shown.is_empty()).then(|| format!("{}{more}", shown.join(", ")))
}
