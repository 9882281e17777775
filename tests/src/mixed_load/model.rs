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
    /// The same on a GPU, or on the [stand-in](crate::cuda::stand_in) for one, with the bits of the CPU.
    Cuda,
}

impl Model {
    /// Reads the name of one of these executors.
    ///
    /// # Errors
    /// When it is another one.
    pub fn read(name: &str, of: &[Self]) -> Result<Self, String> {
        let found = of.iter().find(|model| model.name() == name).copied();
        let names = || of.iter().map(|model| model.name()).collect::<Vec<_>>().join(" or ");
        found.ok_or_else(|| format!("the executor {name:?} is not {}", names()))
    }

    fn name(self) -> &'static str {
        match self {
            Self::Synthetic => "synthetic",
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }

    /// Whether clients can request what needs a chat template and a vocabulary.
    #[must_use]
    pub fn has_vocabulary(self) -> bool {
        self != Self::Synthetic
    }

    /// The model that computes the right answers: on the CPU for one on a GPU.
    #[must_use]
    pub fn reference(self) -> Self {
        match self {
            Self::Cuda => Self::Cpu,
            same => same,
        }
    }

    /// The flags of all processes that name it. A made-up model is written into `folder`.
    ///
    /// # Panics
    /// When it cannot be written.
    #[must_use]
    pub fn flags(self, folder: &Path) -> Vec<String> {
        let executor: &[&str] = match self {
            Self::Synthetic => return ["--executor", "synthetic"].map(str::to_owned).to_vec(),
            Self::Cpu => &["cpu", "--threads", "1"],
            Self::Cuda => &["cuda", "--cuda-math", "exact"],
        };
        TinyModel { seed: 22, ..TinyModel::small() }.write(folder).expect("the model is written");
        let template = folder.join("template.jinja");
        std::fs::write(&template, CHAT_TEMPLATE).expect("the chat template is written");
        let mut flags: Vec<String> = [&["--executor"], executor, &["--tool-parser", "hermes", "--model"]]
            .concat()
            .into_iter()
            .map(str::to_owned)
            .collect();
        flags.push(folder.display().to_string());
        flags.extend(["--chat-template".to_owned(), template.display().to_string()]);
        flags
    }
}

/// A chat template that shows tools, for the made-up model.
const CHAT_TEMPLATE: &str = "\
{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}. Write <tool_call> and </tool_call> around a call.<|im_end|>\n{% endif %}\
{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
