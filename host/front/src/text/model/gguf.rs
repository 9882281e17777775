//! Reads the tokenizer and the chat template from a GGUF file's metadata.

mod byte_level;
mod pretokenizers;
mod sentencepiece;
mod vocabulary;

use std::path::Path;
use std::sync::Arc;

use host_gguf::{Gguf, Metadata};

use super::{Dialect, TextModel};
use crate::text::huggingface::HuggingFaceTokenizer;
use crate::text::{ChatTemplate, TextError, Tokenizer};
use pretokenizers::PreTokenizer;
use sentencepiece::SentencePiece;
use vocabulary::{Fields, Vocabulary};

/// The advice for files without a usable tokenizer.
const WAY_OUT: &str = "give a Hugging Face folder with the model's tokenizer.json by --tokenizer DIR";

/// Longest template that is compiled, in bytes.
const MAX_TEMPLATE: usize = 1 << 20;

/// Whether a path is that of a GGUF file, even if the file is missing. All other models are directories.
#[must_use]
pub fn is_gguf(model: &Path) -> bool {
    let named = || model.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    model.is_file() || !model.is_dir() && named()
}

/// Reads the text side of a model from a file (blocking).
///
/// # Errors
/// When the file cannot be read, or has no tokenizer that is known. The error names the key.
pub(super) fn load(file: &Path) -> Result<TextModel, TextError> {
    let failed = |problem: String| TextError::File { file: file.display().to_string(), problem };
    let gguf = Gguf::open(file).map_err(|error| failed(error.to_string()))?;
    text_model(gguf.metadata()).map_err(failed)
}

/// The tokens that end an answer, as a file names them (blocking). Empty for a file that names none, or whose tokens cannot be
/// used.
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
    Ok(TextModel { tokenizer, template, end, dialect: Dialect::default() })
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

