//! Tokenizers from a Hugging Face `tokenizer.json`.

mod longest;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use tokenizers::DecoderWrapper;

use super::decode::{TextStream, Utf8Stream, WindowStream};
use super::{Specials, TextError, Tokenizer};

/// Most bytes of a `tokenizer.json`. The largest that are known have 35 MB.
const MAX_FILE: u64 = 256 << 20;

/// A `tokenizer.json`, loaded.
pub struct HuggingFaceTokenizer {
    inner: tokenizers::Tokenizer,
    special: HashSet<u32>,
    vocabulary: u32,
    /// Whether tokens are pieces of the text's bytes, written in GPT-2's alphabet of letters.
    byte_level: bool,
    longest: Option<longest::Longest>,
}

impl HuggingFaceTokenizer {
    /// Reads the file (blocking).
    ///
    /// # Errors
    /// When it cannot be read or is no tokenizer.
    pub fn load(file: &Path) -> Result<Self, TextError> {
        let failed = |problem: String| TextError::File { file: file.display().to_string(), problem };
        let bytes = host_ownership::read_up_to(file, MAX_FILE).map_err(|error| failed(error.to_string()))?;
        let inner = tokenizers::Tokenizer::from_bytes(bytes);
        let inner = inner.map_err(|error| failed(format!("not a tokenizer: {error}")))?;
        Self::new(inner).map_err(failed)
    }

    /// A tokenizer that was built in memory, for a model with this many ids. The tokenizer may not know all of them.
    ///
    /// # Errors
    /// When the library refuses the tokenizer.
    pub(super) fn with_vocabulary(inner: tokenizers::Tokenizer, vocabulary: u32) -> Result<Self, String> {
        Ok(Self { vocabulary, ..Self::new(inner)? })
    }

    fn new(mut inner: tokenizers::Tokenizer) -> Result<Self, String> {
        // Some published files set these for training, but a server must not cut or fill prompts.
        inner.with_truncation(None).map_err(|error| error.to_string())?;
        inner.with_padding(None);
        // By default each thread keeps 10,000 words of up to 8 KB with their tokens, and no request counts them. Encoding 1.4 MB of
        // prose and source text takes 0.47 s of a core with that and 0.45 s without.
        let mut model = inner.get_model().clone();
        model.resize_cache(0);
        inner.with_model(model);
        let added = inner.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special).map(|(&id, _)| id).collect();
        let last_added = added.keys().max().map_or(0, |&id| id.saturating_add(1));
        let size = u32::try_from(inner.get_vocab_size(true)).unwrap_or(u32::MAX);
        let byte_level = inner.get_decoder().is_some_and(is_byte_level);
        let longest = longest::longest_token(&inner);
        Ok(Self { inner, special, vocabulary: size.max(last_added), byte_level, longest })
    }
}

fn is_byte_level(decoder: &DecoderWrapper) -> bool {
    match decoder {
        DecoderWrapper::ByteLevel(_) => true,
        DecoderWrapper::Sequence(sequence) => {
            matches!(sequence.get_decoders(), [DecoderWrapper::ByteLevel(_)])
        }
        _ => false,
    }
}

/// The byte behind a letter of the byte-level alphabet: printable Latin-1 letters stand for themselves, the other 68 bytes for
/// the letters from U+0100 on, in order.
fn letter_byte(letter: char) -> Option<u8> {
    let own = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let code = u32::from(letter);
    if let Ok(byte) = u8::try_from(code) {
        return own(byte).then_some(byte);
    }
    let index = usize::try_from(code.checked_sub(0x100)?).ok()?;
    (0..=u8::MAX).filter(|&byte| !own(byte)).nth(index)
}

