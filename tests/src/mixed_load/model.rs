//! What computes the answers.

use std::path::Path;

use crate::model::TinyModel;

/// What computes the answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// No model: KV that proves itself. It has no chat template and no vocabulary for grammars.
    Synthetic,
    /// A small made-up model on the CPU.
    Cpu,
}

impl Model {
    /// Reads the name of an executor.
    ///
    /// # Errors
    /// When it is another one.
    pub fn read(name: &str) -> Result<Self, String> {
        match name {
            "synthetic" => Ok(Self::Synthetic),
            "cpu" => Ok(Self::Cpu),
            _ => Err(format!("the executor {name:?} is not synthetic or cpu")),
        }
    }

    /// The flags of all processes that name it. A made-up model is written into `folder`.
    ///
    /// # Panics
    /// When it cannot be written.
    #[must_use]
    pub fn flags(self, folder: &Path) -> Vec<String> {
        let mut flags = vec!["--executor".to_owned()];
        match self {
            Self::Synthetic => flags.push("synthetic".to_owned()),
            Self::Cpu => {
                TinyModel { seed: 22, ..TinyModel::small() }.write(folder).expect("the model is written");
                let template = folder.join("template.jinja");
                std::fs::write(&template, CHAT_TEMPLATE).expect("the chat template is written");
                flags.extend(
                    ["cpu", "--threads", "1", "--tool-parser", "hermes", "--model"].map(str::to_owned),
                );
                flags.push(folder.display().to_string());
                flags.extend(["--chat-template".to_owned(), template.display().to_string()]);
            }
        }
        flags
    }
}

/// A chat template that shows tools, for the made-up model.
const CHAT_TEMPLATE: &str = "\
{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}. Write <tool_call> and </tool_call> around a call.<|im_end|>\n{% endif %}\
{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
