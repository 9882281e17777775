//! Properties of the model that are known without its weights.

use std::path::Path;
use std::time::Duration;

use host_core::pool::Retained;
use host_executor::group::Seat;
use host_executor::synthetic::{self, Cost, Hold, Synthetic, SyntheticShape};
use host_executor::{Executor, ExecutorError, ModelShape, Sliding};
use host_executor::{cpu, cuda};
use host_front::text::TextModel;
use host_front::text::model::gguf::is_gguf;

use super::{Refused, gpu, refused};
use crate::cli::settings::{ExecutorName, Settings};

/// Longest step that may be modelled: a worker that stops waits for the current step.
const LONGEST_STEP: Duration = Duration::from_secs(60);

/// The model's sizes that determine the layout of its KV.
///
/// # Errors
/// When the model cannot be read, or not be served.
pub(super) fn shape(settings: &Settings) -> Result<ModelShape, Refused> {
    let mut shape = match settings.executor() {
        ExecutorName::Synthetic => {
            let executor = synthetic(settings, Seat::alone()).map_err(|error| refused(error.to_string()))?;
            executor.shape().clone()
        }
        ExecutorName::Cpu => cpu::read_shape(path(settings)?).map_err(not_served)?,
        ExecutorName::Cuda => {
            cuda::read_shape(path(settings)?, &gpu::options(settings)).map_err(not_served)?
        }
    };
    if let Some(dtype) = settings.kv_dtype {
        shape.kv_dtype = dtype.into();
    }
    Ok(shape)
}

/// Path of the model that an executor computes.
fn path(settings: &Settings) -> Result<&Path, Refused> {
    settings.model.as_deref().ok_or_else(|| {
        refused("no model: give a Hugging Face directory or a .gguf file with --model, or use --executor synthetic")
    })
}

fn not_served(error: impl std::fmt::Display) -> Refused {
    refused(format!("the model cannot be served: {error}"))
}

/// Makes the synthetic executor for one rank.
///
/// # Errors
/// When `[synthetic]` contradicts itself, or a step would take longer than [`LONGEST_STEP`].
pub(super) fn synthetic(settings: &Settings, seat: Seat) -> Result<Synthetic, ExecutorError> {
    let given = settings.synthetic.clone().unwrap_or_default();
    let standard = SyntheticShape::default();
    let sliding = match (given.sliding_layers, given.window) {
        (Some(layers), Some(window)) => Some(Sliding { layers, window }),
        (None, None) => None,
        _ => {
            return Err(ExecutorError::Failed(
                "[synthetic] sliding-layers and window belong together: give both, or neither".to_owned(),
            ));
        }
    };
    let shape = SyntheticShape {
        layers: given.layers.unwrap_or(standard.layers),
        sliding,
        state_layers: given.state_layers,
        kv_heads: given.kv_heads.unwrap_or(standard.kv_heads),
        head_dim: given.head_dim.unwrap_or(standard.head_dim),
        vocabulary: given.vocabulary.unwrap_or(standard.vocabulary),
        max_positions: given.max_positions.unwrap_or(standard.max_positions),
        kv_dtype: settings.kv_dtype.map_or(standard.kv_dtype, Into::into),
    };
    let cost = Cost {
        step: Duration::from_micros(given.step_us),
        prefill_token: Duration::from_micros(given.prefill_token_us),
        sequence: Duration::from_micros(given.sequence_us),
    };
    let (chunk, batch) = (settings.chunk_tokens(synthetic::MATH), settings.max_batch());
    if cost.step_of(chunk as usize, batch as usize) > LONGEST_STEP {
        return Err(ExecutorError::Failed(format!(
            "[synthetic] a step of {chunk} prompt tokens and {batch} sequences would take more than {} s: lower step-us ({}), \
             prefill-token-us ({}) or sequence-us ({})",
            LONGEST_STEP.as_secs(),
            given.step_us,
            given.prefill_token_us,
            given.sequence_us
        )));
    }
    let hold = given.hold_file.map(|file| Hold { file, from: given.hold_from });
    Ok(Synthetic::for_rank(shape, cost, seat)?.with_hold(hold))
}

/// What some of the model's layers retain instead of the KV of every token, if the model can be read.
#[must_use]
pub fn beside(settings: &Settings) -> Option<Retained> {
    let groups = shape(settings).map(|shape| shape.groups()).unwrap_or_default();
    groups.iter().map(|of| of.needs).find(|needs| *needs != Retained::All)
}

/// The model's text side, for a router and for grammars.
///
/// # Errors
/// When the tokenizer or the chat template cannot be used.
pub fn text_model(settings: &Settings) -> Result<TextModel, Refused> {
    let mut text = own_text_model(settings)?;
    if let Some(file) = settings.chat_template.as_deref() {
        text = text
            .with_template(file)
            .map_err(|error| refused(format!("--chat-template cannot be used: {error}")))?;
    }
    text.dialect.calls = settings.tool_parser.map(Into::into);
    text.dialect.thinks = settings.reasoning_parser.is_some();
    Ok(text)
}

fn own_text_model(settings: &Settings) -> Result<TextModel, Refused> {
    let model = settings.model.as_deref();
    if let Some(folder) = settings.tokenizer.as_deref() {
        return TextModel::load_instead(folder, model)
            .map_err(|error| refused(format!("--tokenizer cannot be used: {error}")));
    }
    let with_tokenizer = model.filter(|model| {
        settings.executor().computes_a_model() || is_gguf(model) || model.join("tokenizer.json").exists()
    });
    match with_tokenizer {
        Some(model) => TextModel::load(model)
            .map_err(|error| refused(format!("the model's tokenizer cannot be used: {error}"))),
        None if settings.executor() == ExecutorName::Synthetic => {
            let shape = shape(settings)?;
            Ok(TextModel::bytes(u32::try_from(shape.vocabulary).unwrap_or(u32::MAX)))
        }
        None => Err(refused("no model: give a Hugging Face directory or a .gguf file with --model")),
    }
}

#[cfg(test)]
mod tests {
    use host_tests::gguf::GgufFile;

    use super::*;

    #[test]
    fn a_file_without_a_tokenizer_is_refused_with_the_flag_that_helps() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model.gguf");
        std::fs::write(&model, GgufFile::default().bytes()).unwrap();
        let settings =
            Settings { executor: Some(ExecutorName::Synthetic), model: Some(model), ..Settings::default() };
        let error = text_model(&settings).err().unwrap().to_string();
        assert!(error.contains("model.gguf") && error.contains("--tokenizer DIR"), "{error}");

        let error = text_model(&Settings { tokenizer: Some(folder.path().to_owned()), ..settings.clone() });
        let error = error.err().unwrap().to_string();
        assert!(error.contains("--tokenizer cannot be used") && error.contains("tokenizer.json"), "{error}");

        let tokenizer = r#"{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}"#;
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer).unwrap();
        let text = text_model(&Settings { tokenizer: Some(folder.path().to_owned()), ..settings }).unwrap();
        assert_eq!(text.tokenizer.vocabulary(), 1);
    }
}
