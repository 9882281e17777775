//! The plugin's table of the host's configuration.

use std::time::Duration;

use host_plugin_api::{Error, ErrorCode, Result};
use serde::Deserialize;

use crate::control::MAX_COPY_THREADS;

/// See `plugin.toml` for what each key means.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    pub copy_threads: usize,
    pub max_writes: u32,
    pub max_submissions: u32,
    pub connect_timeout_ms: u64,
    pub fence_timeout_ms: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            copy_threads: 1,
            max_writes: 1024,
            max_submissions: 256,
            connect_timeout_ms: 5000,
            fence_timeout_ms: 5000,
        }
    }
}

/// Whether an instance would open with this configuration.
pub fn check(_role: &str, config: &str) -> Result<()> {
    Config::parse(config).map(drop)
}

impl Config {
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |message: String| Error::new(ErrorCode::CONFIG, message);
        let config: Self = toml::from_str(text).map_err(|e| wrong(e.to_string().trim_end().to_owned()))?;
        let within = |key: &str, value: u64, most: u64| match value {
            0 => Err(wrong(format!("{key} is 0, it must be 1 to {most}"))),
            v if v > most => Err(wrong(format!("{key} is {v}, it must be 1 to {most}"))),
            _ => Ok(()),
        };
        within("copy_threads", config.copy_threads as u64, MAX_COPY_THREADS as u64)?;
        within("max_writes", config.max_writes.into(), 65_536)?;
        within("max_submissions", config.max_submissions.into(), 4096)?;
        within("connect_timeout_ms", config.connect_timeout_ms, 600_000)?;
        within("fence_timeout_ms", config.fence_timeout_ms, 600_000)?;
        Ok(config)
    }

    /// How long a stranger has to say hello, and a dialled peer to answer.
    pub fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms)
    }

    pub fn fence_timeout(&self) -> Duration {
        Duration::from_millis(self.fence_timeout_ms)
    }
}
