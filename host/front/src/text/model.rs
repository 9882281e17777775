//! Reads the text side of a model from its folder or file.

pub mod gguf;

use std::path::Path;
use std::sync::Arc;

use serde_json::Value as Json;

use super::huggingface::HuggingFaceTokenizer;
use super::{ByteTokenizer, CallFormat, ChatTemplate, TextError, Tokenizer};

/// The text side of a model, as a router needs it.
#[derive(Clone)]
pub struct TextModel {
    /// Its tokenizer.
    pub tokenizer: Arc<dyn Tokenizer>,
    /// Its chat template, if it has one.
    pub template: Option<Arc<ChatTemplate>>,
    /// Tokens that end an answer.
    pub end: Vec<u32>,
    /// How the model's answers are read.
    pub dialect: Dialect,
}

/// The parts of an answer beside its text, and how the model writes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dialect {
    /// The format in which the model calls tools. If absent, the chat template decides.
    pub calls: Option<CallFormat>,
    /// Whether the model writes thoughts between `<think>` and `</think>`, which are separated from the text.
    pub thinks: bool,
}

/// Largest JSON file of a model folder other than the tokenizer.
const MAX_FILE: u64 = 16 << 20;

impl TextModel {
    /// The format in which the model calls tools.
    #[must_use]
    pub fn calls(&self) -> Option<CallFormat> {
        self.dialect.calls.or_else(|| self.template.as_ref()?.calls())
    }

    /// A model for the synthetic executor: bytes as tokens, ids up to `vocabulary`, no chat template, no end token.
    #[must_use]
    pub fn bytes(vocabulary: u32) -> Self {
        Self {
            tokenizer: Arc::new(ByteTokenizer::new(vocabulary)),
            template: None,
            end: Vec::new(),
            dialect: Dialect::default(),
        }
    }

    /// Reads the text side of a model (blocking): from a GGUF file's metadata, or from a Hugging Face folder.
    ///
    /// # Errors
    /// When a part is there and cannot be used, or when there is no tokenizer. The error names the file.
    pub fn load(model: &Path) -> Result<Self, TextError> {
        if gguf::is_gguf(model) { gguf::load(model) } else { Self::load_folder(model) }
    }

    /// Replaces the chat template with that of a file (blocking).
    ///
    /// # Errors
    /// When the file cannot be read or is no template. The error names the file.
    pub fn with_template(mut self, file: &Path) -> Result<Self, TextError> {
        let failed = |problem: String| TextError::File { file: file.display().to_string(), problem };
        let folder = file.parent().unwrap_or(Path::new(""));
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let source = text(folder, &name)?.ok_or_else(|| failed("there is no such file".to_owned()))?;
        let template = match &self.template {
            Some(own) => own.instead(source),
            None => ChatTemplate::new(source, String::new(), String::new()),
        };
        self.template = Some(Arc::new(template.map_err(|error| failed(error.to_string()))?));
        Ok(self)
    }

    /// Reads a Hugging Face folder's tokenizer and template, which replace those of `model` (blocking).
    ///
    /// The end tokens of `model` also end an answer, because folders with only a tokenizer often name the end of a text and not
    /// that of a turn.
    ///
    /// # Errors
    /// When a part is there and cannot be used, or when there is no tokenizer. The error names the file.
    pub fn load_instead(folder: &Path, model: Option<&Path>) -> Result<Self, TextError> {
        let mut text = Self::load_folder(folder)?;
        let more = match model {
            Some(model) if gguf::is_gguf(model) => gguf::ends(model)?,
            Some(model) => ends(model)?,
            None => Vec::new(),
        };
        for token in more {
            if !text.end.contains(&token) {
                text.end.push(token);
            }
        }
        Ok(text)
    }

    /// Reads `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json` and `config.json`
    /// (blocking). Only the first must be there.
    ///
    /// # Errors
    /// When a file is there and cannot be used. The error names the file.
    fn load_folder(folder: &Path) -> Result<Self, TextError> {
        let tokenizer = HuggingFaceTokenizer::load(&folder.join("tokenizer.json"))?;
        let settings = json(folder, "tokenizer_config.json")?.unwrap_or_default();
        let name = |field: &str| match settings.get(field) {
            Some(Json::String(name)) => name.clone(),
            Some(token) => token.get("content").and_then(Json::as_str).unwrap_or_default().to_owned(),
            None => String::new(),
        };
        let (bos, eos) = (name("bos_token"), name("eos_token"));

        let source = match text(folder, "chat_template.jinja")? {
            Some(source) => Some(source),
            None => template_source(&settings),
        };
        let template = source.map(|source| ChatTemplate::new(source, bos, eos.clone())).transpose()?;

        let mut end = ends(folder)?;
        if end.is_empty() && !eos.is_empty() {
            // The name of a special token must be one token. Otherwise the folder contradicts itself, and no end is known.
            if let [id] = tokenizer.encode(&eos, false)?.as_slice() {
                end.push(*id);
            }
        }
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
            template: template.map(Arc::new),
            end,
            dialect: Dialect::default(),
        })
    }
}

