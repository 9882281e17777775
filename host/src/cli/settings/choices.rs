//! Settings whose value is one of a few names. `--help` and the errors of flags and of the file list them.

use clap::ValueEnum;
use host_core::hierarchy::{PrefetchPolicy, WritePolicy};
use host_core::layout::{Dtype, KvOrder};
use host_core::radix::Policy as EvictionPolicy;
use host_front::registry::Policy as RouterPolicy;
use host_front::text::CallFormat;
use serde::Deserialize;

/// An enum whose variants are the values of a flag and of a key, each with its value of another crate.
macro_rules! choices {
    (
        $(#[$about:meta])*
        $name:ident for $target:ident, $case:tt { $($(#[$says:meta])* $variant:ident,)+ }
    ) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
        #[serde(rename_all = $case)]
        #[value(rename_all = $case)]
        pub enum $name { $($(#[$says])* $variant,)+ }

        impl From<$name> for $target {
            fn from(name: $name) -> Self {
                match name { $($name::$variant => $target::$variant,)+ }
            }
        }
    };
}

choices! {
    /// How the router chooses workers.
    RouterPolicyName for RouterPolicy, "kebab-case" {
        /// What workers hold of the prompt against what they have to do
        Prefix,
        /// The fewest requests
        LeastLoaded,
        /// In turn
        RoundRobin,
        /// By lot
        Random,
    }
}

choices! {
    /// How a model writes calls of tools.
    ToolParserName for CallFormat, "kebab-case" {
        /// JSON objects between <tool_call> and </tool_call>
        #[value(alias = "qwen25", alias = "qwen3")]
        #[serde(alias = "qwen25", alias = "qwen3")]
        Hermes,
        /// A JSON object with parameters, as the whole answer
        #[value(alias = "llama3", alias = "llama3_json", alias = "llama3-json")]
        #[serde(alias = "llama3", alias = "llama3_json", alias = "llama3-json")]
        Llama,
        /// A list of calls in Python's notation, as the whole answer
        Pythonic,
        /// Tags for a tool and its arguments between <tool_call> and </tool_call>
        #[value(alias = "qwen3_coder", alias = "qwen3_xml", alias = "qwen3-xml")]
        #[serde(alias = "qwen3_coder", alias = "qwen3_xml", alias = "qwen3-xml")]
        Qwen3Coder,
        /// Calls in Python's notation, in a block of Markdown that is called tool_code
        #[value(alias = "gemma3")]
        #[serde(alias = "gemma3")]
        Gemma,
        /// Calls between <start_function_call> and <end_function_call>
        #[value(alias = "functiongemma", alias = "function_gemma")]
        #[serde(alias = "functiongemma", alias = "function_gemma")]
        FunctionGemma,
    }
}

/// How a model writes its thoughts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[value(rename_all = "kebab-case")]
pub enum ReasoningParserName {
    /// Between <think> and </think>
    #[value(alias = "qwen3", alias = "deepseek-r1", alias = "deepseek_r1")]
    #[serde(alias = "qwen3", alias = "deepseek-r1", alias = "deepseek_r1")]
    Think,
}

/// Where guesses at an answer's next tokens come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[value(rename_all = "kebab-case")]
pub enum SpeculateName {
    /// What followed the last tokens where the request had them before
    Ngram,
}

choices! {
    /// Element type of K and V.
    KvDtypeName for Dtype, "kebab-case" {
        /// 32-bit float
        F32,
        /// The upper half of a 32-bit float
        Bf16,
    }
}

choices! {
    /// Order of a pool's dimensions.
    KvLayoutName for KvOrder, "kebab-case" {
        /// A page, and a head range of it, is one contiguous piece
        PageHeadLayerKvTokenDim,
        /// A page, and a range of its layers, is one contiguous piece
        PageLayerHeadKvTokenDim,
        /// One array per layer and per K or V, token-major within
        LayerKvPageTokenHeadDim,
    }
}

choices! {
    /// When pages are written to the offload tiers.
    WritePolicyName for WritePolicy, "snake_case" {
        /// When they enter a radix cache
        WriteThrough,
        /// Once they were used twice
        WriteThroughSelective,
        /// When they are about to leave a radix cache
        WriteBack,
    }
}

choices! {
    /// How long a request waits for pages from storage.
    PrefetchPolicyName for PrefetchPolicy, "snake_case" {
        /// Not at all
        BestEffort,
        /// As long as having them computed or sent would take, at most 1 s and 0.25 s per 1024 tokens
        Timeout,
        /// Until all are there
        WaitComplete,
    }
}

choices! {
    /// What leaves a radix cache first.
    EvictionPolicyName for EvictionPolicy, "kebab-case" {
        /// What was released longest ago
        Lru,
        /// What was matched least often
        Lfu,
        /// What was matched less than twice
        Slru,
        /// What the least urgent requests have left: those with the largest `priority`
        Priority,
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use super::*;

    /// Checks that each name of a flag's value is also its name in the other crate and in the file.
    fn agree<N, T>(of: impl Fn(T) -> String)
    where
        N: ValueEnum + Into<T> + for<'de> Deserialize<'de> + Copy + Debug + PartialEq,
    {
        for name in N::value_variants() {
            let text = name.to_possible_value().unwrap().get_name().to_owned();
            assert_eq!(of((*name).into()), text);
            assert_eq!(N::deserialize(toml::Value::String(text)).unwrap(), *name);
        }
    }

    #[test]
    fn flags_the_file_metrics_and_peers_use_the_same_names() {
        agree::<RouterPolicyName, RouterPolicy>(|policy| policy.name().to_owned());
        agree::<KvDtypeName, Dtype>(|dtype| dtype.to_string());
        agree::<KvLayoutName, KvOrder>(|order| order.to_string());
        agree::<WritePolicyName, WritePolicy>(|policy| policy.as_str().to_owned());
        agree::<PrefetchPolicyName, PrefetchPolicy>(|policy| policy.as_str().to_owned());
        agree::<EvictionPolicyName, EvictionPolicy>(|policy| policy.as_str().to_owned());
    }
}
