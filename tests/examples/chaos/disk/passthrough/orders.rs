//! The orders of the file system: what it does to reads, writes and syncs.

use std::io;
use std::ops::Range;
use std::sync::Mutex;
use std::time::Duration;

/// Delays and failures that are ordered. The default orders neither.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orders {
    /// Each call is late by a random number of milliseconds from this range.
    pub late: Option<Range<u64>>,
    /// One of so many calls fails with EIO.
    pub fails: Option<u32>,
}

/// Counts of late and failed calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    pub late: u64,
    pub failed: u64,
}

#[derive(Default)]
struct State {
    orders: Orders,
    random: fastrand::Rng,
    done: Done,
}

/// The orders in force.
#[derive(Default)]
pub struct Told(Mutex<State>);

impl Told {
    pub fn tell(&self, orders: Orders) {
        self.0.lock().unwrap().orders = orders;
    }

    /// Counts of late and failed calls so far.
    pub fn done(&self) -> Done {
        self.0.lock().unwrap().done
    }

    /// Delays one read, write or sync as ordered. After an error the caller must not carry it out.
    ///
    /// # Errors
    /// EIO, when the call is ordered to fail.
    pub fn obey(&self) -> io::Result<()> {
        let (late, fails) = {
            let State { orders, random, done } = &mut *self.0.lock().unwrap();
            let late = orders.late.clone().map(|late| Duration::from_millis(random.u64(late)));
            let fails = orders.fails.is_some_and(|every| random.u32(0..every) == 0);
            done.late += u64::from(late.is_some());
            done.failed += u64::from(fails);
            (late, fails)
        };
        if let Some(late) = late {
            std::thread::sleep(late);
        }
        if fails { Err(rustix::io::Errno::IO.into()) } else { Ok(()) }
    }
}
