//! How byte-level models cut text into words before merging, by the name in `tokenizer.ggml.pre`.
//!
//! A GGUF file only has the name, so the expressions are those of the models' own `tokenizer.json`.

use serde_json::{Value as Json, json};

/// What a name stands for.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    /// Each expression in turn cuts out what it matches from what those before it left.
    splits: &'static [&'static str],
    /// A word that is a token as a whole is not put together by merges.
    pub ignores_merges: bool,
    /// Text is brought into Unicode's composed form first.
    pub composes: bool,
    /// A plain prompt begins with `bos` unless the file says otherwise.
    pub adds_bos: bool,
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK_WORDS: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
/// Digits one by one.
const DIGIT: &str = r"\p{N}";

const PLAIN: PreTokenizer =
    PreTokenizer { splits: &[GPT2], ignores_merges: false, composes: false, adds_bos: false };

/// The names, and what they stand for.
const KNOWN: &[(&[&str], PreTokenizer)] = &[
    (
        &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "midm-2.0", "lfm2"],
        PreTokenizer { splits: &[LLAMA3], ignores_merges: true, adds_bos: true, ..PLAIN },
    ),
    (&["smaug-bpe", "dbrx", "glm4", "chatglm-bpe"], PreTokenizer { splits: &[LLAMA3], ..PLAIN }),
    (&["qwen2"], PreTokenizer { splits: &[QWEN2], composes: true, ..PLAIN }),
    (&["deepseek-r1-qwen", "megrez", "hunyuan"], PreTokenizer { splits: &[QWEN2], ..PLAIN }),
    (
        &["smollm", "starcoder", "refact", "codeshell", "minerva-7b"],
        PreTokenizer { splits: &[DIGIT, GPT2], ..PLAIN },
    ),
    (&["gpt-2", "phi-2", "trillion", "mellum", "a.x-4.0"], PLAIN),
    (
        &["deepseek-coder"],
        PreTokenizer {
            splits: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGIT], ..PLAIN
        },
    ),
    (
        &["deepseek-v3", "hunyuan-dense"],
        PreTokenizer { splits: &[r"\p{N}{1,3}", "[一-龥\u{3040}-ゟ゠-ヿ]+", DEEPSEEK_WORDS], ..PLAIN },
    ),
    (&["gpt-4o"], PreTokenizer { splits: &[GPT4O], ignores_merges: true, ..PLAIN }),
    (
        &["tekken", "pixtral"],
        PreTokenizer { splits: &[TEKKEN], ignores_merges: true, adds_bos: true, ..PLAIN },
    ),
    // What converters write that do not know the model's own: as llama.cpp reads it.
    (
        &["default"],
        PreTokenizer { splits: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"], ..PLAIN },
    ),
];

impl PreTokenizer {
    /// What a name stands for, if it is known.
    pub fn named(name: &str) -> Option<&'static Self> {
        KNOWN.iter().find(|(names, _)| names.contains(&name)).map(|(_, pre)| pre)
    }

    /// As a `tokenizer.json` writes it.
    pub fn to_json(&self) -> Json {
        let splits = self.splits.iter().map(
            |regex| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false}),
        );
        let bytes =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        json!({"type": "Sequence", "pretokenizers": splits.chain([bytes]).collect::<Vec<Json>>()})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_one_is_an_expression_that_the_library_takes() {
        for (names, pre) in KNOWN {
            serde_json::from_value::<tokenizers::PreTokenizerWrapper>(pre.to_json())
                .unwrap_or_else(|error| panic!("{names:?}: {error}"));
        }
    }
}
