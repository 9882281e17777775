//! Publishers of plugins, and their signatures in minisign's format.
//!
//! An operator names a file of publishers. From then on a plugin's file is accepted only with a signature of one of them beside it,
//! `FILE.minisig`, over the file's bytes. A setting names the file of publishers, and it does not lie among the plugins: a user
//! that can add a plugin there could also add a key.
//!
//! ```toml
//! [[publisher]]
//! name = "acme"
//! key = "RWQ..."                # the second line of minisign.pub
//! plugins = ["com.acme.*"]      # ids that it may sign; any without
//! ```

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use minisign_verify::{Error, PublicKey, Signature, StreamVerifier};
use serde::Deserialize;

use super::error::PreflightError;
use super::file::{PluginFile, short_text, trusted_text};

/// Ending of the name of a signature, after the name of the signed file.
pub const SIGNATURE: &str = ".minisig";

/// Ending of the name of the signature of a file that is about to replace the plugin. Meanwhile either signature may be the valid
/// one.
pub const NEXT_SIGNATURE: &str = ".minisig.next";

/// Limit of a signature, in bytes. minisign limits its comments to 1 KiB and 8 KiB.
const LONGEST_SIGNATURE: u64 = 16 << 10;

/// The publishers that an operator trusts.
#[derive(Clone, Debug)]
pub struct Publishers {
    path: PathBuf,
    publishers: Vec<Publisher>,
}

#[derive(Clone, Debug)]
struct Publisher {
    name: String,
    key: PublicKey,
    /// Ids that the publisher may sign. An entry that ends with `.*` stands for all ids that begin so. An empty list allows all
    /// ids.
    plugins: Vec<String>,
}

/// A file of publishers.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Listed {
    #[serde(rename = "publisher")]
    publishers: Vec<ListedPublisher>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListedPublisher {
    name: String,
    key: String,
    #[serde(default)]
    plugins: Vec<String>,
}

/// A signature that was verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signed {
    /// The publisher's name in the operator's file.
    pub publisher: String,
    /// The trusted comment, which the signature covers.
    pub comment: String,
    /// The sha256, in hexadecimal, of the bytes that were verified.
    pub sha256: String,
}

/// The path of a signature with this ending.
#[must_use]
pub fn signature_of(file: &Path, ending: &str) -> PathBuf {
    let mut path = OsString::from(file);
    path.push(ending);
    path.into()
}

/// The text of the signature at this path.
///
/// # Errors
/// When it cannot be read, or is longer than a signature can be.
pub fn read_signature(path: &Path) -> io::Result<String> {
    short_text(path, LONGEST_SIGNATURE)
}

