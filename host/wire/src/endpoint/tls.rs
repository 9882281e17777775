//! Mutual TLS 1.3 between the processes of a cluster.
//!
//! What proves membership lies in files, which are looked at for every new connection. When they have changed, new connections use
//! what is in them; those that are open go on. Files that cannot be used change nothing and are warned of.

mod files;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use rustls::client::Resumption;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

use super::NAME;
use files::{Material, Stamps};

/// What proves that a process belongs to the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsSource {
    /// A file of secrets, one a line. The first makes this process's certificate, all make ones that are accepted.
    Secret(PathBuf),
    /// A folder with `ca.pem`, `cert.pem` and `key.pem`.
    Certificates(PathBuf),
}

/// Why files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is not there, or closed to this process.
    #[error("{} cannot be read: {error}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// Other users may read or change a secret.
    #[error("{0} is open to other users of this machine (mode {mode:03o}): chmod 600 {0}", path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// Other users may put a file of theirs in its place.
    #[error("{} could be replaced by others: {ways}", path.display())]
    Replaceable {
        /// The file.
        path: PathBuf,
        /// Which file or folder lets them, and what to do.
        ways: String,
    },
    /// A file holds something else.
    #[error("{}: {why}", path.display())]
    Wrong {
        /// The file or folder.
        path: PathBuf,
        /// What is the matter with it.
        why: String,
    },
}

/// This process's proof of membership, and what it takes as others'.
#[derive(Clone)]
pub struct Tls(Arc<Shared>);

struct Shared {
    source: TlsSource,
    now: Mutex<Now>,
}

struct Now {
    stamps: Stamps,
    sides: Sides,
    /// Why the files of now are not used, if they are not.
    trouble: String,
}

/// What both ends of new connections use.
#[derive(Clone)]
struct Sides {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

/// Names the files alone.
impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Tls").field(&self.0.source).finish()
    }
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load(source: TlsSource) -> Result<Self, TlsError> {
        let stamps = Stamps::of(&source);
        let sides = read(&source)?;
        let now = Mutex::new(Now { stamps, sides, trouble: String::new() });
        Ok(Self(Arc::new(Shared { source, now })))
    }

    /// What a connection that begins now uses. Reads the files if they have changed.
    fn sides(&self) -> Sides {
        let Shared { source, now } = &*self.0;
        let stamps = Stamps::of(source);
        let mut now = now.lock();
        if stamps != now.stamps {
            match read(source) {
                Ok(sides) => {
                    tracing::info!(?source, "the files of the cluster's identity have changed and are used");
                    *now = Now { stamps, sides, trouble: String::new() };
                }
                Err(error) => {
                    let trouble = error.to_string();
                    // Once, not for every connection.
                    if trouble != now.trouble {
                        tracing::warn!(%error, "the cluster's identity stays as it was");
                        now.trouble = trouble;
                    }
                }
            }
        }
        now.sides.clone()
    }

    /// As [`sides`](Self::sides), apart from the control plane's threads: the files may lie on a slow file system.
    async fn look(&self) -> io::Result<Sides> {
        let tls = self.clone();
        tokio::task::spawn_blocking(move || tls.sides()).await.map_err(io::Error::other)
    }

    /// Makes a connection that was accepted one that its other end has shown a certificate on.
    ///
    /// # Errors
    /// When it has shown none of this cluster.
    pub(super) async fn accept(&self, connection: TcpStream) -> io::Result<server::TlsStream<TcpStream>> {
        let accepted =
            TlsAcceptor::from(self.look().await?.server).accept(connection).await.map_err(plainly)?;
        // An authority of others may sign for many; those of this cluster have its name.
        check_name(accepted.get_ref().1.peer_certificates())?;
        Ok(accepted)
    }

    /// Makes a connection one on which both ends have shown a certificate.
    ///
    /// # Errors
    /// When the other end has shown none of this cluster.
    pub(super) async fn connect(&self, connection: TcpStream) -> io::Result<client::TlsStream<TcpStream>> {
        TlsConnector::from(self.look().await?.client).connect(name()?, connection).await.map_err(plainly)
    }
}

/// The error of a handshake, for operators: what TLS calls it says little.
fn plainly(error: io::Error) -> io::Error {
    let why = match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::InvalidCertificate(_)) => "its certificate is of another cluster, or out of date",
        Some(rustls::Error::AlertReceived(_)) => "it does not take this process's certificate",
        Some(rustls::Error::NoCertificatesPresented) => "it shows no certificate",
        _ => return error,
    };
    let message =
        format!("{why} ({error}): both ends need the same secret, or certificates of one authority");
    io::Error::new(error.kind(), message)
}

fn name() -> io::Result<ServerName<'static>> {
    ServerName::try_from(NAME).map_err(io::Error::other)
}

fn check_name(shown: Option<&[CertificateDer<'_>]>) -> io::Result<()> {
    let first = shown.and_then(<[_]>::first).ok_or_else(|| io::Error::other("no certificate was shown"))?;
    let certificate = ParsedCertificate::try_from(first).map_err(io::Error::other)?;
    rustls::client::verify_server_name(&certificate, &name()?)
        .map_err(|_other| io::Error::other(format!("the certificate that was shown does not name {NAME}")))
}

fn read(source: &TlsSource) -> Result<Sides, TlsError> {
    let (TlsSource::Secret(path) | TlsSource::Certificates(path)) = source;
    let wrong =
        |error: &dyn std::fmt::Display| TlsError::Wrong { path: path.clone(), why: error.to_string() };
    let Material { roots: trusted, chain, key } = Material::read(source)?;
    let mut roots = RootCertStore::empty();
    for certificate in trusted {
        roots.add(certificate).map_err(|error| wrong(&error))?;
    }
    let roots = Arc::new(roots);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider)).build();
    let verifier = verifier.map_err(|error| wrong(&error))?;
    let versions = &[&rustls::version::TLS13];

    let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(versions)
        .map_err(|error| wrong(&error))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain.clone(), key.clone_key())
        .map_err(|error| wrong(&error))?;
    // A session that goes on would skip the check of the certificate.
    server.session_storage = Arc::new(NoServerSessionStorage {});
    server.send_tls13_tickets = 0;
    server.alpn_protocols = vec![b"h2".to_vec()];

    let mut client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .map_err(|error| wrong(&error))?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .map_err(|error| wrong(&error))?;
    client.resumption = Resumption::disabled();
    client.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Sides { server: Arc::new(server), client: Arc::new(client) })
}

#[cfg(test)]
mod tests;
