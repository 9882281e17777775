//! TLS of the HTTP API: a server shows a certificate and clients check it. Clients show no certificate.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, ClientConfig, Error, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

use super::files::{certificates, private_key};
use super::reloaded::Reloaded;
use super::{TlsError, provider};
use crate::clock;

/// A connection accepted from a client, after the handshake.
pub type AcceptedTls = server::TlsStream<TcpStream>;
/// A connection to a server whose certificate was checked.
pub type ConnectedTls = client::TlsStream<TcpStream>;

/// The certificate that a server shows, and its key: TLS 1.2 and 1.3, HTTP/2 and HTTP/1.1.
///
/// The files are checked for changes at every new connection. Open connections continue.
#[derive(Clone)]
pub struct ApiTls(Arc<Reloaded<Shown>>);

#[derive(Clone)]
struct Shown {
    config: Arc<ServerConfig>,
    expires: Arc<Expiry>,
}

/// When a certificate expires, and whether this was logged.
struct Expiry {
    file: PathBuf,
    at: u64,
    told: AtomicBool,
}

impl std::fmt::Debug for ApiTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ApiTls").field(&self.0.files()).finish()
    }
}

impl ApiTls {
    /// Reads a file of certificates, the server's own first, and the file of its key (blocking). Both are PEM.
    ///
    /// # Errors
    /// When a file cannot be read or has wrong content, when other users could read the key, or when the key belongs to another
    /// certificate. An expired certificate causes a warning only.
    pub fn load(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        let files = vec![certificate.to_owned(), key.to_owned()];
        let (certificate, key) = (certificate.to_owned(), key.to_owned());
        let read = Box::new(move || shown(&certificate, &key));
        Ok(Self(Arc::new(Reloaded::load("the API's certificate", files, read)?)))
    }

    /// Makes the handshake on an accepted connection.
    ///
    /// # Errors
    /// When the client does not make a handshake, or does not speak TLS.
    pub async fn accept(&self, connection: TcpStream) -> io::Result<AcceptedTls> {
        let files = Arc::clone(&self.0);
        // On another thread than those of the control plane, because the files may be on a slow file system.
        let shown = tokio::task::spawn_blocking(move || files.now()).await.map_err(io::Error::other)?;
        shown.expires.tell();
        TlsAcceptor::from(shown.config).accept(connection).await
    }
}

fn shown(certificate: &Path, key: &Path) -> Result<Shown, TlsError> {
    let wrong = |path: &Path, why: String| TlsError::Wrong { path: path.to_owned(), why };
    let chain = certificates(certificate)?;
    let private = private_key(key)?;
    let provider = provider();
    let end = chain.first().map_or(Ok(u64::MAX), |own| check_date(certificate, own, &provider))?;
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(key, error.to_string()))?
        .with_no_client_auth()
        .with_single_cert(chain, private);
    let mut config = config.map_err(|error| match error {
        Error::InconsistentKeys(_) => {
            wrong(key, format!("it is not the key of the certificate in {}", certificate.display()))
        }
        Error::InvalidCertificate(_) => {
            wrong(certificate, format!("its certificate cannot be used: {error}"))
        }
        error => wrong(key, format!("it cannot be used: {error}")),
    })?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let expires = Expiry { file: certificate.to_owned(), at: end, told: AtomicBool::new(false) };
    expires.tell();
    Ok(Shown { config: Arc::new(config), expires: Arc::new(expires) })
}

/// Returns the second at which a certificate expires. Warns if it is not valid yet.
fn check_date(
    file: &Path,
    certificate: &CertificateDer<'_>,
    provider: &CryptoProvider,
) -> Result<u64, TlsError> {
    let parsed = ParsedCertificate::try_from(certificate).map_err(|error| TlsError::Wrong {
        path: file.to_owned(),
        why: format!("its certificate cannot be used: {error}"),
    })?;
    // Dates are checked before issuers, and no issuer is given here. So the error is about the date, or about the missing issuer.
    let problem_at = |seconds: u64| {
        let (now, none) = (UnixTime::since_unix_epoch(Duration::from_secs(seconds)), RootCertStore::empty());
        let algorithms = provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &none, &[], now, algorithms).err()
    };
    if let Some(Error::InvalidCertificate(
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. },
    )) = problem_at(clock::unix_seconds())
    {
        tracing::warn!(file = %file.display(), "the API's certificate is not valid yet; clients refuse it");
    }
    Ok(match problem_at(u64::MAX) {
        Some(Error::InvalidCertificate(CertificateError::ExpiredContext { not_after, .. })) => {
            not_after.as_secs()
        }
        _ => u64::MAX,
    })
}

impl Expiry {
    /// Warns once that a certificate has expired.
    fn tell(&self) {
        let now = clock::unix_seconds();
        if now > self.at && !self.told.swap(true, Ordering::Relaxed) {
            let hours = (now - self.at) / 3600;
            tracing::warn!(file = %self.file.display(), hours, "the API's certificate has expired; clients refuse it");
        }
    }
}

/// The authorities that a client of the API trusts.
#[derive(Clone)]
pub struct Authorities(Arc<ClientConfig>);

/// Shows no authorities, because there may be hundreds.
impl std::fmt::Debug for Authorities {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Authorities")
    }
}

/// The reason why there are no authorities.
#[derive(Debug, thiserror::Error)]
pub enum NoAuthorities {
    /// The file cannot be used.
    #[error(transparent)]
    File(#[from] TlsError),
    /// The system has none.
    #[error("this machine has no certificates of authorities{0}")]
    Nowhere(String),
    /// TLS does not accept them.
    #[error("{0}")]
    Unusable(Error),
}

impl Authorities {
    /// The authorities of a file (blocking). A self-signed certificate counts as its own authority.
    ///
    /// # Errors
    /// When the file cannot be read, or has no certificate.
    pub fn of_file(file: &Path) -> Result<Self, NoAuthorities> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(file)? {
            roots.add(certificate).map_err(|error| TlsError::Wrong {
                path: file.to_owned(),
                why: format!("a certificate of it cannot be used: {error}"),
            })?;
        }
        Self::of(roots)
    }

    /// The authorities of this machine, or of the file that `SSL_CERT_FILE` names (blocking).
    ///
    /// # Errors
    /// When there are no authorities.
    pub fn of_system() -> Result<Self, NoAuthorities> {
        let found = rustls_native_certs::load_native_certs();
        let mut roots = RootCertStore::empty();
        // Some systems have a certificate that cannot be parsed. Such certificates are left out.
        roots.add_parsable_certificates(found.certs);
        if roots.is_empty() {
            let why = found.errors.first().map(|error| format!(": {error}")).unwrap_or_default();
            return Err(NoAuthorities::Nowhere(why));
        }
        Self::of(roots)
    }

    fn of(roots: RootCertStore) -> Result<Self, NoAuthorities> {
        let config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(NoAuthorities::Unusable)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self(Arc::new(config)))
    }

    /// Makes the handshake with a server. Its certificate must be signed by one of these authorities, and must name `host`: a
    /// name, or an IP address without brackets.
    ///
    /// # Errors
    /// When the certificate does not pass, or the connection breaks. [`is_untrusted`] distinguishes the two.
    pub async fn connect(&self, host: &str, connection: TcpStream) -> io::Result<ConnectedTls> {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        TlsConnector::from(Arc::clone(&self.0)).connect(name, connection).await
    }
}

/// Whether a handshake failed because of the certificate that the server shows.
#[must_use]
pub fn is_untrusted(error: &io::Error) -> bool {
    let error = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    matches!(error, Some(Error::InvalidCertificate(_)))
}

#[cfg(test)]
mod tests;
