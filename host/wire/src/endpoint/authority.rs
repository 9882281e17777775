//! An authority, and the certificates that it signs for the processes of a cluster.
//!
//! All keys are Ed25519. Certificates of processes are good for both ends of a connection and name [`NAME`](super::NAME), not
//! addresses. Certificates of servers of the HTTP API have the names that clients use, and the cluster does not accept them.

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ED25519,
};
use ring::hkdf;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use time::{Duration, OffsetDateTime};

use super::NAME;
use crate::clock;

/// The reason why a certificate could not be made.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The key is not an authority's.
    #[error("it is no Ed25519 key that `host certs new` made: {0}")]
    Key(String),
    /// Making a certificate failed.
    #[error("a certificate could not be made: {0}")]
    Making(#[from] rcgen::Error),
    /// An API server with this name would pass as a process of the cluster.
    #[error("{NAME} is the name of all processes of a cluster: give the names that clients use")]
    Name,
    /// Deriving a key failed.
    #[error("a key could not be derived")]
    Deriving,
}

/// A key that signs certificates, with its own certificate.
#[derive(Debug)]
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: rcgen::Certificate,
}

/// A certificate with its key.
pub struct Issued {
    /// The certificate.
    pub certificate: rcgen::Certificate,
    /// Its key.
    pub key: KeyPair,
}

impl std::fmt::Debug for Issued {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Issued")
    }
}

/// The time during which a certificate is valid.
#[derive(Clone, Copy, Debug)]
pub enum Validity {
    /// Always. For certificates that are used no longer than a process lives.
    Always,
    /// From an hour ago, because clocks differ, for this many days.
    Days(u32),
}

/// The bytes before the 32 bytes of an Ed25519 key in PKCS #8 (RFC 8410, section 7).
const PKCS8_ED25519: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

impl Authority {
    /// A new authority.
    ///
    /// # Errors
    /// When there is no randomness.
    pub fn new(validity: Validity) -> Result<Self, AuthorityError> {
        Self::of_key(KeyPair::generate_for(&PKCS_ED25519)?, validity)
    }

    /// The authority that every process derives from the same secret.
    ///
    /// # Errors
    /// When the key cannot be derived.
    pub fn from_secret(secret: &[u8]) -> Result<Self, AuthorityError> {
        let derived = hkdf::Salt::new(hkdf::HKDF_SHA256, b"host-cluster authority 1").extract(secret);
        let mut key = PKCS8_ED25519.to_vec();
        key.resize(PKCS8_ED25519.len() + 32, 0);
        derived
            .expand(&[b"ed25519"], hkdf::HKDF_SHA256)
            .and_then(|bytes| bytes.fill(&mut key[PKCS8_ED25519.len()..]))
            .map_err(|_unspecified| AuthorityError::Deriving)?;
        let key = KeyPair::from_pkcs8_der_and_sign_algo(&PrivatePkcs8KeyDer::from(key), &PKCS_ED25519)?;
        Self::of_key(key, Validity::Always)
    }

    /// The authority of a key that [`key_pem`](Self::key_pem) returned.
    ///
    /// # Errors
    /// When the text is not such a key.
    pub fn from_key_pem(pem: &[u8], validity: Validity) -> Result<Self, AuthorityError> {
        let wrong = |error: &dyn std::fmt::Display| AuthorityError::Key(error.to_string());
        let PrivateKeyDer::Pkcs8(key) = PrivateKeyDer::from_pem_slice(pem).map_err(|error| wrong(&error))?
        else {
            return Err(wrong(&"it is not PKCS #8"));
        };
        let key =
            KeyPair::from_pkcs8_der_and_sign_algo(&key, &PKCS_ED25519).map_err(|error| wrong(&error))?;
        Self::of_key(key, validity)
    }

    fn of_key(key: KeyPair, validity: Validity) -> Result<Self, AuthorityError> {
        let mut parameters = parameters(&format!("{NAME} authority"), validity)?;
        parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = parameters.self_signed(&key)?;
        Ok(Self { issuer: Issuer::new(parameters, key), certificate })
    }

    /// The authority's own certificate, which peers trust.
    #[must_use]
    pub fn certificate(&self) -> &rcgen::Certificate {
        &self.certificate
    }

    /// The authority's key. With it every certificate of the cluster can be made.
    #[must_use]
    pub fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Signs a certificate for a new key.
    ///
    /// # Errors
    /// When there is no randomness.
    pub fn issue(&self, validity: Validity) -> Result<Issued, AuthorityError> {
        let key = KeyPair::generate_for(&PKCS_ED25519)?;
        let usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(key, &[NAME.to_owned()], usages, validity)
    }

    /// Signs a certificate for a new key of a server with these names and IP addresses.
    ///
    /// # Errors
    /// When a name cannot be in a certificate or is the cluster's name, and when there is no randomness.
    pub fn issue_server(&self, names: &[String], validity: Validity) -> Result<Issued, AuthorityError> {
        if names.iter().any(|name| name.eq_ignore_ascii_case(NAME)) {
            return Err(AuthorityError::Name);
        }
        let key = KeyPair::generate_for(&PKCS_ED25519)?;
        self.sign(key, names, vec![ExtendedKeyUsagePurpose::ServerAuth], validity)
    }

    fn sign(
        &self,
        key: KeyPair,
        names: &[String],
        usages: Vec<ExtendedKeyUsagePurpose>,
        validity: Validity,
    ) -> Result<Issued, AuthorityError> {
        let mut parameters = parameters(names.first().map_or(NAME, String::as_str), validity)?;
        // This distinguishes IP addresses from names.
        parameters.subject_alt_names = CertificateParams::new(names)?.subject_alt_names;
        parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        parameters.extended_key_usages = usages;
        Ok(Issued { certificate: parameters.signed_by(&key, &self.issuer)?, key })
    }
}

fn parameters(name: &str, validity: Validity) -> Result<CertificateParams, AuthorityError> {
    let mut parameters = CertificateParams::new(Vec::new())?;
    parameters.distinguished_name = DistinguishedName::new();
    parameters.distinguished_name.push(DnType::CommonName, name);
    if let Validity::Days(days) = validity {
        let now = i64::try_from(clock::unix_seconds()).unwrap_or_default();
        let now = OffsetDateTime::from_unix_timestamp(now).unwrap_or(OffsetDateTime::UNIX_EPOCH);
        parameters.not_before = now - Duration::HOUR;
        parameters.not_after = now.saturating_add(Duration::days(days.into()));
    }
    Ok(parameters)
}
