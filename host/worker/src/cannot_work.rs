//! Configurations that can never work, as distinct from failures that may not recur at the next try.

use std::fmt;

use host_plugin_api::{Error, ErrorCode, MemoryKind};

/// A configuration that can never work, however often it is tried. The sentence names the plugin, the numbers and a
/// remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CannotWork(pub String);

impl fmt::Display for CannotWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CannotWork {}

/// The error for a plugin that refuses memory. A refusal of the kind of memory is final. Any other failure may not recur
/// at the next try.
pub(crate) fn not_registered(plugin: &str, what: &str, kind: MemoryKind, error: &Error) -> anyhow::Error {
    let text = format!("plugin {plugin:?} did not register the {what}: {error}");
    match error.code {
        ErrorCode::UNSUPPORTED | ErrorCode::INVALID_ARGUMENT | ErrorCode::CONFIG => {
            let way_out = match kind {
                MemoryKind::VRAM => {
                    "it declares vram and does not reach the memory of this worker's GPU: name another plugin; with one that \
                     does not declare vram, pages go through staging memory"
                }
                _ => {
                    "it cannot reach ordinary host memory, which is what this worker has: name another plugin"
                }
            };
            CannotWork(format!("{text}; {way_out}")).into()
        }
        _ => anyhow::anyhow!(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_stays_so_can_never_work() {
        for (code, never) in [
            (ErrorCode::UNSUPPORTED, true),
            (ErrorCode::INVALID_ARGUMENT, true),
            (ErrorCode::NO_RESOURCE, false),
            (ErrorCode::IO, false),
            (ErrorCode::PANICKED, false),
        ] {
            let error = not_registered("wire", "KV pool", MemoryKind::DRAM, &Error::new(code, "no"));
            assert_eq!(error.is::<CannotWork>(), never, "{code:?}: {error}");
        }
    }
}
