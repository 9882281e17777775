//! Checks that `--model` names a file or a folder. If it does not, the error says how to get a model.

use std::path::Path;

use super::{Refused, refused};
use crate::cli::settings::Settings;

/// A model that is small and free, as an example.
const EXAMPLE: &str = "HuggingFaceTB/SmolLM2-135M-Instruct";

/// Checks that `--model` names an existing file or folder, if the executor computes a model.
///
/// # Errors
/// When no path is given, or nothing is at the path. The error has a command that downloads a model.
pub(super) fn check(settings: &Settings) -> Result<(), Refused> {
    if !settings.executor().computes_a_model() {
        return Ok(());
    }
    match &settings.model {
        None => Err(refused(format!(
            "no model: give a GGUF file or a Hugging Face folder with --model. To get one:\n    {}\nor try --executor \
             synthetic, which needs none",
            download(EXAMPLE)
        ))),
        Some(path) => there(path),
    }
}

fn there(path: &Path) -> Result<(), Refused> {
    if path.exists() {
        return Ok(());
    }
    let shown = path.display();
    Err(refused(match path.to_str().filter(|name| is_hub_name(name)) {
        Some(name) => format!(
            "--model {shown}: no such file or folder here. If that is the model's name on the Hugging Face hub, download it \
             first:\n    {}",
            download(name)
        ),
        None => format!("--model {shown}: no such file or folder; give a GGUF file or a Hugging Face folder"),
    }))
}

/// A command that downloads a model, and the flag that serves it.
fn download(name: &str) -> String {
    let folder = name.rsplit('/').next().unwrap_or(name);
    format!(
        "pip install huggingface_hub && hf download {name} --local-dir {folder}    # then: --model {folder}"
    )
}

/// Whether this is an owner and a name of the Hugging Face hub.
fn is_hub_name(text: &str) -> bool {
    let is_plain = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|letter| letter.is_ascii_alphanumeric() || "._-".contains(letter))
    };
    // A file name, or a path into a folder that exists here, is a wrong path and no name on the hub.
    let is_path = |owner: &str, name: &str| name.ends_with(".gguf") || Path::new(owner).is_dir();
    text.split_once('/')
        .is_some_and(|(owner, name)| is_plain(owner) && is_plain(name) && !is_path(owner, name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::settings::ExecutorName;

    fn refusal(model: Option<&str>) -> String {
        let settings = Settings { model: model.map(Into::into), ..Settings::default() };
        check(&settings).unwrap_err().to_string()
    }

    #[test]
    fn a_name_of_the_hub_is_answered_with_the_command_that_downloads_it() {
        let said = refusal(Some("Qwen/Qwen3-0.6B"));
        assert!(said.contains("hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"), "{said}");
        assert!(said.contains("--model Qwen3-0.6B"), "{said}");
        for path in
            ["/nowhere/model", "./here/model", "a/b/c", "model.gguf", "models/model.gguf", "src/model"]
        {
            let said = refusal(Some(path));
            assert!(said.contains(path) && !said.contains("hf download"), "{said}");
        }
    }

    #[test]
    fn without_a_model_it_says_how_to_get_one_and_the_synthetic_executor_needs_none() {
        let said = refusal(None);
        assert!(said.contains("hf download") && said.contains("--executor synthetic"), "{said}");
        let synthetic = Settings { executor: Some(ExecutorName::Synthetic), ..Settings::default() };
        assert!(check(&synthetic).is_ok());
    }
}