impl Publishers {
    /// Reads a file of publishers.
    ///
    /// # Errors
    /// A sentence: the file cannot be read, is wrong, or could be replaced by users that cannot replace this program.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = trusted_text(path);
        let text =
            text.map_err(|error| format!("the publishers {} cannot be read: {error}", path.display()))?;
        Self::parse(&text, path)
    }

    /// Parses the text of the file of publishers at this path.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub(super) fn parse(text: &str, path: &Path) -> Result<Self, String> {
        let wrong = |what: String| format!("the publishers {} are wrong: {what}", path.display());
        let listed: Listed = toml::from_str(text)
            .map_err(|error| wrong(error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")))?;
        let mut publishers: Vec<Publisher> = Vec::new();
        for ListedPublisher { name, key, plugins } in listed.publishers {
            if name.is_empty() || name.contains(char::is_control) {
                return Err(wrong(format!("the name {name:?} is empty or has control characters")));
            }
            let key = PublicKey::from_base64(key.trim()).map_err(|error| {
                wrong(format!("the key of {name} is not the second line of a minisign.pub: {}", said(&error)))
            })?;
            if let Some(other) = publishers.iter().find(|other| other.key == key || other.name == name) {
                return Err(wrong(format!("{} and {name} have the same name or key", other.name)));
            }
            if let Some(id) = plugins.iter().find(|id| id.trim_end_matches(".*").contains('*') || *id == "*")
            {
                return Err(wrong(format!(
                    "plugins of {name} has {id:?}: an id, or its beginning with .* behind"
                )));
            }
            publishers.push(Publisher { name, key, plugins });
        }
        if publishers.is_empty() {
            return Err(wrong("they are none".to_owned()));
        }
        Ok(Self { path: path.to_owned(), publishers })
    }

    /// Verifies the signature beside a plugin's file, in one pass over its bytes.
    pub(super) fn verify(&self, file: &PluginFile) -> Result<Signed, PreflightError> {
        let mut wrong = None;
        for ending in [SIGNATURE, NEXT_SIGNATURE] {
            let signature = signature_of(file.path(), ending);
            let text = match read_signature(&signature) {
                Ok(text) => text,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => {
                    wrong.get_or_insert(PreflightError::BadSignature {
                        signature,
                        problem: format!("it cannot be read: {error}"),
                    });
                    continue;
                }
            };
            match self.verify_text(file, &text)? {
                Ok(signed) => return Ok(signed),
                Err(problem) => {
                    wrong.get_or_insert(PreflightError::BadSignature { signature, problem });
                }
            }
        }
        Err(wrong.unwrap_or_else(|| self.not_signed(signature_of(file.path(), SIGNATURE))))
    }

    /// The error for a file that has no signature beside it.
    pub(super) fn not_signed(&self, signature: PathBuf) -> PreflightError {
        PreflightError::NotSigned { signature, publishers: self.path.clone() }
    }

    /// Verifies a signature of a plugin's file. The inner error is a sentence that says what is wrong with the signature.
    pub(super) fn verify_text(
        &self,
        file: &PluginFile,
        signature: &str,
    ) -> Result<Result<Signed, String>, PreflightError> {
        self.verify_bytes(signature, |bytes| file.digest_into(bytes))
    }

    /// Verifies a signature of the bytes that `write` writes. `write` returns their sha256, and its error is returned.
    pub(super) fn verify_bytes<E>(
        &self,
        signature: &str,
        write: impl FnOnce(&mut Verified<'_>) -> Result<String, E>,
    ) -> Result<Result<Signed, String>, E> {
        let decoded = match Signature::decode(signature) {
            Ok(decoded) => decoded,
            Err(error) => {
                let text = format!("it is no whole signature of minisign ({}): get it again", said(&error));
                return Ok(Err(text));
            }
        };
        for publisher in &self.publishers {
            let verifier = match publisher.key.verify_stream(&decoded) {
                Ok(verifier) => verifier,
                Err(Error::UnexpectedKeyId) => continue,
                Err(Error::UnsupportedLegacyMode) => {
                    let text = "it is in minisign's old format, which does not hash first: sign the file again, with a newer minisign";
                    return Ok(Err(text.to_owned()));
                }
                Err(error) => return Ok(Err(said(&error))),
            };
            let mut bytes = Verified(verifier);
            let sha256 = write(&mut bytes)?;
            if bytes.0.finalize().is_err() {
                return Ok(Err(format!(
                    "{} signed other bytes, or its trusted comment was changed: get file and signature again",
                    publisher.name
                )));
            }
            let comment = decoded.trusted_comment().to_owned();
            return Ok(Ok(Signed { publisher: publisher.name.clone(), comment, sha256 }));
        }
        Ok(Err(format!(
            "it was made with a key that no publisher in {} has: get the file from a publisher that you trust, or add its key",
            self.path.display()
        )))
    }

    /// Whether the publisher may sign plugins of this id. The error is a sentence.
    pub(super) fn check_id(&self, signed: &Signed, id: &str) -> Result<(), String> {
        let publisher = self.publishers.iter().find(|publisher| publisher.name == signed.publisher);
        let allowed = publisher.map(|publisher| publisher.plugins.as_slice()).unwrap_or_default();
        let is_it = |allowed: &String| match allowed.strip_suffix('*') {
            Some(start) => id.starts_with(start),
            None => id == allowed,
        };
        if allowed.is_empty() || allowed.iter().any(is_it) {
            return Ok(());
        }
        Err(format!(
            "{} may sign {}, and this is {id}: correct plugins in {}, or do not use the file",
            signed.publisher,
            allowed.join(", "),
            self.path.display()
        ))
    }
}

/// A writer that feeds a file's bytes to the verification of a signature.
pub(super) struct Verified<'a>(StreamVerifier<'a>);