/// The tokens that end an answer, from the first file that has some.
fn ends(folder: &Path) -> Result<Vec<u32>, TextError> {
    for file in ["generation_config.json", "config.json"] {
        let Some(config) = json(folder, file)? else { continue };
        let ids = config.get("eos_token_id").or_else(|| config.get("text_config")?.get("eos_token_id"));
        let end: Vec<u32> = match ids {
            Some(Json::Array(ids)) => ids.iter().filter_map(token_id).collect(),
            Some(id) => token_id(id).into_iter().collect(),
            None => Vec::new(),
        };
        if !end.is_empty() {
            return Ok(end);
        }
    }
    Ok(Vec::new())
}

fn token_id(json: &Json) -> Option<u32> {
    json.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// The source of the chat template. Of several named templates, the one that is named `default`.
fn template_source(settings: &Json) -> Option<String> {
    match settings.get("chat_template")? {
        Json::String(source) => Some(source.clone()),
        Json::Array(named) => named
            .iter()
            .find(|entry| entry.get("name").and_then(Json::as_str) == Some("default"))?
            .get("template")?
            .as_str()
            .map(str::to_owned),
        _ => None,
    }
}

fn text(folder: &Path, name: &str) -> Result<Option<String>, TextError> {
    let path = folder.join(name);
    let failed = |problem: String| TextError::File { file: path.display().to_string(), problem };
    match host_ownership::read_up_to(&path, MAX_FILE) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error.to_string())),
        Ok(bytes) => String::from_utf8(bytes).map(Some).map_err(|error| failed(error.to_string())),
    }
}

fn json(folder: &Path, name: &str) -> Result<Option<Json>, TextError> {
    let Some(text) = text(folder, name)? else { return Ok(None) };
    serde_json::from_str(&text).map(Some).map_err(|error| TextError::File {
        file: folder.join(name).display().to_string(),
        problem: format!("not JSON: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENIZER: &str = r#"{"version":"1.0","added_tokens":[{"id":2,"content":"</s>","single_word":false,"lstrip":false,
        "rstrip":false,"normalized":false,"special":true}],"model":{"type":"WordLevel","vocab":{"a":0,"b":1},"unk_token":"a"}}"#;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    #[test]
    fn end_tokens_come_from_the_first_file_that_has_them() {
        let settings = ("tokenizer_config.json", r#"{"eos_token":{"content":"</s>"}}"#);
        let tokenizer = ("tokenizer.json", TOKENIZER);
        for (files, end) in [
            (vec![tokenizer, ("generation_config.json", r#"{"eos_token_id":[7,8]}"#)], vec![7, 8]),
            (
                vec![tokenizer, ("generation_config.json", "{}"), ("config.json", r#"{"eos_token_id":9}"#)],
                vec![9],
            ),
            (vec![tokenizer, ("config.json", r#"{"text_config":{"eos_token_id":4}}"#)], vec![4]),
            (vec![tokenizer, settings], vec![2]),
            (vec![tokenizer], vec![]),
        ] {
            assert_eq!(TextModel::load(folder(&files).path()).unwrap().end, end, "{files:?}");
        }
    }

    #[test]
    fn the_template_file_wins_over_the_setting_and_named_ones_give_default() {
        let tokenizer = ("tokenizer.json", TOKENIZER);
        let one = ("tokenizer_config.json", r#"{"chat_template":"one {{ eos_token }}","eos_token":"</s>"}"#);
        let named = (
            "tokenizer_config.json",
            r#"{"chat_template":[{"name":"tool_use","template":"no"},{"name":"default","template":"two"}]}"#,
        );
        let file = ("chat_template.jinja", "three");
        for (files, text) in [
            (vec![tokenizer, one], Some("one </s>")),
            (vec![tokenizer, named], Some("two")),
            (vec![tokenizer, one, file], Some("three")),
            (vec![tokenizer], None),
        ] {
            let model = TextModel::load(folder(&files).path()).unwrap();
            let rendered = model
                .template
                .map(|template| template.render(&Json::Array(vec![]), &serde_json::Map::new(), 0).unwrap());
            assert_eq!(rendered.as_deref(), text, "{files:?}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_used_is_named() {
        for (files, named) in [
            (vec![], "tokenizer.json"),
            (vec![("tokenizer.json", TOKENIZER), ("config.json", "{")], "config.json"),
            (vec![("tokenizer.json", TOKENIZER), ("chat_template.jinja", "{% if %}")], "not a template"),
        ] {
            let error = TextModel::load(folder(&files).path()).err().unwrap().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
