//! `host certs ..`: makes the secrets and certificates with which processes of a cluster authenticate each other.

use std::fs::{DirBuilder, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Subcommand};
use host_wire::endpoint::authority::{Authority, AuthorityError, Issued, Validity};
use host_wire::random::random_u64;

use super::Refused;
use super::output::say;

/// What to make.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Makes a certificate for --cluster-certs, and the authority that signs it if the folder has none
    New(NewCertificate),
    /// Makes a certificate for --tls-cert and --tls-key, and the authority that signs it if the folder has none
    Server(Server),
    /// Makes a secret for --cluster-secret
    Secret(Secret),
}

/// Where a new certificate comes, and what signs it.
#[derive(Debug, Args)]
pub struct NewCertificate {
    /// Folder for ca.pem, cert.pem and key.pem, and for the authority's key, ca-key.pem, which stays there
    dir: PathBuf,

    /// Folder of an authority that was made before. Its ca-key.pem is not copied [default: DIR]
    #[arg(long, value_name = "DIR")]
    ca: Option<PathBuf>,

    /// Days that the certificate is good for, and a new authority
    #[arg(long, default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
}

/// A certificate of the HTTP API.
#[derive(Debug, Args)]
pub struct Server {
    #[command(flatten)]
    place: NewCertificate,

    /// Name or IP address by which clients call the server. The flag may be given several times
    #[arg(long = "name", value_name = "NAME", required = true)]
    names: Vec<String>,
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
    /// [`Refused`] for invalid arguments, another error when a step fails.
    pub fn run(self) -> anyhow::Result<()> {
        match self {
            Command::New(place) => {
                let is_new = place.make(|authority, validity| authority.issue(validity))?;
                let (shown, days) = (place.dir.display(), place.days);
                say!(
                    "{shown} has a certificate for {days} days: give ca.pem, cert.pem and key.pem to processes, as --cluster-certs"
                );
                place.say_authority(is_new)
            }
            Command::Server(Server { place, names }) => {
                let is_new = place.make(|authority, validity| authority.issue_server(&names, validity))?;
                let (shown, days) = (place.dir.display(), place.days);
                say!(
                    "{shown} has a certificate for {}, for {days} days: start the server with --tls-cert {shown}/cert.pem --tls-key \
                     {shown}/key.pem, and give ca.pem to clients",
                    names.join(", ")
                );
                place.say_authority(is_new)
            }
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

impl NewCertificate {
    /// Makes a certificate. Returns true if its authority is new.
    fn make(
        &self,
        issue: impl FnOnce(&Authority, Validity) -> Result<Issued, AuthorityError>,
    ) -> anyhow::Result<bool> {
        let Self { dir, ca, days } = self;
        let validity = Validity::Days(*days);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .with_context(|| format!("{} cannot be made", dir.display()))?;
        let from = ca.as_deref().unwrap_or(dir);
        let (signs, trusted) = (from.join("ca-key.pem"), from.join("ca.pem"));
        let found = std::fs::read(&signs);
        let is_new = ca.is_none()
            && matches!(&found, Err(error) if error.kind() == ErrorKind::NotFound)
            && !trusted.exists();
        let (authority, trusted) = if is_new {
            let authority = Authority::new(validity)?;
            let trusted = authority.certificate().pem();
            (authority, trusted)
        } else {
            let shown = signs.display();
            let found = found.map_err(|error| Refused(format!("{shown} cannot be read: {error}")))?;
            let authority = Authority::from_key_pem(&found, validity);
            let authority = authority.map_err(|error| Refused(format!("{shown}: {error}")))?;
            let trusted = std::fs::read_to_string(&trusted)
                .map_err(|error| Refused(format!("{} cannot be read: {error}", trusted.display())))?;
            (authority, trusted)
        };
        let issued = issue(&authority, validity);
        let Issued { certificate, key } = issued.map_err(|error| Refused(error.to_string()))?;
        if is_new {
            create(&signs, &authority.key_pem(), 0o600)?;
        }
        // Writes the key last: until key and certificate fit, a process that reads them keeps the old ones.
        replace(&dir.join("ca.pem"), &trusted, 0o644)?;
        replace(&dir.join("cert.pem"), &certificate.pem(), 0o644)?;
        replace(&dir.join("key.pem"), &key.serialize_pem(), 0o600)?;
        Ok(is_new)
    }

    fn say_authority(&self, is_new: bool) -> anyhow::Result<()> {
        if is_new {
            say!(
                "ca-key.pem signs more of them (--ca {}): keep it where no process runs",
                self.dir.display()
            );
        }
        Ok(())
    }
}

/// Writes a new file, and refuses to overwrite one.
fn create(path: &Path, text: &str, mode: u32) -> anyhow::Result<()> {
    let shown = path.display();
    let made = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let mut file = made.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => Refused(format!("{shown} exists: it is not overwritten")).into(),
        _ => anyhow::Error::new(error).context(format!("{shown} cannot be written")),
    })?;
    file.write_all(text.as_bytes()).with_context(|| format!("{shown} cannot be written"))
}

/// Writes a file in one step, and replaces an existing one.
fn replace(path: &Path, text: &str, mode: u32) -> anyhow::Result<()> {
    let new = path.with_extension("pem.new");
    // A file that a killed command may have left.
    if let Err(error) = std::fs::remove_file(&new)
        && error.kind() != ErrorKind::NotFound
    {
        return Err(anyhow::Error::new(error).context(format!("{} cannot be replaced", new.display())));
    }
    create(&new, text, mode)?;
    std::fs::rename(&new, path).with_context(|| format!("{} cannot be written", path.display()))
}
