//! Entry points for fuzzing: the readers of foreign files, as functions of bytes.
//!
//! Each returns whether the bytes were accepted. None may panic, whatever the bytes are.

use std::convert::Infallible;
use std::io::{Cursor, Write as _};
use std::path::Path;

use super::bounded::Bounded;
use super::dynamic::{needs_its_place, versions};
use super::lock::Lock;
use super::manifest::Manifest;
use super::policy::Policy;
use super::preflight::read_and_check;
use super::publishers::{Publishers, Verified};
use super::sidecar;

/// A plugin's file: its headers, notes, manifest and dynamic section.
#[must_use]
pub fn elf(bytes: &[u8]) -> bool {
    let policy = Policy { insecure_permissions: true, panic_abort: true, publishers: None };
    let data = Bounded::new(Cursor::new(bytes));
    let read = read_and_check(&data, bytes.len() as u64, &policy);
    let _place = needs_its_place(&Bounded::new(Cursor::new(bytes)));
    let _versions = versions(&Bounded::new(Cursor::new(bytes)));
    if let Err(error) = &read {
        assert!(!error.reason().is_empty() && !error.to_string().is_empty());
    }
    read.is_ok()
}

/// Reads a manifest, and checks the configuration that follows it after a zero byte.
#[must_use]
pub fn manifest(bytes: &[u8]) -> bool {
    let mut texts = bytes.splitn(2, |byte| *byte == 0).map(String::from_utf8_lossy);
    let manifest = Manifest::parse(&texts.next().unwrap_or_default());
    let Ok(manifest) = manifest else { return false };
    let _fits = manifest.check_config(&texts.next().unwrap_or_default()).is_ok();
    true
}

/// Reads a `NAME.plugin.toml`.
#[must_use]
pub fn side_car(bytes: &[u8]) -> bool {
    sidecar::parse(&String::from_utf8_lossy(bytes), Path::new("plugins")).is_ok()
}

/// Reads a `plugins.lock`.
#[must_use]
pub fn lock(bytes: &[u8]) -> bool {
    let path = Path::new("plugins/plugins.lock");
    let Ok(lock) = Lock::parse(&String::from_utf8_lossy(bytes), path) else { return false };
    let _listed = lock.check(Path::new("plugins/shm.so"), "00").is_ok();
    true
}

/// Reads a file of publishers, and after a zero byte a signature, which it verifies for the bytes after another one.
#[must_use]
pub fn signature(bytes: &[u8]) -> bool {
    let mut parts = bytes.splitn(3, |byte| *byte == 0);
    let mut part = || parts.next().unwrap_or_default();
    let (publishers, signature, signed) = (part(), part(), part());
    let publishers = Publishers::parse(&String::from_utf8_lossy(publishers), Path::new("publishers.toml"));
    let Ok(publishers) = publishers else { return false };
    let write = |to: &mut Verified<'_>| {
        let written = to.write_all(signed);
        assert!(written.is_ok());
        Ok::<_, Infallible>(String::new())
    };
    match publishers.verify_bytes(&String::from_utf8_lossy(signature), write) {
        Ok(Ok(signed)) => publishers.check_id(&signed, "host.test.seed").is_ok(),
        Ok(Err(why)) => {
            assert!(!why.is_empty());
            false
        }
        Err(never) => match never {},
    }
}