fn byte_level(metadata: &Metadata, vocabulary: &Vocabulary) -> Result<HuggingFaceTokenizer, String> {
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

/// The source of the chat template: the file's only one, or of several the one that is named `default`.
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

#[cfg(test)]
mod tests {
    use host_tests::gguf::GgufFile;
    use serde_json::json;

    use super::*;

    /// All 256 letters of the byte-level alphabet in the order of their bytes, as ids 3 to 258, and some more tokens.
    fn byte_level_file() -> GgufFile {
        let mut tokens: Vec<String> = ["<s>", "</s>", "<think>"].map(str::to_owned).to_vec();
        let mut next = 0x100;
        for byte in 0..256_u32 {
            let own = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
            tokens.push(char::from_u32(if own { byte } else { next }).unwrap().to_string());
            next += u32::from(!own);
        }
        tokens.extend(["he", "Ġhe", "ðŁ", "[PAD]", "[PAD]"].map(str::to_owned));
        let mut kinds = vec![1; tokens.len()];
        kinds[..3].copy_from_slice(&[3, 3, 4]);
        kinds[262..].copy_from_slice(&[5, 5]);
        let mut file = GgufFile::default();
        file.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "smollm");
        file.texts("tokenizer.ggml.tokens", tokens.iter().map(String::as_str));
        file.integers("tokenizer.ggml.token_type", &kinds);
        file.texts("tokenizer.ggml.merges", ["h e", "Ġ he", "ð Ł"]);
        file.u32("tokenizer.ggml.bos_token_id", 0).u32("tokenizer.ggml.eos_token_id", 1);
        file.text("tokenizer.chat_template", "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}");
        file
    }

    fn sentencepiece_file() -> GgufFile {
        let mut file = GgufFile::default();
        file.text("tokenizer.ggml.model", "llama");
        file.texts("tokenizer.ggml.tokens", ["<unk>", "<bos>", "<end_of_turn>", "a", "▁", "▁a"]);
        file.integers("tokenizer.ggml.token_type", &[2, 3, 3, 1, 1, 1]);
        file.numbers("tokenizer.ggml.scores", &[0.0, 0.0, 0.0, -2.0, -3.0, -1.0]);
        file.u32("tokenizer.ggml.bos_token_id", 1).u32("tokenizer.ggml.unknown_token_id", 0);
        file
    }

    fn read(file: &GgufFile) -> Result<TextModel, String> {
        text_model(Gguf::read(file.bytes().as_slice()).unwrap().metadata())
    }

    #[test]
    fn a_byte_level_file_becomes_a_tokenizer_with_its_special_tokens_and_template() {
        let model = read(&byte_level_file()).unwrap();
        let tokens = model.tokenizer.encode("he he12<think></s>🦀", false).unwrap();
        let names: Vec<Vec<u8>> = tokens.iter().map(|token| model.tokenizer.token_bytes(*token)).collect();
        let expected: [&[u8]; 9] =
            [b"he", b" he", b"1", b"2", b"<think>", b"</s>", &[0xf0, 0x9f], &[0xa6], &[0x80]];
        assert_eq!(names, expected);
        assert_eq!(model.end, [1]);
        assert_eq!(model.tokenizer.vocabulary(), 264, "ids without a use count");
        assert!(model.tokenizer.token_bytes(263).is_empty());
        let mut stream = Arc::clone(&model.tokenizer).stream(crate::text::Specials::default());
        let text: String = tokens.iter().map(|&token| stream.push(token)).collect();
        assert_eq!(text, "he he12<think>🦀", "what the model steers itself with does not show");
        let template = model.template.unwrap();
        let prompt = template.render(&json!([{"content": "x"}]), &serde_json::Map::new(), 0).unwrap();
        assert_eq!(prompt, "<s>x</s>");
    }

    #[test]
    fn a_plain_prompt_begins_and_ends_as_the_file_says_or_its_kind_does() {
        let framed = |change: fn(&mut GgufFile) -> &mut GgufFile| {
            let mut file = byte_level_file();
            change(&mut file);
            read(&file).unwrap().tokenizer.encode("!", true).unwrap()
        };
        let mark = 3 + u32::from(b'!');
        assert_eq!(framed(|file| file), [mark]);
        assert_eq!(framed(|file| file.text("tokenizer.ggml.pre", "llama-bpe")), [0, mark]);
        let both = framed(|file| {
            file.flag("tokenizer.ggml.add_bos_token", true).flag("tokenizer.ggml.add_eos_token", true)
        });
        assert_eq!(both, [0, mark, 1]);

        let mut file = sentencepiece_file();
        assert_eq!(read(&file).unwrap().tokenizer.encode("a", true).unwrap(), [1, 5], "a space before, too");
        file.flag("tokenizer.ggml.add_bos_token", false).flag("tokenizer.ggml.add_space_prefix", false);
        let model = read(&file).unwrap();
        assert_eq!(model.tokenizer.encode("a a", true).unwrap(), [3, 5]);
        assert_eq!((model.end.as_slice(), model.template.is_none()), (&[2][..], true));
    }

    #[test]
    fn of_several_templates_the_default_one_is_for_chat() {
        let mut file = byte_level_file();
        file.remove("tokenizer.chat_template");
        file.text("tokenizer.chat_template.tool_use", "no").text("tokenizer.chat_template.default", "yes");
        let template = read(&file).unwrap().template.unwrap();
        assert_eq!(template.render(&json!([]), &serde_json::Map::new(), 0).unwrap(), "yes");
    }

    #[test]
    fn what_cannot_be_used_is_refused_by_its_key_and_with_a_way_out() {
        type Case = (fn(&mut GgufFile) -> &mut GgufFile, &'static [&'static str]);
        let cases: [Case; 12] = [
            (|file| file.remove("tokenizer.ggml.model"), &["no tokenizer", "--tokenizer DIR"]),
            (|file| file.text("tokenizer.ggml.model", "t5"), &["\"t5\"", "--tokenizer DIR"]),
            (
                |file| file.text("tokenizer.ggml.pre", "dragon"),
                &["ggml.pre is \"dragon\"", "--tokenizer DIR"],
            ),
            (|file| file.remove("tokenizer.ggml.pre"), &["no tokenizer.ggml.pre", "--tokenizer DIR"]),
            (|file| file.remove("tokenizer.ggml.tokens"), &["no tokenizer.ggml.tokens", "--tokenizer DIR"]),
            (|file| file.remove("tokenizer.ggml.merges"), &["no tokenizer.ggml.merges", "--tokenizer DIR"]),
            (|file| file.u32("tokenizer.ggml.tokens", 1), &["tokenizer.ggml.tokens"]),
            (|file| file.texts("tokenizer.ggml.merges", ["h e", "he"]), &["merges[1] is \"he\"", "not two"]),
            (|file| file.texts("tokenizer.ggml.merges", ["h x"]), &["merges[0]", "\"hx\" is no token"]),
            // The library does not check such a merge, and would index out of bounds.
            (|file| file.texts("tokenizer.ggml.merges", ["<think> <think>"]), &["merges[0]", "is no token"]),
            (|file| file.text("tokenizer.chat_template", "{% if %}"), &["chat_template", "not a template"]),
            (
                |file| file.text("tokenizer.chat_template", &" ".repeat(MAX_TEMPLATE + 1)),
                &["at most 1048576"],
            ),
        ];
        for (change, named) in cases {
            let mut file = byte_level_file();
            change(&mut file);
            let error = read(&file).err().unwrap();
            assert!(named.iter().all(|word| error.contains(word)), "{error}");
        }
        let mut file = sentencepiece_file();
        let error = read(file.remove("tokenizer.ggml.scores")).err().unwrap();
        assert!(error.contains("no tokenizer.ggml.scores") && error.contains("--tokenizer DIR"), "{error}");
    }

    #[test]
    fn a_file_that_is_none_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        let error = TextModel::load(&file).err().unwrap().to_string();
        assert!(error.starts_with("cannot use ") && error.contains("model.gguf: "), "{error}");
        std::fs::write(&file, "no model").unwrap();
        let error = TextModel::load(&file).err().unwrap().to_string();
        assert!(error.contains("model.gguf: ") && error.contains("GGUF"), "{error}");
    }

    #[test]
    fn a_folders_tokenizer_stands_in_and_answers_still_end_where_the_file_says() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = json!({"version": "1.0", "added_tokens": [],
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}});
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        std::fs::write(folder.path().join("config.json"), r#"{"eos_token_id": [7, 2]}"#).unwrap();
        let model = folder.path().join("model.gguf");
        let mut file = sentencepiece_file();
        std::fs::write(&model, file.bytes()).unwrap();
        let text = TextModel::load_instead(folder.path(), Some(&model)).unwrap();
        assert_eq!(text.tokenizer.encode("b", true).unwrap(), [1]);
        assert_eq!(text.end, [7, 2]);
        file.u32("tokenizer.ggml.eos_token_id", 5);
        std::fs::write(&model, file.bytes()).unwrap();
        assert_eq!(TextModel::load_instead(folder.path(), Some(&model)).unwrap().end, [7, 2, 5]);
        std::fs::write(&model, GgufFile::default().bytes()).unwrap();
        assert_eq!(TextModel::load_instead(folder.path(), Some(&model)).unwrap().end, [7, 2]);
        assert_eq!(TextModel::load_instead(folder.path(), None).unwrap().end, [7, 2]);
    }
}
