//! The tokenizer and the chat template out of a GGUF file's metadata.

mod byte_level;
mod pretokenizers;
mod sentencepiece;
mod vocabulary;

use std::path::Path;
use std::sync::Arc;

use host_gguf::{Gguf, Metadata};

use super::{ChatTemplate, TextError, TextModel, Tokenizer};
use pretokenizers::PreTokenizer;
use sentencepiece::SentencePiece;
use vocabulary::{Fields, Vocabulary};

/// What helps where a file cannot.
const WAY_OUT: &str = "give a Hugging Face folder with the model's tokenizer.json by --tokenizer DIR";

/// Longest template that is compiled, in bytes.
const MAX_TEMPLATE: usize = 1 << 20;

/// Whether a model is a GGUF file, by its name.
#[must_use]
pub fn is_gguf(model: &Path) -> bool {
    model.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// Reads what a file says about text (blocking).
///
/// # Errors
/// When the file cannot be read, or has no tokenizer that is known; the key is named.
pub(super) fn load(file: &Path) -> Result<TextModel, TextError> {
    let failed = |problem: String| TextError::File { file: file.display().to_string(), problem };
    let gguf = Gguf::open(file).map_err(|error| failed(error.to_string()))?;
    text_model(gguf.metadata()).map_err(failed)
}

/// Tokens that end an answer, as far as a file names them: one that names none, or whose tokens cannot be used, has none (blocking).
///
/// # Errors
/// When the file cannot be read.
pub(super) fn ends(file: &Path) -> Result<Vec<u32>, TextError> {
    let gguf = Gguf::open(file)
        .map_err(|error| TextError::File { file: file.display().to_string(), problem: error.to_string() })?;
    let vocabulary = fields(gguf.metadata()).and_then(Vocabulary::new);
    Ok(vocabulary.map_or_else(|_unusable| Vec::new(), |vocabulary| vocabulary.end))
}

fn text_model(metadata: &Metadata) -> Result<TextModel, String> {
    let Some(kind) = metadata.text("tokenizer.ggml.model").map_err(shown)? else {
        return Err(format!("it has no tokenizer (no tokenizer.ggml.model): {WAY_OUT}"));
    };
    let vocabulary = Vocabulary::new(fields(metadata)?)?;
    let (bos, eos) = (vocabulary.text(vocabulary.bos).to_owned(), vocabulary.text(vocabulary.eos).to_owned());
    let template = template_source(metadata)?
        .map(|source| ChatTemplate::new(source, bos, eos).map(Arc::new))
        .transpose()
        .map_err(|error| format!("tokenizer.chat_template: {error}"))?;
    let end = vocabulary.end.clone();
    let tokenizer: Arc<dyn Tokenizer> = match kind {
        "gpt2" => Arc::new(byte_level(metadata, &vocabulary)?),
        "llama" => Arc::new(sentencepiece(metadata, vocabulary)?),
        other => {
            return Err(format!(
                "tokenizer.ggml.model is {other:?}, known are \"gpt2\" and \"llama\": {WAY_OUT}"
            ));
        }
    };
    Ok(TextModel { tokenizer, template, end })
}

fn shown(error: host_gguf::Error) -> String {
    error.to_string()
}

fn required<T>(value: Result<Option<T>, host_gguf::Error>, key: &str) -> Result<T, String> {
    value.map_err(shown)?.ok_or_else(|| format!("it has no {key}: {WAY_OUT}"))
}

fn fields(metadata: &Metadata) -> Result<Fields, String> {
    let (tokens, kinds) = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type");
    let id = |name: &str| metadata.unsigned(&format!("tokenizer.ggml.{name}")).map_err(shown);
    let flag = |name: &str| metadata.flag(&format!("tokenizer.ggml.{name}")).map_err(shown);
    Ok(Fields {
        tokens: required(metadata.texts(tokens), tokens)?.iter().map(str::to_owned).collect(),
        kinds: required(metadata.integers(kinds), kinds)?,
        bos: id("bos_token_id")?,
        eos: id("eos_token_id")?,
        end_of_turn: id("eot_token_id")?,
        end_of_message: id("eom_token_id")?,
        unknown: id("unknown_token_id")?,
        add_bos: flag("add_bos_token")?,
        add_eos: flag("add_eos_token")?,
    })
}

fn byte_level(
    metadata: &Metadata,
    vocabulary: &Vocabulary,
) -> Result<super::huggingface::HuggingFaceTokenizer, String> {
    let (name, merges) = ("tokenizer.ggml.pre", "tokenizer.ggml.merges");
    let pre = required(metadata.text(name), name)?;
    let pre = PreTokenizer::named(pre).ok_or_else(|| {
        format!("{name} is {pre:?}, a way of cutting text that is not known here: {WAY_OUT}")
    })?;
    let merges = required(metadata.texts(merges), merges)?;
    byte_level::tokenizer(vocabulary, merges.iter(), pre)
}

fn sentencepiece(metadata: &Metadata, vocabulary: Vocabulary) -> Result<SentencePiece, String> {
    let scores = "tokenizer.ggml.scores";
    let scores = required(metadata.numbers(scores), scores)?;
    let adds_space = metadata.flag("tokenizer.ggml.add_space_prefix").map_err(shown)?.unwrap_or(true);
    SentencePiece::new(vocabulary, &scores, adds_space)
}

/// The template for chat: the file's one, or of several by name the one named `default`.
fn template_source(metadata: &Metadata) -> Result<Option<String>, String> {
    for key in ["tokenizer.chat_template", "tokenizer.chat_template.default"] {
        match metadata.text(key).map_err(shown)? {
            Some(source) if source.len() > MAX_TEMPLATE => {
                return Err(format!("{key} has {} bytes; at most {MAX_TEMPLATE} are read", source.len()));
            }
            Some(source) if !source.is_empty() => return Ok(Some(source.to_owned())),
            _ => {}
        }
    }
    Ok(None)
}
