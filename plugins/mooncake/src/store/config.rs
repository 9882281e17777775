//! The tier's keys of the plugin's table. See `plugin.toml` for what each means.

use std::path::PathBuf;
use std::time::Duration;

use host_plugin_api::{Error, ErrorCode, Result};
use serde::Deserialize;

use super::client::Setup;
use super::link::Making;

/// The keys that the tier reads. The manifest refuses what neither role knows.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct Config {
    pub master_server_address: String,
    pub master_metrics_address: String,
    pub read_only: bool,
    pub local_hostname: String,
    pub metadata_server: String,
    pub global_segment_size: String,
    pub protocol: String,
    pub device_name: String,
    pub store_library: Option<PathBuf>,
    pub read_threads: u32,
    pub write_threads: u32,
    pub master_timeout_ms: u64,
    pub store_deadline_ms: u64,
    pub start_without_master: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            master_server_address: "127.0.0.1:50051".into(),
            master_metrics_address: String::new(),
            read_only: false,
            local_hostname: "127.0.0.1".into(),
            metadata_server: "P2PHANDSHAKE".into(),
            global_segment_size: "1gb".into(),
            protocol: "tcp".into(),
            device_name: String::new(),
            store_library: None,
            // Mooncake polls for the end of a call without a pause, so each thread that waits takes a core.
            read_threads: 1,
            write_threads: 1,
            master_timeout_ms: 1000,
            store_deadline_ms: 2000,
            start_without_master: false,
        }
    }
}

fn wrong(message: String) -> Error {
    Error::new(ErrorCode::CONFIG, message)
}

