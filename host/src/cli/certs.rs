//! `host certs ..`: what the processes of a cluster know each other by.

use std::fs::{DirBuilder, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Subcommand};
use host_wire::endpoint::authority::{Authority, Issued, Validity};
use host_wire::random::random_u64;

use super::Refused;
use super::output::say;

/// What to make.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Makes a certificate for --cluster-certs, and the authority that signs it if the folder has none
    New(New),
    /// Makes a secret for --cluster-secret
    Secret(Secret),
}

/// A new certificate.
#[derive(Debug, Args)]
pub struct New {
    /// Folder for ca.pem, cert.pem and key.pem, and for the authority's key, ca-key.pem, which stays there
    dir: PathBuf,

    /// Folder of an authority that was made before; ca-key.pem is not copied from it [default: DIR]
    #[arg(long, value_name = "DIR")]
    ca: Option<PathBuf>,

    /// Days that the certificate is good for, and a new authority
    #[arg(long, default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
}

/// A new secret.
#[derive(Debug, Args)]
pub struct Secret {
    /// The file, which may not exist
    file: PathBuf,
}

impl Command {
    /// Runs the command.
    ///
    /// # Errors
    /// [`Refused`] for what cannot work, anything else for what failed.
    pub fn run(self) -> anyhow::Result<()> {
        match self {
            Command::New(new) => new.run(),
            Command::Secret(Secret { file }) => {
                let mut text = String::new();
                for _ in 0..4 {
                    text.push_str(&format!(
                        "{:016x}",
                        random_u64().context("the kernel gives no randomness")?
                    ));
                }
                text.push('\n');
                create(&file, &text, 0o600)?;
                say!("{} is the secret: give a copy to every process, as --cluster-secret", file.display());
                Ok(())
            }
        }
    }
}

impl New {
    fn run(self) -> anyhow::Result<()> {
        let Self { dir, ca, days } = self;
        let validity = Validity::Days(days);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .with_context(|| format!("{} cannot be made", dir.display()))?;
        let from = ca.as_deref().unwrap_or(&dir);
        let (key, trusted) = (from.join("ca-key.pem"), from.join("ca.pem"));
        let found = std::fs::read(&key);
        let is_new = ca.is_none()
            && matches!(&found, Err(error) if error.kind() == ErrorKind::NotFound)
            && !trusted.exists();
        let (authority, trusted) = if is_new {
            let authority = Authority::new(validity)?;
            create(&key, &authority.key_pem(), 0o600)?;
            let trusted = authority.certificate().pem();
            (authority, trusted)
        } else {
            let shown = key.display();
            let found = found.map_err(|error| Refused(format!("{shown} cannot be read: {error}")))?;
            let authority = Authority::from_key_pem(&found, validity);
            let authority = authority.map_err(|error| Refused(format!("{shown}: {error}")))?;
            let trusted = std::fs::read_to_string(&trusted)
                .map_err(|error| Refused(format!("{} cannot be read: {error}", trusted.display())))?;
            (authority, trusted)
        };
        let Issued { certificate, key } = authority.issue(validity)?;
        // The key last: a process that reads meanwhile goes on with what it had, until they fit.
        replace(&dir.join("ca.pem"), &trusted, 0o644)?;
        replace(&dir.join("cert.pem"), &certificate.pem(), 0o644)?;
        replace(&dir.join("key.pem"), &key.serialize_pem(), 0o600)?;
        say!(
            "{} has a certificate for {days} days: give ca.pem, cert.pem and key.pem to processes, as --cluster-certs",
            dir.display()
        );
        if is_new {
            say!("ca-key.pem signs more of them (--ca {}): keep it where no process runs", dir.display());
        }
        Ok(())
    }
}

/// Writes a file that is not there.
fn create(path: &Path, text: &str, mode: u32) -> anyhow::Result<()> {
    let shown = path.display();
    let made = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let mut file = made.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => Refused(format!("{shown} exists: it is not overwritten")).into(),
        _ => anyhow::Error::new(error).context(format!("{shown} cannot be written")),
    })?;
    file.write_all(text.as_bytes()).with_context(|| format!("{shown} cannot be written"))
}

/// Writes a file in one step, in place of what may be there.
fn replace(path: &Path, text: &str, mode: u32) -> anyhow::Result<()> {
    let new = path.with_extension("pem.new");
    // One that a killed command left.
    if let Err(error) = std::fs::remove_file(&new)
        && error.kind() != ErrorKind::NotFound
    {
        return Err(anyhow::Error::new(error).context(format!("{} cannot be replaced", new.display())));
    }
    create(&new, text, mode)?;
    std::fs::rename(&new, path).with_context(|| format!("{} cannot be written", path.display()))
}
