//! How byte-level models cut text into words before merging, by their names in `tokenizer.ggml.pre`.
//!
//! A GGUF file has only the name. The expressions come from the models' own `tokenizer.json`.

use serde_json::{Value as Json, json};

/// The way to cut text that a name stands for, with related settings.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    /// The expressions that cut the text, in this order. Each cuts its matches out of the text that the expressions before it
    /// left.
    splits: &'static [&'static str],
    /// Whether a word that is one token becomes that token without merges.
    pub ignores_merges: bool,
    /// Whether the text is first brought into Unicode's composed form.
    pub composes: bool,
    /// Whether a plain prompt begins with `bos` unless the file says otherwise.
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

/// The known names and their meanings.
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
    // The name that converters write if they do not know the model's own. Cuts text as llama.cpp does.
    (
        &["default"],
        PreTokenizer { splits: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"], ..PLAIN },
    ),
];

impl PreTokenizer {
    /// The entry for a name, if the name is known.
    pub fn named(name: &str) -> Option<&'static Self> {
        KNOWN.iter().find(|(names, _)| names.contains(&name)).map(|(_, pre)| pre)
    }

    /// The JSON of this entry in a `tokenizer.json`.
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
