//! Byte-level models: merges of letters that stand for bytes, as GPT-2 introduced them.

use serde_json::{Value as Json, json};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};

use super::pretokenizers::PreTokenizer;
use super::vocabulary::{Kind, Vocabulary};
use crate::text::huggingface::HuggingFaceTokenizer;

/// Builds the tokenizer that a `tokenizer.json` of the same model would describe.
///
/// # Errors
/// The key that cannot be used, and why.
pub(super) fn tokenizer<'a>(
    vocabulary: &Vocabulary,
    merges: impl Iterator<Item = &'a str>,
    pre: &PreTokenizer,
) -> Result<HuggingFaceTokenizer, String> {
    let ids: Vocab = vocabulary
        .iter()
        .filter(|(_, token, kind)| !token.is_empty() && *kind != Kind::Unused)
        .map(|(id, token, _)| (token.to_owned(), id))
        .collect();
    let merges = merges
        .enumerate()
        .map(|(index, merge)| {
            parts(merge, &ids)
                .map_err(|problem| format!("tokenizer.ggml.merges[{index}] is {merge:?}: {problem}"))
        })
        .collect::<Result<Vec<(String, String)>, String>>()?;
    let model = BPE::builder()
        .vocab_and_merges(ids, merges)
        .ignore_merges(pre.ignores_merges)
        .build()
        .map_err(|error| format!("tokenizer.ggml.merges cannot be used: {error}"))?;

    let mut tokenizer = tokenizers::Tokenizer::new(model);
    let failed = |error: tokenizers::Error| format!("the tokenizer cannot be put together: {error}");
    if pre.composes {
        tokenizer
            .with_normalizer(Some(made::<NormalizerWrapper>(json!({"type": "NFC"}))?))
            .map_err(failed)?;
    }
    tokenizer.with_pre_tokenizer(Some(made::<PreTokenizerWrapper>(pre.to_json())?));
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    tokenizer.with_decoder(Some(made::<DecoderWrapper>(bytes)?));
    tokenizer.with_post_processor(frame(vocabulary, pre)?);

    let added = |hidden: bool| {
        let is_added = move |kind: Kind| matches!(kind, Kind::Control | Kind::Unknown | Kind::UserDefined);
        vocabulary
            .iter()
            .filter(move |(id, _, kind)| is_added(*kind) && vocabulary.is_hidden(*id) == hidden)
            .map(move |(_, token, _)| AddedToken::from(token, hidden).normalized(false))
    };
    tokenizer.add_special_tokens(added(true)).map_err(failed)?;
    tokenizer.add_tokens(added(false)).map_err(failed)?;
    HuggingFaceTokenizer::with_vocabulary(tokenizer, vocabulary.len())
}

/// The two tokens of a merge. Tokens of this alphabet have no spaces, so that one separates them.
fn parts(merge: &str, ids: &Vocab) -> Result<(String, String), String> {
    let (left, right) = merge.split_once(' ').ok_or("not two tokens")?;
    for token in [left, right, &format!("{left}{right}")] {
        if !ids.contains_key(token) {
            return Err(format!("{token:?} is no token"));
        }
    }
    Ok((left.to_owned(), right.to_owned()))
}

/// The post-processor that adds `bos` and `eos` to a plain prompt, if it has them.
fn frame(vocabulary: &Vocabulary, pre: &PreTokenizer) -> Result<Option<PostProcessorWrapper>, String> {
    let (bos, eos) = vocabulary.frame(pre.adds_bos);
    if bos.is_none() && eos.is_none() {
        return Ok(None);
    }
    let special = |id: Option<u32>, kind: u32| {
        id.map(|_| json!({"SpecialToken": {"id": vocabulary.text(id), "type_id": kind}}))
    };
    let around = |sequence: &str, kind: u32| -> Vec<Json> {
        let text = json!({"Sequence": {"id": sequence, "type_id": kind}});
        special(bos, kind).into_iter().chain([text]).chain(special(eos, kind)).collect()
    };
    let tokens: serde_json::Map<String, Json> = [bos, eos]
        .into_iter()
        .flatten()
        .map(|id| {
            let text = vocabulary.text(Some(id));
            (text.to_owned(), json!({"id": text, "ids": [id], "tokens": [text]}))
        })
        .collect();
    let pair = [around("A", 0), around("B", 1)].concat();
    let template = json!({"type": "TemplateProcessing", "single": around("A", 0), "pair": pair, "special_tokens": tokens});
    made(template).map(Some)
}

/// Makes a part of a tokenizer from its JSON in a `tokenizer.json`.
fn made<T: serde::de::DeserializeOwned>(json: Json) -> Result<T, String> {
    serde_json::from_value(json).map_err(|error| format!("the tokenizer cannot be put together: {error}"))
}
