//! TLS: mutual between the processes of a cluster, and for servers only in the HTTP API.
//!
//! Certificates, keys and secrets are in files, which are checked for changes at every new connection. When they have changed,
//! new connections use the new content. Open connections continue. Files that cannot be used change nothing, and are warned of.

mod api;
mod files;
mod reloaded;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

use super::NAME;
use files::Material;
use reloaded::Reloaded;

pub use api::{AcceptedTls, ApiTls, Authorities, ConnectedTls, NoAuthorities, is_untrusted};

/// The files that prove that a process belongs to the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsSource {
    /// A file of secrets, one a line. This process's certificate comes from the first. Certificates from all of them are
    /// accepted.
    Secret(PathBuf),
    /// A folder with `ca.pem`, `cert.pem` and `key.pem`.
    Certificates(PathBuf),
}

/// The reason why files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is missing, or this process may not read it.
    #[error("{} cannot be read: {error}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
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
    /// Other users may replace the file with one of theirs.
    #[error("{} could be replaced by others: {ways}", path.display())]
    Replaceable {
        /// The file.
        path: PathBuf,
        /// The files or folders that let them, and the remedy.
        ways: String,
    },
    /// The content of a file is wrong.
    #[error("{}: {why}", path.display())]
    Wrong {
        /// The file or folder.
        path: PathBuf,
        /// The problem.
        why: String,
    },
}

/// This process's proof of membership, and the proofs that it accepts from others.
#[derive(Clone)]
pub struct Tls {
    source: TlsSource,
    sides: Arc<Reloaded<Sides>>,
}

/// The settings of both ends for new connections.
#[derive(Clone)]
struct Sides {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

/// Shows only the names of the files.
impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Tls").field(&self.source).finish()
    }
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load(source: TlsSource) -> Result<Self, TlsError> {
        let again = source.clone();
        let read = Box::new(move || read(&again));
        let sides = Arc::new(Reloaded::load("the cluster's identity", source.files(), read)?);
        Ok(Self { source, sides })
    }

    /// The settings for a connection that begins now. The files may be on a slow file system, so they are checked on another
    /// thread than those of the control plane.
    async fn look(&self) -> io::Result<Sides> {
        let sides = Arc::clone(&self.sides);
        tokio::task::spawn_blocking(move || sides.now()).await.map_err(io::Error::other)
    }

    /// Makes the handshake on an accepted connection, in which the other end has to show a certificate.
    ///
    /// # Errors
    /// When the other end shows no certificate of this cluster.
    pub(super) async fn accept(&self, connection: TcpStream) -> io::Result<server::TlsStream<TcpStream>> {
        let accepted =
            TlsAcceptor::from(self.look().await?.server).accept(connection).await.map_err(plainly)?;
        // The authority may sign certificates for others, too. Certificates of this cluster have its name.
        check_name(accepted.get_ref().1.peer_certificates())?;
        Ok(accepted)
    }

    /// Makes the handshake on a connection to a server, in which both ends show a certificate.
    ///
    /// # Errors
    /// When the other end shows no certificate of this cluster.
    pub(super) async fn connect(&self, connection: TcpStream) -> io::Result<client::TlsStream<TcpStream>> {
        TlsConnector::from(self.look().await?.client).connect(name()?, connection).await.map_err(plainly)
    }
}

/// The error of a handshake in words for operators, because the TLS error alone says little.
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

/// The implementation of the cryptography.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
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
    let provider = provider();
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
    // A resumed session would skip the check of the certificate.
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
