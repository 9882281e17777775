//! The segments that this instance writes: gives space for values, appends their records, and retires full segments.
//!
//! `tests/shuttle` compiles this file with shuttle's locks.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use host_plugin_api::ErrorCode;
use parking_lot::Mutex;

use crate::backing::write_at;
use crate::config::Fsync;
use crate::format::{BLOCK, Name, Value, position, record, seal};
use crate::segment::Segment;
use crate::sync::atomic::{AtomicU32, Ordering};

struct Published {
    /// Number of the next record.
    next: u32,
    /// The first byte after the last value that has a record.
    end: u64,
}

/// A segment of this instance without a seal. Its index file is locked as long as this lives.
pub struct OpenSegment {
    pub segment: Arc<Segment>,
    pub data: Arc<OwnedFd>,
    index: OwnedFd,
    size: u64,
    published: Mutex<Published>,
    /// How many writes are between their allocation and their record.
    writing: AtomicU32,
}

impl OpenSegment {
    pub fn new(segment: Arc<Segment>, data: Arc<OwnedFd>, index: OwnedFd, size: u64) -> Arc<Self> {
        let published = Mutex::new(Published { next: 0, end: 0 });
        Arc::new(Self { segment, data, index, size, published, writing: AtomicU32::new(0) })
    }

    /// Appends the records of values whose bytes are in the file. Returns the first one's number.
    pub fn publish(&self, values: &[Value], fsync: Fsync) -> io::Result<u32> {
        if fsync == Fsync::Always {
            rustix::fs::fdatasync(&self.data)?;
        }
        let first = {
            let mut published = self.published.lock();
            let first = published.next;
            let mut bytes = Vec::with_capacity(values.len() * crate::format::RECORD);
            for (number, value) in (first..).zip(values) {
                bytes.extend_from_slice(&record(self.segment.name, number, value));
            }
            // The next call overwrites records of a call that failed.
            write_at(&self.index, &bytes, position(first))?;
            published.next += values.len() as u32;
            published.end = values.iter().map(Value::end).fold(published.end, u64::max);
            first
        };
        if fsync == Fsync::Always {
            rustix::fs::fdatasync(&self.index)?;
        }
        Ok(first)
    }

    /// The number that the next record gets.
    pub fn next(&self) -> u32 {
        self.published.lock().next
    }

    /// Notes that an allocated write has ended, well or not.
    pub fn ended(&self) {
        self.writing.fetch_sub(1, Ordering::SeqCst);
    }

    /// Overwrites a record of this segment with zeros.
    pub fn erase(&self, number: u32) -> io::Result<()> {
        write_at(&self.index, &[0; crate::format::RECORD], position(number))
    }

    /// Cuts the data and appends the seal. False when nothing was ever published.
    pub fn seal(&self, fsync: Fsync) -> io::Result<bool> {
        let published = self.published.lock();
        if published.next == 0 {
            return Ok(false);
        }
        rustix::fs::ftruncate(&self.data, published.end)?;
        if fsync != Fsync::Never {
            rustix::fs::fdatasync(&self.data)?;
        }
        write_at(&self.index, &seal(self.segment.name, published.next), position(published.next))?;
        if fsync != Fsync::Never {
            rustix::fs::fdatasync(&self.index)?;
        }
        Ok(true)
    }
}

/// Space for values of one write.
pub struct Space {
    pub open: Arc<OpenSegment>,
    /// The first block.
    pub block: u32,
}

/// Why there is no space.
#[derive(Debug)]
pub enum NoSpace {
    /// The keeper is making a segment. Try again.
    Wait,
    /// The keeper could not make one.
    Refused(ErrorCode),
}

struct State {
    current: Option<Arc<OpenSegment>>,
    /// Bytes of the current segment that are given to writes.
    used: u64,
    spare: Option<Arc<OpenSegment>>,
    /// Full, but not sealed yet.
    retired: Vec<Arc<OpenSegment>>,
    /// Being sealed.
    taken: Vec<Arc<OpenSegment>>,
    refused: Option<(ErrorCode, Instant)>,
    wanted: bool,
}

impl State {
    fn all(&self) -> impl Iterator<Item = &Arc<OpenSegment>> {
        self.current.iter().chain(&self.spare).chain(&self.retired).chain(&self.taken)
    }
}

