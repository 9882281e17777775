//! The control plane's only source of randomness.

use std::io;

/// 64 random bits from the kernel.
///
/// # Errors
/// When the kernel has no randomness, as early at boot.
pub fn random_u64() -> io::Result<u64> {
    let mut bytes = [0_u8; 8];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    if filled == bytes.len() {
        Ok(u64::from_ne_bytes(bytes))
    } else {
        Err(io::Error::other(format!("the kernel gave {filled} of {} random bytes", bytes.len())))
    }
}
