//! Publishers that sign files with a key of their own, in minisign's format.

use std::fs::File;
use std::path::Path;

use minisign::KeyPair;

/// A publisher.
pub struct Publisher {
    name: &'static str,
    keys: KeyPair,
}

impl Publisher {
    /// A publisher with a new key.
    ///
    /// # Panics
    /// When the system has no random numbers.
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        Self { name, keys: KeyPair::generate_unencrypted_keypair().expect("a key") }
    }

    /// Its entry in a file of publishers, with more lines behind.
    #[must_use]
    pub fn entry(&self, more: &str) -> String {
        format!("[[publisher]]\nname = \"{}\"\nkey = \"{}\"\n{more}\n", self.name, self.keys.pk.to_base64())
    }

    /// The signature of a file.
    ///
    /// # Panics
    /// When the file cannot be read.
    #[must_use]
    pub fn signature(&self, file: &Path) -> String {
        let bytes = File::open(file).expect("a file to sign");
        let signed = minisign::sign(Some(&self.keys.pk), &self.keys.sk, bytes, Some("for tests"), None);
        signed.expect("a signature").into_string()
    }

    /// Writes the signature of a file beside it.
    ///
    /// # Panics
    /// As [`Self::signature`], and when it cannot be written.
    pub fn sign(&self, file: &Path) {
        let mut beside = file.as_os_str().to_owned();
        beside.push(".minisig");
        std::fs::write(beside, self.signature(file)).expect("a signature is written");
    }
}
