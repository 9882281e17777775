//! The server that is started for a measurement, and its description for the simulation.

use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use host_simulate::Cluster;
use host_wire::random::random_u64;

use super::described;
use super::measured::Server;
use crate::cli::Refused;
use crate::cli::plugins;
use crate::cli::server::{Client, Started};
use crate::cli::settings::{ExecutorName, RoleName, Settings};

/// The synthetic executor's model and speed, unless the configuration file has another. Its KV is so small that a machine of two
/// cores keeps up with the modelled time.
const SYNTHETIC: &str = "[synthetic]\nlayers = 2\nkv-heads = 1\nhead-dim = 4\n\
    step-us = 20000\nprefill-token-us = 100\nsequence-us = 500\n";
/// Pages of its pool, unless flags or the file give a size.
const POOL_PAGES: u32 = 16_384;

/// A server that ends with the measurement.
pub struct OwnServer {
    started: Started,
    /// What it was started with.
    settings: Settings,
    _configuration: Option<Temporary>,
}

/// A file that is removed at the end.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // A file that is left does no harm: only this user can read it.
        let _left = std::fs::remove_file(&self.0);
    }
}

impl OwnServer {
    /// Starts a server with these flags. Without `--model` and `--executor` it has the synthetic executor. Must be called on the
    /// first thread of the process.
    ///
    /// # Errors
    /// [`Refused`] for flags that cannot work, or that the simulation cannot have. Another error when the server does not start.
    pub fn start(settings: &Settings, mut flags: Vec<OsString>) -> anyhow::Result<Self> {
        let given = settings.clone().with_file()?;
        if let Some(role) = given.role.filter(|role| *role != RoleName::Aggregated) {
            let role = role.as_str();
            let message = format!(
                "--role {role} answers no requests alone: leave it out, or give a server's URL as --url"
            );
            return Err(Refused(message).into());
        }
        let mut settings = settings.clone();
        let mut add = |flag: &str, value: &str| flags.extend([flag.into(), value.into()]);
        if given.model.is_none() && given.executor.is_none() {
            add("--executor", "synthetic");
            settings.executor = Some(ExecutorName::Synthetic);
        }
        let is_synthetic = settings.clone().with_file()?.executor() == ExecutorName::Synthetic;
        if is_synthetic && given.pool_pages.is_none() && given.kv_memory.is_none() {
            add("--pool-pages", &POOL_PAGES.to_string());
            settings.pool_pages = Some(POOL_PAGES);
        }
        if given.port.is_none() {
            add("--port", "0");
        }
        if given.log_level.is_none() {
            add("--log-level", "warn");
        }
        let mut configuration = None;
        if is_synthetic && given.synthetic.is_none() {
            let file = with_synthetic(given.config.as_deref())?;
            flags = without_configuration(flags);
            flags.extend(["--config".into(), file.0.clone().into()]);
            settings.config = Some(file.0.clone());
            configuration = Some(file);
        }
        let settings = plugins::resolve(settings.with_file()?)?.settings;
        described::check(&settings)?;
        Ok(Self { started: Started::spawn(&flags)?, settings, _configuration: configuration })
    }

    /// Waits until it is ready. Returns a client of it.
    ///
    /// # Errors
    /// [`Refused`] when the server refuses its flags. Another error when it ends.
    pub async fn until_ready(&mut self, ca: Option<&Path>) -> anyhow::Result<Client> {
        self.started.until_ready(ca).await?;
        Ok(Client::new(self.started.address.clone(), ca)?)
    }

    /// The server's workers, for the simulation.
    ///
    /// # Errors
    /// When the server does not say what its workers are, or the simulation cannot have such workers.
    pub async fn described(&self, server: &Server) -> anyhow::Result<Cluster> {
        described::cluster(&self.settings, server).await
    }

    /// Ends the server.
    ///
    /// # Errors
    /// When it did not end in time and was killed.
    pub async fn end(self) -> anyhow::Result<()> {
        self.started.end().await
    }
}

/// A copy of a configuration file, or a new one, with a synthetic model.
fn with_synthetic(file: Option<&Path>) -> anyhow::Result<Temporary> {
    let given = match file {
        Some(path) => std::fs::read_to_string(path)
            .with_context(|| format!("the configuration {} cannot be read", path.display()))?,
        None => String::new(),
    };
    let number = random_u64().context("the system gives no random number")?;
    let path = std::env::temp_dir().join(format!("host-bench-live-{number:016x}.toml"));
    // Other users may not read it, because the given file may have secrets. Fails if there is such a file, or a link.
    let made = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    let mut written = made.with_context(|| format!("{} cannot be made", path.display()))?;
    let temporary = Temporary(path);
    write!(written, "{given}\n{SYNTHETIC}")
        .with_context(|| format!("{} cannot be written", temporary.0.display()))?;
    Ok(temporary)
}

/// These flags without `--config` and its value.
fn without_configuration(flags: Vec<OsString>) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut rest = flags.into_iter();
    while let Some(flag) = rest.next() {
        match flag.to_str() {
            Some("--config") => drop(rest.next()),
            Some(text) if text.starts_with("--config=") => {}
            _ => kept.push(flag),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_keeps_its_settings_and_gets_a_synthetic_model() {
        let flags = ["--config", "a.toml", "--tp", "2", "--config=b.toml"].map(OsString::from);
        assert_eq!(without_configuration(flags.to_vec()), ["--tp", "2"]);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.toml");
        std::fs::write(&file, "page-size = 32").unwrap();
        let made = with_synthetic(Some(&file)).unwrap();
        let settings = Settings { config: Some(made.0.clone()), ..Settings::default() }.with_file().unwrap();
        let synthetic = settings.synthetic.as_ref().unwrap();
        assert_eq!((settings.page_size(), synthetic.step_us, synthetic.layers), (32, 20_000, Some(2)));
        let path = made.0.clone();
        drop(made);
        assert!(!path.exists());
    }
}
