//! The fuzz targets: every reader of bytes that come from outside of this program.
//!
//! A target is a function of bytes. It returns whether the bytes were accepted, and panics when a reader accepts something false.
//! The crate `fuzz`, outside of the workspace, gives each target to libFuzzer (`cargo xtask nightly fuzz`). A test of this crate
//! runs the inputs in `fuzz/corpus`, and some thousands made from them, with any compiler.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is what fuzzing looks for")]

mod answer_text;
mod cache_news;
mod core_messages;
mod gguf_file;
mod grammar;
mod reader;
mod scheduler;
pub mod seeds;

/// A reader to be fuzzed.
#[derive(Clone, Copy)]
pub struct Target {
    /// Name of the binary in `fuzz`, and of the folder in `fuzz/corpus`.
    pub name: &'static str,
    /// Runs the reader. True when the bytes were accepted.
    pub run: fn(&[u8]) -> bool,
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "elf", run: host_plugins::fuzzing::elf },
    Target { name: "manifest", run: host_plugins::fuzzing::manifest },
    Target { name: "side_car", run: host_plugins::fuzzing::side_car },
    Target { name: "lock", run: host_plugins::fuzzing::lock },
    Target { name: "signature", run: host_plugins::fuzzing::signature },
    Target { name: "api_keys", run: host_front::http::fuzzing::api_keys },
    Target { name: "safetensors", run: host_executor::model::fuzzing::safetensors },
    Target { name: "safetensors_index", run: host_executor::model::fuzzing::safetensors_index },
    Target { name: "config_json", run: host_executor::model::fuzzing::config_json },
    Target { name: "gguf", run: gguf_file::exercise },
    Target { name: "http_body", run: host_front::http::fuzzing::body },
    Target { name: "chat_template", run: host_front::http::fuzzing::template },
    Target { name: "answer_text", run: answer_text::answer_text },
    Target { name: "grammar", run: grammar::grammar },
    Target { name: "wire_shm", run: host_plugin_shm::fuzzing::wire },
    Target { name: "wire_nixl", run: host_plugin_nixl::fuzzing::wire },
    Target { name: "wire_mooncake", run: host_plugin_mooncake::fuzzing::wire },
    Target { name: "notice", run: core_messages::notice },
    Target { name: "staging_message", run: core_messages::staging_message },
    Target { name: "aux_row", run: core_messages::aux_row },
    Target { name: "control_message", run: core_messages::control_message },
    Target { name: "segment_index", run: host_plugin_hicache_file::fuzzing::segment_index },
    Target { name: "cache_news", run: cache_news::cache_news },
    Target { name: "scheduler", run: scheduler::scheduler },
];

/// The target of this name.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn target(name: &str) -> Target {
    let found = TARGETS.iter().find(|target| target.name == name);
    *found.unwrap_or_else(|| panic!("no target is named {name:?}"))
}
