//! Versions of the control protocol.
//!
//! A process says the newest and the oldest version that it speaks. Two processes work together in the newest that both speak, so
//! adjacent releases do, and a cluster is rolled from one to the next worker by worker.

use crate::proto::WorkerInfo;

/// The newest version that this build speaks. Version 2 has `Leave`, `Drain` and `Load.draining`.
pub const NEWEST: u32 = 2;
/// The oldest version that this build speaks.
pub const OLDEST: u32 = 1;

/// The version in which this build and a worker speak.
///
/// # Errors
/// Names both, when they have none in common.
pub fn agree(worker: &WorkerInfo) -> Result<u32, String> {
    // Version 1 did not say so.
    let (newest, oldest) = (worker.protocol.max(1), worker.protocol_oldest.max(1));
    if oldest > NEWEST || newest < OLDEST || oldest > newest {
        return Err(format!(
            "worker {:?} speaks versions {oldest} to {newest} of the control protocol and this process {OLDEST} to {NEWEST}: \
             update the older of the two",
            worker.name
        ));
    }
    Ok(newest.min(NEWEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_common_version_is_spoken_and_without_one_both_are_named() {
        let worker = |protocol, protocol_oldest| WorkerInfo {
            name: "w".into(),
            protocol,
            protocol_oldest,
            ..WorkerInfo::default()
        };
        assert_eq!(agree(&worker(0, 0)), Ok(1), "a build from before versions were told");
        assert_eq!(agree(&worker(NEWEST, OLDEST)), Ok(NEWEST));
        assert_eq!(agree(&worker(NEWEST + 1, NEWEST)), Ok(NEWEST), "the next release");
        let refused = agree(&worker(NEWEST + 2, NEWEST + 1)).unwrap_err();
        let (theirs, ours) = (format!("{} to {}", NEWEST + 1, NEWEST + 2), format!("{OLDEST} to {NEWEST}"));
        assert!(refused.contains(&theirs) && refused.contains(&ours), "{refused}");
        assert!(agree(&worker(1, 2)).is_err(), "an oldest version above the newest");
    }
}
