//! Lets one copy of this library start Python at a time in a process. Each loaded copy has statics of its own, and two
//! copies that start Python at once end the process.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// A file that differs between processes, is the same for all libraries of one process, and that nothing else locks.
const OWN: &str = "/proc/self/status";
/// Time between two tries to get the lock.
const PAUSE: Duration = Duration::from_millis(2);

/// Holds the lock, as long as it lives.
pub struct Alone(#[allow(dead_code, reason = "closing it is what unlocks")] Option<File>);

impl Alone {
    /// Waits until no other copy holds the lock.
    ///
    /// # Errors
    /// When another copy holds it for longer than `patience`.
    pub fn within(patience: Duration) -> Result<Self, String> {
        Self::lock(Path::new(OWN), patience)
    }

    fn lock(path: &Path, patience: Duration) -> Result<Self, String> {
        // Without such a file, or without locks on it, this assumes that there is one copy.
        let Ok(file) = File::open(path) else { return Ok(Self(None)) };
        let start = Instant::now();
        loop {
            match flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self(Some(file))),
                Err(Errno::WOULDBLOCK | Errno::INTR) if start.elapsed() < patience => {
                    std::thread::sleep(PAUSE)
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) => {
                    return Err(format!(
                        "another copy of this plugin has been starting Python in this process for {patience:?}: load one copy"
                    ));
                }
                Err(_) => return Ok(Self(None)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_copy_waits_for_the_first_and_not_for_ever() {
        // Other tests of this process take it, too, and a process that is being started holds it until it runs its program.
        let long = Duration::from_secs(60);
        let first = Alone::within(long).unwrap();
        assert!(first.0.is_some(), "{OWN} takes no lock");
        let error = Alone::within(Duration::from_millis(10)).err().unwrap();
        assert!(error.contains("another copy"), "{error}");
        drop(first);
        assert!(Alone::within(long).unwrap().0.is_some());
        assert!(Alone::lock(Path::new("/no/such/file"), Duration::ZERO).unwrap().0.is_none());
    }
}
