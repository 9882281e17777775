//! A segment as readers see it, and what its index file says.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::backing::{Directory, length, read_at};
use crate::format::{BLOCK, Name, RECORD, Slot, Value, position, slot};

/// Most data files that are kept open.
const MOST_OPEN: usize = 512;
/// Most records of a segment: one per block of the largest, and the seal.
const MOST_RECORDS: u64 = (4096 << 20) / BLOCK + 1;

/// A segment that readers use.
pub struct Segment {
    /// Its number in this process.
    pub id: u32,
    pub name: Name,
    file: Mutex<Option<Arc<OwnedFd>>>,
    used: AtomicBool,
    sealed: AtomicBool,
}

impl Segment {
    pub fn new(id: u32, name: Name, file: Option<Arc<OwnedFd>>) -> Arc<Self> {
        Arc::new(Self {
            id,
            name,
            file: Mutex::new(file),
            used: AtomicBool::new(false),
            sealed: AtomicBool::new(false),
        })
    }

    /// Whether nothing is appended any more, so that every process may remove records.
    pub fn is_sealed(&self) -> bool {
        self.sealed.load(Ordering::Relaxed)
    }

    pub fn set_sealed(&self) {
        self.sealed.store(true, Ordering::Relaxed);
    }

    /// Notes that a page of the segment was read.
    pub fn used(&self) {
        self.used.store(true, Ordering::Relaxed);
    }

    /// Whether a page was read since the last call.
    pub fn take_used(&self) -> bool {
        self.used.swap(false, Ordering::Relaxed)
    }
}

/// Data files that are open, oldest first.
#[derive(Default)]
pub struct OpenFiles(Mutex<std::collections::VecDeque<Arc<Segment>>>);

impl OpenFiles {
    /// The segment's data file.
    pub fn get(&self, directory: &Directory, segment: &Arc<Segment>) -> io::Result<Arc<OwnedFd>> {
        let mut file = segment.file.lock();
        if let Some(file) = &*file {
            return Ok(file.clone());
        }
        let opened = Arc::new(directory.data(segment.name)?);
        *file = Some(opened.clone());
        drop(file);
        let mut open = self.0.lock();
        open.push_back(segment.clone());
        let oldest = (open.len() > MOST_OPEN).then(|| open.pop_front()).flatten();
        drop(open);
        if let Some(oldest) = oldest {
            *oldest.file.lock() = None;
        }
        Ok(opened)
    }

    /// Closes a segment's file. The file's space is free once the last reader is done.
    pub fn close(&self, segment: &Arc<Segment>) {
        self.0.lock().retain(|open| open.id != segment.id);
        *segment.file.lock() = None;
    }
}

/// Content of an index file from one record on.
#[derive(Default)]
pub struct Records {
    pub values: Vec<(u32, Value)>,
    pub sealed: bool,
    /// Number of damaged records.
    pub damaged: usize,
    /// The record that comes next.
    pub next: u32,
    /// The first byte after the last value.
    pub end: u64,
}

/// Reads the records from `first` on. `data` is the length of the data file: values beyond it are lost.
///
/// `UnexpectedEof` when there is no header yet. A torn record at the very end of an open segment may be a write in
/// progress, and is left for the next time.
pub fn read_records(index: &OwnedFd, name: Name, first: u32, data: u64) -> io::Result<Records> {
    let end = length(index)?.min(position(0) + MOST_RECORDS * RECORD as u64);
    if end < RECORD as u64 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if first == 0 && !name.has_header(&read_at(index, 0, RECORD)?) {
        return Err(io::Error::other(format!("{} has no header of this version", name.index())));
    }
    let from = position(first);
    Ok(parse_records(name, first, data, &read_at(index, from, end.saturating_sub(from) as usize)?))
}

/// Parses these bytes, which stand in an index file from record `first` on.
pub fn parse_records(name: Name, first: u32, data: u64, bytes: &[u8]) -> Records {
    let mut found = Records { next: first, ..Records::default() };
    let records = bytes.chunks_exact(RECORD).filter_map(<[u8]>::first_chunk::<RECORD>);
    let last = bytes.len() / RECORD;
    found.values.reserve(last);
    for (at, bytes) in records.enumerate() {
        let number = first + at as u32;
        match slot(name, number, bytes) {
            Slot::Value(value) if value.end() <= data => {
                found.end = found.end.max(value.end());
                found.values.push((number, value));
            }
            Slot::Value(_) => found.damaged += 1,
            Slot::Seal => found.sealed = true,
            Slot::Empty => {}
            Slot::Damaged if at + 1 == last && !found.sealed => return found,
            Slot::Damaged => found.damaged += 1,
        }
        found.next = number + 1;
    }
    found
}