/// The open segments of this instance.
pub struct Writer {
    state: Mutex<State>,
}

impl Writer {
    pub fn new() -> Self {
        let state = State {
            current: None,
            used: 0,
            spare: None,
            retired: Vec::new(),
            taken: Vec::new(),
            refused: None,
            wanted: false,
        };
        Self { state: Mutex::new(state) }
    }

    /// Gives space for a write of `bytes` bytes, a multiple of blocks and no more than a segment. Also says whether the
    /// keeper is needed. The caller must end the space with [`ended`](OpenSegment::ended).
    pub fn space(&self, bytes: u64) -> (Result<Space, NoSpace>, bool) {
        let mut state = self.state.lock();
        for _ in 0..2 {
            if let Some(open) = &state.current {
                if state.used + bytes <= open.size {
                    let (open, block) = (open.clone(), (state.used / BLOCK) as u32);
                    open.writing.fetch_add(1, Ordering::SeqCst);
                    state.used += bytes;
                    // The keeper makes the next segment while there is room in this one.
                    let soon = state.used > open.size / 2 && state.spare.is_none() && !state.wanted;
                    let soon = soon && state.refused.is_none_or(|(_, until)| Instant::now() >= until);
                    state.wanted |= soon;
                    return (Ok(Space { open, block }), soon);
                }
                let full = state.current.take();
                state.retired.extend(full);
            }
            state.current = state.spare.take();
            state.used = 0;
        }
        match state.refused {
            Some((code, until)) if Instant::now() < until => (Err(NoSpace::Refused(code)), false),
            _ => {
                state.wanted = true;
                (Err(NoSpace::Wait), true)
            }
        }
    }

    /// Whether a segment was requested.
    pub fn is_wanted(&self) -> bool {
        self.state.lock().wanted
    }

    /// Whether there is a segment to write to, with or without room.
    pub fn has_any(&self) -> bool {
        let state = self.state.lock();
        state.current.is_some() || state.spare.is_some()
    }

    /// Takes the keeper's answer for the threads that want a segment.
    pub fn supply(&self, made: Result<Arc<OpenSegment>, (ErrorCode, Instant)>) {
        let mut state = self.state.lock();
        state.wanted = false;
        match made {
            Ok(open) => {
                state.refused = None;
                state.spare = Some(open);
            }
            Err(refused) => state.refused = Some(refused),
        }
    }

    /// The open segment of this number.
    pub fn open_segment(&self, id: u32) -> Option<Arc<OpenSegment>> {
        self.state.lock().all().find(|open| open.segment.id == id).cloned()
    }

    /// The open segment of this name.
    pub fn knows(&self, name: Name) -> Option<u32> {
        self.state.lock().all().find(|open| open.segment.name == name).map(|open| open.segment.id)
    }

    /// Retires a segment: a write to it failed, or its name is gone. Nothing more goes into it.
    pub fn give_up(&self, id: u32) {
        let mut state = self.state.lock();
        let State { current, spare, retired, .. } = &mut *state;
        for place in [current, spare] {
            if place.as_ref().is_some_and(|open| open.segment.id == id) {
                retired.extend(place.take());
            }
        }
    }

    /// Whether there are full segments that have yet to be sealed.
    pub fn has_full(&self) -> bool {
        let state = self.state.lock();
        !state.retired.is_empty() || !state.taken.is_empty()
    }

    /// Retires all segments, as if they were full.
    pub fn retire(&self) {
        let mut state = self.state.lock();
        let State { current, spare, retired, .. } = &mut *state;
        retired.extend(current.take());
        retired.extend(spare.take());
    }

    /// Takes a full segment without writes in flight. The caller seals it, and then has it [forgotten](Self::forget).
    pub fn take_full(&self) -> Option<Arc<OpenSegment>> {
        let mut state = self.state.lock();
        let at = state.retired.iter().position(|open| open.writing.load(Ordering::SeqCst) == 0)?;
        let open = state.retired.remove(at);
        state.taken.push(open.clone());
        Some(open)
    }

    /// Removes a segment that was taken, because it is not this writer's any more.
    pub fn forget(&self, open: &Arc<OpenSegment>) {
        self.state.lock().taken.retain(|other| !Arc::ptr_eq(other, open));
    }
}
