//! The plugin's table of the host's configuration.

use std::path::PathBuf;
use std::time::Duration;

use host_plugin_api::{Error, ErrorCode, Result};
use serde::Deserialize;

/// When data is forced to the device.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Fsync {
    /// Whenever the system likes.
    Never,
    /// When a segment is sealed.
    Segment,
    /// Before a put is answered.
    Always,
}

/// How reads and writes are started.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Io {
    Auto,
    Uring,
    Threads,
}

/// Whether files are opened with `O_DIRECT`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Direct {
    Auto,
    Always,
    Never,
}

/// Which users may read and write the directory.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Permissions {
    Private,
    Group,
}

/// See `plugin.toml` for what each key means.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    pub dir: PathBuf,
    pub size_limit_mib: u64,
    pub free_floor_mib: u64,
    pub segment_mib: u64,
    pub fsync: Fsync,
    pub io: Io,
    pub direct: Direct,
    pub threads: usize,
    pub queue_depth: u32,
    pub pinned_mib: u64,
    pub max_pages: u32,
    pub max_batches: u32,
    pub refresh_ms: u64,
    pub load_wait_ms: u64,
    pub permissions: Permissions,
    pub read_only: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            dir: PathBuf::new(),
            size_limit_mib: 10_240,
            free_floor_mib: 1024,
            segment_mib: 128,
            fsync: Fsync::Segment,
            io: Io::Auto,
            direct: Direct::Auto,
            threads: 0,
            queue_depth: 32,
            pinned_mib: 65_536,
            max_pages: 256,
            max_batches: 64,
            refresh_ms: 500,
            load_wait_ms: 1000,
            permissions: Permissions::Private,
            read_only: false,
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
        if config.dir.as_os_str().is_empty() {
            return Err(wrong("dir is not set: name the directory for the pages".to_owned()));
        }
        if !config.dir.is_absolute() {
            let dir = config.dir.display();
            return Err(wrong(format!("dir is {dir:?}, it must be an absolute path", dir = dir.to_string())));
        }
        let within = |key: &str, value: u64, least: u64, most: u64| {
            let text = || wrong(format!("{key} is {value}, it must be {least} to {most}"));
            (least..=most).contains(&value).then_some(()).ok_or_else(text)
        };
        within("segment_mib", config.segment_mib, 1, 4096)?;
        within("size_limit_mib", config.size_limit_mib, 4 * config.segment_mib, config.segment_mib << 14)?;
        within("free_floor_mib", config.free_floor_mib, 0, 1 << 30)?;
        within("threads", config.threads as u64, 0, 64)?;
        within("queue_depth", config.queue_depth.into(), 1, 1024)?;
        within("pinned_mib", config.pinned_mib, 0, 1 << 20)?;
        within("max_pages", config.max_pages.into(), 1, 65_536)?;
        within("max_batches", config.max_batches.into(), 1, 4096)?;
        let (pages, batches) = (u64::from(config.max_pages), u64::from(config.max_batches));
        within("max_pages * max_batches", pages * batches, 1, 1 << 20)?;
        within("refresh_ms", config.refresh_ms, 10, 600_000)?;
        within("load_wait_ms", config.load_wait_ms, 0, 600_000)?;
        Ok(config)
    }

    /// Bytes of a full segment.
    pub fn segment(&self) -> u64 {
        self.segment_mib << 20
    }

    pub fn size_limit(&self) -> u64 {
        self.size_limit_mib << 20
    }

    pub fn free_floor(&self) -> u64 {
        self.free_floor_mib << 20
    }

    /// The longest value.
    pub fn max_value(&self) -> u64 {
        self.segment().min(256 << 20)
    }

    pub fn refresh(&self) -> Duration {
        Duration::from_millis(self.refresh_ms)
    }

    pub fn load_wait(&self) -> Duration {
        Duration::from_millis(self.load_wait_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_outside_of_their_limits_are_refused_by_name() {
        for (key, text) in [
            ("dir", ""),
            ("dir", "dir = 'relative/path'"),
            ("segment_mib", "segment_mib = 0"),
            ("segment_mib", "segment_mib = 4097"),
            ("size_limit_mib", "size_limit_mib = 511"),
            ("size_limit_mib", "segment_mib = 1\nsize_limit_mib = 16385"),
            ("free_floor_mib", "free_floor_mib = 1073741825"),
            ("fsync", "fsync = 'sometimes'"),
            ("io", "io = 'magic'"),
            ("direct", "direct = 'perhaps'"),
            ("threads", "threads = 65"),
            ("queue_depth", "queue_depth = 0"),
            ("pinned_mib", "pinned_mib = 1048577"),
            ("max_pages", "max_pages = 65537"),
            ("max_batches", "max_batches = 0"),
            ("max_pages * max_batches", "max_pages = 65536\nmax_batches = 17"),
            ("refresh_ms", "refresh_ms = 9"),
            ("load_wait_ms", "load_wait_ms = 600001"),
            ("permissions", "permissions = 'all'"),
            ("unknown", "unknown = 1"),
        ] {
            let whole = if key == "dir" { text.to_owned() } else { format!("dir = '/x'\n{text}") };
            let error = Config::parse(&whole).unwrap_err();
            assert!(error.code == ErrorCode::CONFIG && error.message.contains(key), "{text}: {error}");
        }
        assert!(Config::parse("dir = '/x'").is_ok());
    }
}