impl Tokenizer for HuggingFaceTokenizer {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        self.inner
            .encode_fast(text, add_special)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| TextError::Encode(error.to_string()))
    }

    fn token_bytes(&self, token: u32) -> Vec<u8> {
        let Some(name) = self.inner.id_to_token(token) else { return Vec::new() };
        if self.is_special(token) {
            return name.into_bytes();
        }
        if self.byte_level {
            let bytes: Option<Vec<u8>> = name.chars().map(letter_byte).collect();
            return bytes.unwrap_or_else(|| name.into_bytes());
        }
        let fallback = name
            .strip_prefix("<0x")
            .and_then(|rest| rest.strip_suffix('>'))
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match fallback {
            Some(byte) => vec![byte],
            None => name.replace('▁', " ").into_bytes(),
        }
    }

    fn is_special(&self, token: u32) -> bool {
        self.special.contains(&token)
    }

    fn vocabulary(&self) -> u32 {
        self.vocabulary
    }

    fn least_tokens(&self, text: &str) -> Option<usize> {
        Some(self.longest.as_ref()?.least_tokens(text))
    }

    fn stream(self: Arc<Self>, specials: Specials) -> Box<dyn TextStream> {
        if self.byte_level {
            return Box::new(Utf8Stream::new(self, specials));
        }
        Box::new(WindowStream::new(move |tokens: &[u32]| {
            self.inner.decode(tokens, specials == Specials::Hidden).unwrap_or_default()
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A byte-level BPE with all 256 letters, three merges and two added tokens.
    fn byte_level() -> Arc<HuggingFaceTokenizer> {
        let own = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let mut next = 0x100;
        let mut vocabulary = serde_json::Map::new();
        for byte in 0..256_u32 {
            let code = if own(byte) { byte } else { next };
            next += u32::from(!own(byte));
            vocabulary.insert(char::from_u32(code).unwrap().to_string(), byte.into());
        }
        for (id, token) in [(256, "he"), (257, "Ġhe"), (258, "ðŁ")] {
            vocabulary.insert(token.into(), id.into());
        }
        let file = serde_json::json!({
            "version": "1.0",
            "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
            "added_tokens": [
                {"id": 259, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
                 "normalized": false, "special": true},
                {"id": 260, "content": "<tool call>", "single_word": false, "lstrip": false, "rstrip": false,
                 "normalized": false, "special": false}],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": ["h e", "Ġ he", "ð Ł"]},
        });
        let inner = file.to_string().parse().unwrap();
        Arc::new(HuggingFaceTokenizer::new(inner).unwrap())
    }

    #[test]
    fn text_survives_the_way_there_and_back_one_token_at_a_time() {
        let tokenizer = byte_level();
        let text = "he said: é 漢 🦀\n\t<tool call>ok";
        let tokens = tokenizer.encode(text, true).unwrap();
        assert!(tokens.len() > 3, "the file's truncation is not applied");
        assert!(tokens.contains(&258) && tokens.contains(&260), "{tokens:?}");
        let mut stream = Arc::clone(&tokenizer).stream(Specials::default());
        let mut back: String = tokens.iter().map(|&token| stream.push(token)).collect();
        back.push_str(&stream.finish());
        assert_eq!(back, text);
    }

    #[test]
    fn any_tokens_stream_to_what_the_library_decodes_at_once() {
        let tokenizer = byte_level();
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..500 {
            let tokens: Vec<u32> = (0..10)
                .map(|_| [104, 256, 257, 258, 259, 260, 0xa6, 0x80, 0xe2, 0xff][random.usize(..10)])
                .collect();
            let mut stream = Arc::clone(&tokenizer).stream(Specials::default());
            let mut text: String = tokens.iter().map(|&token| stream.push(token)).collect();
            text.push_str(&stream.finish());
            assert_eq!(text, tokenizer.inner.decode(&tokens, true).unwrap(), "{tokens:?}");
        }
    }

    #[test]
    fn token_bytes_are_the_texts_bytes() {
        let tokenizer = byte_level();
        assert_eq!(tokenizer.token_bytes(257), b" he");
        assert_eq!(tokenizer.token_bytes(258), [0xf0, 0x9f]);
        assert_eq!(tokenizer.token_bytes(259), b"<|end|>");
        assert_eq!(tokenizer.token_bytes(9999), b"");
        assert_eq!(tokenizer.vocabulary(), 261);
        assert!(tokenizer.is_special(259) && !tokenizer.is_special(260));
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tokenizer.json");
        std::fs::write(&file, "{}").unwrap();
        let error = HuggingFaceTokenizer::load(&file).err().unwrap().to_string();
        assert!(error.contains("tokenizer.json") && error.contains("not a tokenizer"), "{error}");
    }
}
