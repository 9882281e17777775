//! The plugin's table of the host's configuration.

use std::path::PathBuf;
use std::time::Duration;

use host_plugin_api::{Error, ErrorCode, Result};
use serde::Deserialize;

/// Which of Mooncake's two interfaces is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// The first that is found: the C library, then the wheel.
    #[default]
    Auto,
    /// The C library.
    C,
    /// The wheel, through an interpreter in this process.
    Python,
}

/// What moves the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// Sockets.
    #[default]
    Tcp,
    /// Network adapters, without the processors.
    Rdma,
}

/// Settings of both roles and of the transfer role. See `plugin.toml` for what each key means. A setting that Mooncake
/// has, too, has SGLang's name for it. Unknown keys are refused by the host, because it knows the manifest.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct Config {
    pub backend: Backend,
    pub library: Option<PathBuf>,
    pub python: Option<PathBuf>,
    pub preload: Option<Vec<PathBuf>>,
    pub protocol: Protocol,
    pub device_name: String,
    pub local_hostname: String,
    pub metadata_server: String,
    pub max_writes: u32,
    pub max_submissions: u32,
    pub max_outstanding: u32,
    pub short_writes: u64,
    pub connect_timeout_ms: u64,
    pub fence_timeout_ms: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            backend: Backend::Auto,
            library: None,
            python: None,
            preload: None,
            protocol: Protocol::Tcp,
            device_name: String::new(),
            local_hostname: "127.0.0.1".into(),
            metadata_server: P2P.into(),
            max_writes: 1024,
            max_submissions: 256,
            max_outstanding: 1024,
            short_writes: 256 << 10,
            connect_timeout_ms: 5000,
            fence_timeout_ms: 5000,
        }
    }
}

/// The metadata server's name when there is none: metadata goes from engine to engine.
pub const P2P: &str = "P2PHANDSHAKE";

impl Config {
    /// # Errors
    /// `CONFIG`, with the key.
    pub fn parse(text: &str) -> Result<Self> {
        let config: Self = toml::from_str(text).map_err(|e| wrong(e.to_string().trim_end().to_owned()))?;
        let within = |key: &str, value: u64, most: u64| match value {
            0 => Err(wrong(format!("{key} is 0, it must be 1 to {most}"))),
            v if v > most => Err(wrong(format!("{key} is {v}, it must be 1 to {most}"))),
            _ => Ok(()),
        };
        within("max_writes", config.max_writes.into(), 65_536)?;
        within("max_submissions", config.max_submissions.into(), 4096)?;
        within("max_outstanding", config.max_outstanding.into(), 16_384)?;
        within("short_writes", config.short_writes, 1 << 30)?;
        within("connect_timeout_ms", config.connect_timeout_ms, 600_000)?;
        within("fence_timeout_ms", config.fence_timeout_ms, 600_000)?;
        // Mooncake accepts any name, but some names make it end the process.
        let name = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        let host = &config.local_hostname;
        if host.is_empty() || host.len() > 255 || !host.chars().all(name) {
            let text = format!("local_hostname {host:?} is not a name or an IPv4 address without a port");
            return Err(wrong(text));
        }
        if !config.device_name.chars().all(|c| name(c) || c == ',') {
            return Err(wrong(format!("device_name {:?} is not a list of adapters", config.device_name)));
        }
        if config.backend == Backend::Python && config.library.is_some() {
            return Err(wrong(
                "library names the C library, and backend = \"python\" does not use it".into(),
            ));
        }
        Ok(config)
    }

    /// What to load before Mooncake: as configured, or as `MOONCAKE_PRELOAD` says.
    pub fn preloads(&self) -> Vec<PathBuf> {
        self.preload.clone().unwrap_or_else(|| {
            let listed = std::env::var_os("MOONCAKE_PRELOAD").unwrap_or_default();
            std::env::split_paths(&listed).filter(|path| !path.as_os_str().is_empty()).collect()
        })
    }

    /// Whether the transfer role can work as configured on this machine.
    ///
    /// # Errors
    /// `CONFIG`, with the key.
    pub fn check_transfer(&self) -> Result<()> {
        if self.metadata_server != P2P {
            let text = format!(
                "metadata_server is {:?}, and the transfer role speaks {P2P} only, which needs no server: leave it out",
                self.metadata_server
            );
            return Err(wrong(text));
        }
        if std::env::var("MC_TCP_PROTO").is_ok_and(|value| value == "1") {
            let text =
                "MC_TCP_PROTO=1 in the environment: Mooncake would call writes done that are not, unset it";
            return Err(wrong(text.into()));
        }
        let adapters = std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut all| all.next().is_some());
        if self.protocol == Protocol::Rdma && !adapters {
            let text = "protocol is rdma, and this machine has no adapter for it (/sys/class/infiniband is empty): \
                        Mooncake would use TCP without an error, so say tcp";
            return Err(wrong(text.into()));
        }
        Ok(())
    }

    pub fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms)
    }

    pub fn fence_timeout(&self) -> Duration {
        Duration::from_millis(self.fence_timeout_ms)
    }
}

/// An error about the configuration.
pub fn wrong(message: String) -> Error {
    Error::new(ErrorCode::CONFIG, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonsense_is_refused_with_the_key_in_the_message() {
        for (text, says) in [
            ("max_writes = 0", "max_writes"),
            ("max_outstanding = 20000", "max_outstanding"),
            ("fence_timeout_ms = 9999999", "fence_timeout_ms"),
            ("backend = \"rust\"", "backend"),
            ("protocol = \"nonsense\"", "protocol"),
            ("local_hostname = \"foo://x\"", "local_hostname"),
            ("device_name = \"mlx5_0;\"", "device_name"),
            ("backend = \"python\"\nlibrary = \"/x.so\"", "library"),
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.code == ErrorCode::CONFIG && error.message.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn what_mooncake_would_do_otherwise_than_configured_is_refused() {
        let config = Config::parse("metadata_server = \"http://127.0.0.1:8080/metadata\"").unwrap();
        assert!(config.check_transfer().unwrap_err().message.contains("P2PHANDSHAKE"));
        Config::parse("").unwrap().check_transfer().unwrap();
        if !std::path::Path::new("/sys/class/infiniband").exists() {
            let config = Config::parse("protocol = \"rdma\"").unwrap();
            assert!(config.check_transfer().unwrap_err().message.contains("infiniband"));
        }
    }
}
