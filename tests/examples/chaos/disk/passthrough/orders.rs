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

/// The orders that count now.
#[derive(Default)]
pub struct Told(Mutex<(Orders, fastrand::Rng)>);

impl Told {
    pub fn tell(&self, orders: Orders) {
        self.0.lock().unwrap().0 = orders;
    }

    /// Does to one read, write or sync what is told. It is not to be carried out after an error.
    ///
    /// # Errors
    /// EIO.
    pub fn obey(&self) -> io::Result<()> {
        let (late, fails) = {
            let (orders, random) = &mut *self.0.lock().unwrap();
            let late = orders.late.clone().map(|late| Duration::from_millis(random.u64(late)));
            (late, orders.fails.is_some_and(|every| random.u32(0..every) == 0))
        };
        if let Some(late) = late {
            std::thread::sleep(late);
        }
        if fails { Err(rustix::io::Errno::IO.into()) } else { Ok(()) }
    }
}
