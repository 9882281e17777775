//! Reads the files of certificates, keys and secrets.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use super::{TlsError, TlsSource};
use crate::endpoint::authority::{Authority, Issued, Validity};

/// The shortest secret, in characters. 32 random bytes as text are longer.
const SHORTEST_SECRET: usize = 32;
/// The fewest different characters of a secret. 32 random hexadecimal digits have fewer once in a million times.
const FEWEST_DIFFERENT: usize = 8;
/// Most bytes that are read of a file. Certificates, keys and secrets are smaller.
const LARGEST: u64 = 1 << 20;

/// The content of the files.
pub(super) struct Material {
    /// Certificates of authorities whose certificates are accepted.
    pub roots: Vec<CertificateDer<'static>>,
    /// The process's own certificate, and those between it and its authority.
    pub chain: Vec<CertificateDer<'static>>,
    /// The key of the process's own certificate.
    pub key: PrivateKeyDer<'static>,
}

/// The stamps of files, by which changes are noticed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stamps(Vec<Option<Stamp>>);

/// The identity, the size and the time of the last change of a file.
#[derive(Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    changed: (i64, i64),
}

impl TlsSource {
    /// The files that are read.
    pub(super) fn files(&self) -> Vec<PathBuf> {
        match self {
            TlsSource::Secret(path) => vec![path.clone()],
            TlsSource::Certificates(path) => {
                ["ca.pem", "cert.pem", "key.pem"].map(|name| path.join(name)).to_vec()
            }
        }
    }
}

impl Stamps {
    pub fn of(files: &[PathBuf]) -> Self {
        let stamp = |path: &PathBuf| {
            let found = path.metadata().ok()?;
            let changed = (found.ctime(), found.ctime_nsec());
            Some(Stamp { device: found.dev(), inode: found.ino(), bytes: found.size(), changed })
        };
        Self(files.iter().map(stamp).collect())
    }
}

impl Material {
    pub fn read(source: &TlsSource) -> Result<Self, TlsError> {
        match source {
            TlsSource::Secret(path) => Self::from_secrets(path),
            TlsSource::Certificates(path) => Self::from_files(path),
        }
    }

    fn from_secrets(path: &Path) -> Result<Self, TlsError> {
        let wrong = |why: String| TlsError::Wrong { path: path.to_owned(), why };
        let text = read(path, true)?;
        let unusable = || {
            wrong(format!(
                "a cluster's secret is a line of at least {SHORTEST_SECRET} random characters, such as `host certs secret FILE` writes"
            ))
        };
        let text = str::from_utf8(&text).map_err(|_binary| unusable())?;
        let secrets: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        if secrets.is_empty() || secrets.iter().any(|secret| secret.len() < SHORTEST_SECRET) {
            return Err(unusable());
        }
        // Certificates are public, so an attacker can guess secrets without a limit of tries.
        if secrets.iter().any(|secret| different(secret) < FEWEST_DIFFERENT) {
            return Err(wrong(format!(
                "a secret of fewer than {FEWEST_DIFFERENT} different characters can be guessed; `host certs secret FILE` writes one that cannot"
            )));
        }
        let authorities: Result<Vec<Authority>, _> =
            secrets.iter().map(|secret| Authority::from_secret(secret.as_bytes())).collect();
        let authorities = authorities.map_err(|error| wrong(error.to_string()))?;
        let own = authorities.first().ok_or_else(unusable)?;
        let Issued { certificate, key } =
            own.issue(Validity::Always).map_err(|error| wrong(error.to_string()))?;
        Ok(Self {
            roots: authorities.iter().map(|authority| authority.certificate().der().clone()).collect(),
            chain: vec![certificate.der().clone()],
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
        })
    }

    fn from_files(folder: &Path) -> Result<Self, TlsError> {
        let [ca, cert, key] = ["ca.pem", "cert.pem", "key.pem"].map(|name| folder.join(name));
        let key = private_key(&key)?;
        Ok(Self { roots: certificates(&ca)?, chain: certificates(&cert)?, key })
    }
}

fn different(secret: &str) -> usize {
    secret.chars().collect::<BTreeSet<_>>().len()
}

/// The private key of a PEM file, which other users may not read.
pub(super) fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let private = read(path, true)?;
    PrivateKeyDer::from_pem_slice(&private).map_err(|error| TlsError::Wrong {
        path: path.to_owned(),
        // The error is not shown, because it may quote the file.
        why: match error {
            rustls::pki_types::pem::Error::NoItemsFound => "it holds no private key".to_owned(),
            _ => "it is no PEM file with a private key".to_owned(),
        },
    })
}

/// The certificates of a PEM file, at least one.
pub(super) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |why: String| TlsError::Wrong { path: path.to_owned(), why };
    let text = read(path, false)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| wrong(format!("it is no PEM file ({error})")))?;
    if found.is_empty() {
        return Err(wrong("it holds no certificate".to_owned()));
    }
    Ok(found)
}

/// Reads a file. No other user may be able to replace it, or to read it if it is `private`.
fn read(path: &Path, private: bool) -> Result<Vec<u8>, TlsError> {
    let unreadable = |error| TlsError::Unreadable { path: path.to_owned(), error };
    let file = File::open(path).map_err(unreadable)?;
    let found = file.metadata().map_err(unreadable)?;
    let mode = found.permissions().mode() & 0o777;
    // A group may read the file, as where an orchestrator mounts secrets, but may not write it.
    if private && mode & 0o027 != 0 {
        return Err(TlsError::Exposed { path: path.to_owned(), mode });
    }
    let ways = host_ownership::check(path, &found).map_err(unreadable)?;
    if !ways.refused.is_empty() {
        return Err(TlsError::Replaceable { path: path.to_owned(), ways: ways.refused.join("; ") });
    }
    let mut bytes = Vec::new();
    file.take(LARGEST).read_to_end(&mut bytes).map_err(unreadable)?;
    Ok(bytes)
}