impl Write for Verified<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An error of the library as a part of a sentence.
fn said(error: &Error) -> String {
    match error {
        Error::InvalidEncoding => "lines are missing, or are not of the right length".to_owned(),
        Error::UnsupportedAlgorithm => "its algorithm is not Ed25519".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Policy;

    /// A key, and two signatures of the text `test` by the program minisign. From the tests of its Rust library.
    const KEY: &str = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3";
    const SIGNED: &str = "untrusted comment: signature from minisign secret key\n\
        RUQf6LRCGA9i559r3g7V1qNyJDApGip8MfqcadIgT9CuhV3EMhHoN1mGTkUidF/z7SrlQgXdy8ofjb7bNJJylDOocrCo8KLzZwo=\n\
        trusted comment: timestamp:1556193335\tfile:test\n\
        y/rUw2y8/hOUYjZU71eHp/Wo1KZ40fGy2VJEDl34XMJM+TX48Ss/17u3IvIfbVR1FkZZSNCisQbuQY+bHwhEBg==\n";
    const LEGACY: &str = "untrusted comment: signature from minisign secret key\n\
        RWQf6LRCGA9i59SLOFxz6NxvASXDJeRtuZykwQepbDEGt87ig1BNpWaVWuNrm73YiIiJbq71Wi+dP9eKL8OC351vwIasSSbXxwA=\n\
        trusted comment: timestamp:1555779966\tfile:test\n\
        QtKMXWyYcwdpZAlPF7tE2ENJkRd1ujvKjlj1m9RtHTBnZPa5WKU5uWRs5GoP5M/VqE81QFuMKI5k/SfNQUaOAA==\n";
    /// Another key, which signed none of these texts.
    const OTHER: &str = "RWQAAAAAAAAAAHmlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3";

    fn publishers(key: &str, more: &str) -> Result<Publishers, String> {
        Publishers::parse(
            &format!("[[publisher]]\nname = \"acme\"\nkey = \"{key}\"\n{more}"),
            Path::new("keys"),
        )
    }

    /// The result of verifying a file with these bytes and this signature.
    fn verified(key: &str, bytes: &str, signature: &str) -> Result<Signed, PreflightError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.so");
        std::fs::write(&path, bytes).unwrap();
        std::fs::write(folder.path().join("a.so.minisig"), signature).unwrap();
        publishers(key, "").unwrap().verify(&PluginFile::open(&path, &Policy::default()).unwrap())
    }

    #[test]
    fn a_signature_of_the_program_minisign_is_verified_over_the_bytes_that_are_hashed() {
        let signed = verified(KEY, "test", SIGNED).unwrap();
        assert_eq!(
            (signed.publisher.as_str(), signed.comment.as_str()),
            ("acme", "timestamp:1556193335\tfile:test")
        );
        assert_eq!(signed.sha256, "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08");
    }

    #[test]
    fn a_signature_that_does_not_count_says_why() {
        let cut = &SIGNED[..SIGNED.len() - 100];
        let oversized = format!("{SIGNED}{}", "x".repeat(20_000));
        let commented = SIGNED.replace("file:test", "file:tesT");
        for (key, bytes, signature, says) in [
            (OTHER, "test", SIGNED, "made with a key that no publisher in keys has"),
            (KEY, "Test", SIGNED, "acme signed other bytes, or its trusted comment was changed"),
            (KEY, "test", &commented, "acme signed other bytes, or its trusted comment was changed"),
            (KEY, "test", cut, "no whole signature of minisign (lines are missing"),
            (KEY, "test", "", "no whole signature of minisign"),
            (KEY, "test", &oversized, "it has more than 16384 bytes"),
            (KEY, "test", LEGACY, "minisign's old format"),
        ] {
            let error = verified(key, bytes, signature).unwrap_err();
            assert_eq!(error.reason(), "bad_signature", "{error}");
            assert!(error.to_string().contains(says), "{says:?} is not in: {error}");
        }
    }

    #[test]
    fn a_publisher_signs_the_plugins_that_the_operator_lists() {
        let publishers = publishers(KEY, "plugins = [\"com.acme.*\", \"org.one\"]").unwrap();
        let signed = Signed { publisher: "acme".into(), comment: String::new(), sha256: String::new() };
        for (id, may) in
            [("com.acme.wire", true), ("org.one", true), ("com.acmewire", false), ("org.one.more", false)]
        {
            assert_eq!(publishers.check_id(&signed, id).is_ok(), may, "{id}");
        }
    }

    #[test]
    fn a_file_of_publishers_that_is_wrong_says_where() {
        let again = format!("[[publisher]]\nname = \"other\"\nkey = \"{KEY}\"");
        for (key, more, says) in [
            ("RWQ", "", "the key of acme is not the second line of a minisign.pub"),
            (KEY, "id = 1", "unknown field `id`"),
            (KEY, "plugins = [\"*\"]", "an id, or its beginning with .* behind"),
            (KEY, "plugins = [\"a*b\"]", "an id, or its beginning with .* behind"),
            (KEY, &again, "acme and other have the same name or key"),
        ] {
            let error = publishers(key, more).unwrap_err();
            assert!(error.contains(says) && error.contains("the publishers keys are wrong"), "{error}");
        }
        assert!(
            Publishers::parse("publisher = []", Path::new("keys")).unwrap_err().contains("they are none")
        );
    }
}
