//! Versions of the control protocol.
//!
//! A process announces the newest and the oldest version that it speaks. Two processes use the newest version that both speak.
//! Adjacent releases have a common version, so a cluster can be upgraded worker by worker. The called side decides and answers
//! with the version. Both sides keep it, and send nothing that the other does not know.

use std::fmt;

use crate::proto::{HandshakeReply, RegisterReply, WorkerInfo};

/// The newest version that this build speaks. Version 2 has `Leave`, `Drain` and `Load.draining`. Version 3 has `EndAnswer`, the
/// settings of `Sampling` from `min_p` on, `GenerateRequest.answered`, `GenerateRequest.priority` and `GenerateRequest.client`.
pub const NEWEST: u32 = 3;
/// The oldest version that this build speaks.
pub const OLDEST: u32 = 1;
/// The versions that this build speaks.
pub const OURS: Range = Range { oldest: OLDEST, newest: NEWEST };

/// The version of the protocol that two processes use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u32);

impl Version {
    /// Routers that do not tell the version speak 1 or 2. Features of version 2 do no harm to a router of version 1: it ignores
    /// the new field and answers the new call with an error.
    const UNTOLD: Version = Version(2);

    /// Whether a router of this version can be told that a worker drains or leaves, and a worker of this version that it has to
    /// drain.
    #[must_use]
    pub fn knows_draining(self) -> bool {
        self >= Version(2)
    }

    /// Whether a worker of this version applies every setting of `Sampling` when it draws tokens. An older worker would ignore
    /// the settings that it does not know.
    #[must_use]
    pub fn knows_shaping(self) -> bool {
        self >= Version(3)
    }

    /// Whether a worker of this version can be told that an answer is complete.
    #[must_use]
    pub fn knows_ended_answers(self) -> bool {
        self >= Version(3)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The versions that a process speaks, from the oldest to the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The oldest.
    pub oldest: u32,
    /// The newest.
    pub newest: u32,
}

impl Range {
    /// The versions that a worker announces.
    #[must_use]
    pub fn of(worker: &WorkerInfo) -> Self {
        // Version 1 has no such fields.
        Self { oldest: worker.protocol_oldest.max(1), newest: worker.protocol.max(1) }
    }

    fn common(self, with: Self) -> Option<Version> {
        let newest = self.newest.min(with.newest);
        (self.oldest.max(with.oldest) <= newest).then_some(Version(newest))
    }

    fn holds(self, version: Version) -> bool {
        (self.oldest..=self.newest).contains(&version.0)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.oldest, self.newest)
    }
}

/// The version that this build and a worker use.
///
/// # Errors
/// When they have no version in common. The error names both ranges.
pub fn agree(worker: &WorkerInfo) -> Result<Version, String> {
    let theirs = Range::of(worker);
    let in_order = theirs.oldest <= theirs.newest;
    OURS.common(theirs).filter(|_| in_order).ok_or_else(|| {
        format!(
            "worker {:?} speaks versions {theirs} of the control protocol and this process {OURS}: update the older of the two",
            worker.name
        )
    })
}

/// The version that a router uses with a worker that it accepted.
///
/// # Errors
/// When the worker did not offer this version. The error names the versions of both.
pub fn of_router(offered: Range, reply: &RegisterReply) -> Result<Version, String> {
    let told = match reply.protocol {
        0 => Version(Version::UNTOLD.0.min(offered.newest)),
        told => Version(told),
    };
    if offered.holds(told) {
        return Ok(told);
    }
    let theirs = Range { oldest: reply.protocol_oldest, newest: reply.protocol_newest };
    Err(format!(
        "the router, which speaks versions {theirs} of the control protocol, answers in version {told}, and this worker offered {offered}: \
         update the older of the two"
    ))
}

/// The version that a worker uses after it accepted a handshake. `worker` is its description.
///
/// # Errors
/// When it is not a version that both speak. The error names the versions of both.
pub fn of_peer(reply: &HandshakeReply, worker: &WorkerInfo) -> Result<Version, String> {
    let agreed = agree(worker)?;
    match reply.protocol {
        // The reply of a build that is older than this field.
        0 => Ok(agreed),
        told if OURS.holds(Version(told)) => Ok(Version(told)),
        told => Err(format!(
            "worker {:?}, which speaks versions {} of the control protocol, answers in version {told}, and this process offered {OURS}: \
             update the older of the two",
            worker.name,
            Range::of(worker)
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(oldest: u32, newest: u32) -> WorkerInfo {
        WorkerInfo { name: "w".into(), protocol: newest, protocol_oldest: oldest, ..WorkerInfo::default() }
    }

    #[test]
    fn the_newest_common_version_is_spoken_and_without_one_both_are_named() {
        for (theirs, agreed) in [
            (worker(0, 0), 1),
            (worker(1, 1), 1),
            (worker(OLDEST, NEWEST), NEWEST),
            (worker(NEWEST, NEWEST + 1), NEWEST),
        ] {
            assert_eq!(agree(&theirs), Ok(Version(agreed)), "{theirs:?}");
        }
        for (oldest, newest) in [(7, 9), (NEWEST + 1, NEWEST + 2)] {
            let refused = agree(&worker(oldest, newest)).unwrap_err();
            let (theirs, ours) = (format!("{oldest} to {newest}"), format!("{OLDEST} to {NEWEST}"));
            assert!(refused.contains(&theirs) && refused.contains(&ours), "{refused}");
        }
        assert!(agree(&worker(2, 1)).is_err(), "an oldest version above the newest");
    }

    #[test]
    fn an_answer_counts_if_its_version_was_offered() {
        let reply = |protocol| RegisterReply {
            accepted: true,
            protocol,
            protocol_oldest: 7,
            protocol_newest: 9,
            ..RegisterReply::default()
        };
        let offered = Range { oldest: 1, newest: 2 };
        assert_eq!(of_router(offered, &reply(1)), Ok(Version(1)));
        assert_eq!(of_router(offered, &reply(2)), Ok(Version(2)));
        assert_eq!(of_router(offered, &reply(0)), Ok(Version(2)), "a build from before answers told it");
        assert_eq!(of_router(Range { oldest: 1, newest: 1 }, &reply(0)), Ok(Version(1)));
        for far in [7, 9, 3] {
            let refused = of_router(offered, &reply(far)).unwrap_err();
            assert!(refused.contains("7 to 9") && refused.contains("1 to 2"), "{refused}");
        }
    }

    #[test]
    fn a_handshakes_answer_counts_if_both_speak_its_version() {
        let reply = |protocol| HandshakeReply { accepted: true, protocol, ..HandshakeReply::default() };
        assert_eq!(of_peer(&reply(0), &worker(1, 1)), Ok(Version(1)), "a build from before answers told it");
        assert_eq!(of_peer(&reply(1), &worker(1, 1)), Ok(Version(1)));
        assert_eq!(of_peer(&reply(2), &worker(2, 3)), Ok(Version(2)));
        let next = NEWEST + 1;
        let refused = of_peer(&reply(next), &worker(2, next)).unwrap_err();
        let (theirs, ours) = (format!("2 to {next}"), format!("{OLDEST} to {NEWEST}"));
        assert!(refused.contains(&theirs) && refused.contains(&ours), "{refused}");
        assert!(of_peer(&reply(8), &worker(7, 9)).is_err());
    }

    #[test]
    fn draining_is_said_from_version_2_on() {
        assert!(!Version(1).knows_draining());
        assert!(Version(2).knows_draining() && Version(3).knows_draining());
    }
}
