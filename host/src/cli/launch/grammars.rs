//! The vocabulary over which a worker compiles the grammars of requests.

use std::sync::Arc;

use anyhow::Context;
use host_core::Config;
use host_executor::ModelShape;
use host_grammar::Vocabulary;
use host_worker::{Grammars, Patience};

use super::text_model;
use crate::cli::settings::Settings;

/// Grammars over the model's vocabulary, which is read when the first grammar comes. `None` for an executor that computes no model.
pub(super) fn grammars(
    settings: &Settings,
    config: &Config,
    shape: &ModelShape,
) -> anyhow::Result<Option<Arc<Grammars>>> {
    if !settings.executor().computes_a_model() {
        return Ok(None);
    }
    let settings = settings.clone();
    let width = u32::try_from(shape.vocabulary).unwrap_or(u32::MAX);
    let read = move || {
        let text = text_model(&settings).map_err(|error| error.to_string())?;
        let tokenizer = text.tokenizer;
        Ok(Vocabulary::new(width, |id| (tokenizer.token_bytes(id), tokenizer.is_special(id))))
    };
    let grammars = Grammars::new(Box::new(read), Patience::of(config))
        .context("no threads for the grammars of requests")?;
    Ok(Some(Arc::new(grammars)))
}
