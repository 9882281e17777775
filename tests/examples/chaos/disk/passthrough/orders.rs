//! What the file system is told to do to reads, writes and syncs.

use std::io;
use std::ops::Range;
use std::sync::Mutex;
use std::time::Duration;

/// None: all goes well.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orders {
    /// Each is so many milliseconds late.
    pub late: Option<Range<u64>>,
    /// One of so many fails with EIO.
    pub fails: Option<u32>,
}

/// What was done.
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

/// The orders that count now.
#[derive(Default)]
pub struct Told(Mutex<State>);

impl Told {
    pub fn tell(&self, orders: Orders) {
        self.0.lock().unwrap().orders = orders;
    }

    /// What was done so far.
    pub fn done(&self) -> Done {
        self.0.lock().unwrap().done
    }

    /// Does to one read, write or sync what is told. It is not to be carried out after an error.
    ///
    /// # Errors
    /// EIO.
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
