//! `host keys ..`: API keys of tenants.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Subcommand};
use host_front::identity::{Keys, MAX_TENANT, entry, is_tenant};
use host_wire::random::random_u64;

use super::Refused;
use super::output::say;

/// What to do with API keys.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Makes a key for a tenant, adds its hash to a file, and prints the key, which is written nowhere
    New(New),
}

/// A new key.
#[derive(Debug, Args)]
pub struct New {
    /// The tenant's name: up to 128 visible ASCII characters. Tenants share no cached KV.
    tenant: String,

    /// File of keys, as --api-keys names it. It is made if it is not there
    #[arg(long, value_name = "FILE")]
    file: PathBuf,

    /// The key may also use /flush_cache and /metrics and see all of /health
    #[arg(long)]
    admin: bool,
}

impl Command {
    /// Runs the command.
    ///
    /// # Errors
    /// [`Refused`] for invalid arguments, another error when a step fails.
    pub fn run(self) -> anyhow::Result<()> {
        let Command::New(New { tenant, file, admin }) = self;
        if !is_tenant(&tenant) {
            let message =
                format!("{tenant:?} cannot name a tenant: use 1 to {MAX_TENANT} visible ASCII characters");
            return Err(Refused(message).into());
        }
        let shown = file.display().to_string();
        if file.exists() {
            // Checks the file first: adding to a file that the server refuses would seem to work.
            Keys::load(&file).map_err(|error| Refused(error.to_string()))?;
        }
        let secret = secret().context("the kernel gives no randomness")?;
        let mut keys = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(&file)
            .with_context(|| format!("{shown} cannot be written"))?;
        // One write, so that a server that reads meanwhile sees the whole entry or nothing of it.
        let text = format!("\n{}", entry(&tenant, &secret, admin));
        keys.write_all(text.as_bytes()).with_context(|| format!("{shown} cannot be written"))?;
        say!("{secret}");
        Ok(())
    }
}

/// A key with 256 random bits, in the usual form of such keys.
fn secret() -> std::io::Result<String> {
    let mut text = "sk-".to_owned();
    for _ in 0..4 {
        text.push_str(&format!("{:016x}", random_u64()?));
    }
    Ok(text)
}