/// A number of bytes as SGLang writes it: `4gb`, or without a unit.
fn bytes(text: &str) -> Option<u64> {
    let lower = text.trim().to_ascii_lowercase();
    let digits = lower.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &lower[digits.len()..] {
        "" | "b" => 0,
        "kb" | "kib" => 10,
        "mb" | "mib" => 20,
        "gb" | "gib" => 30,
        "tb" | "tib" => 40,
        _ => return None,
    };
    digits.trim_end().parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Whether this is `HOST:PORT`.
fn is_address(text: &str) -> bool {
    let port = text.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    port.is_some_and(|(_, port)| port.parse::<u16>().is_ok_and(|port| port > 0))
        && !text.contains(['\0', ' '])
}

impl Config {
    /// # Errors
    /// `CONFIG`, naming the key.
    pub fn parse(text: &str) -> Result<Self> {
        let config: Self = toml::from_str(text).map_err(|e| wrong(e.to_string().trim_end().to_owned()))?;
        let within = |key: &str, value: u64, most: u64| match value {
            1.. if value <= most => Ok(()),
            _ => Err(wrong(format!("{key} is {value}, it must be 1 to {most}"))),
        };
        within("read_threads", config.read_threads.into(), 64)?;
        within("write_threads", config.write_threads.into(), 64)?;
        within("master_timeout_ms", config.master_timeout_ms, 600_000)?;
        within("store_deadline_ms", config.store_deadline_ms, 600_000)?;
        if !is_address(&config.master_server_address) {
            let text = format!(
                "master_server_address is {:?}, it must be HOST:PORT of mooncake_master",
                config.master_server_address
            );
            return Err(wrong(text));
        }
        if !config.master_metrics_address.is_empty() && !is_address(&config.master_metrics_address) {
            let text = format!(
                "master_metrics_address is {:?}, it must be HOST:PORT at which mooncake_master shows its metrics",
                config.master_metrics_address
            );
            return Err(wrong(text));
        }
        if bytes(&config.global_segment_size).is_none() {
            let text = format!(
                "global_segment_size is {:?}, it must be a number of bytes such as \"4gb\", or \"0\" to lend nothing",
                config.global_segment_size
            );
            return Err(wrong(text));
        }
        // Mooncake ends the process when it does not know the scheme.
        let server = &config.metadata_server;
        if server != "P2PHANDSHAKE" && !["http://", "https://"].iter().any(|start| server.starts_with(start))
        {
            let text = format!(
                "metadata_server is {server:?}, it must be P2PHANDSHAKE, which needs no server, or a URL of http or https"
            );
            return Err(wrong(text));
        }
        let texts = [
            ("local_hostname", &config.local_hostname),
            ("device_name", &config.device_name),
            ("protocol", &config.protocol),
            ("metadata_server", server),
        ];
        if let Some((key, _)) = texts.iter().find(|(_, text)| text.contains('\0')) {
            return Err(wrong(format!("{key} contains a zero byte")));
        }
        if config.local_hostname.is_empty() {
            return Err(wrong("local_hostname is empty, it must be the address of this machine".into()));
        }
        // Mooncake accepts any other word as well, and then runs over TCP.
        if !["tcp", "rdma"].contains(&config.protocol.as_str()) {
            return Err(wrong(format!("protocol is {:?}, it must be tcp or rdma", config.protocol)));
        }
        Ok(config)
    }

    /// Address of the master's metrics: as configured, or the master's default.
    pub fn metrics_address(&self) -> String {
        if !self.master_metrics_address.is_empty() {
            return self.master_metrics_address.clone();
        }
        let host = self.master_server_address.rsplit_once(':').map_or("127.0.0.1", |(host, _)| host);
        format!("{host}:{}", super::usage::PORT)
    }

    pub fn making(&self) -> Making {
        let timeout = Duration::from_millis(self.master_timeout_ms);
        let lent = bytes(&self.global_segment_size);
        Making {
            setup: Setup {
                local_hostname: self.local_hostname.clone(),
                metadata_server: self.metadata_server.clone(),
                global_segment_size: if self.read_only { 0 } else { lent.unwrap_or_default() },
                protocol: self.protocol.clone(),
                device_name: self.device_name.clone(),
                master_server_address: self.master_server_address.clone(),
            },
            connect_timeout: timeout,
            retry: timeout,
            is_needed: !self.start_without_master,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_as_sglang_writes_them() {
        for (text, number) in [
            ("0", Some(0)),
            ("4gb", Some(4 << 30)),
            ("4 GB", Some(4 << 30)),
            ("512MiB", Some(512 << 20)),
            ("1073741824", Some(1 << 30)),
            ("99999999tb", None),
            ("gb", None),
            ("-1", None),
            ("1.5gb", None),
            ("4 gigabytes", None),
        ] {
            assert_eq!(bytes(text), number, "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused_with_the_key_in_the_message() {
        for (key, value) in [
            ("master_server_address", "\"localhost\""),
            ("master_server_address", "\"127.0.0.1:0\""),
            ("master_server_address", "\":50051\""),
            ("master_metrics_address", "\"localhost\""),
            ("global_segment_size", "\"some\""),
            ("metadata_server", "\"foo://x\""),
            ("metadata_server", "\"\""),
            ("local_hostname", "\"\""),
            ("device_name", "\"a\\u0000b\""),
            ("protocol", "\"nonsense\""),
            ("read_threads", "0"),
            ("write_threads", "65"),
            ("master_timeout_ms", "0"),
            ("store_deadline_ms", "9999999"),
        ] {
            let error = Config::parse(&format!("{key} = {value}")).unwrap_err();
            assert!(error.code == ErrorCode::CONFIG && error.message.contains(key), "{key}: {error}");
        }
        let config = Config::parse("master_server_address = \"[::1]:50051\"\nmax_writes = 7\n").unwrap();
        assert_eq!(config.making().setup.global_segment_size, 1 << 30);
        assert_eq!(config.metrics_address(), "[::1]:9003");
        let config = Config::parse("read_only = true\nmaster_metrics_address = \"h:1\"\n").unwrap();
        assert_eq!(config.making().setup.global_segment_size, 0);
        assert_eq!(config.metrics_address(), "h:1");
    }
}
