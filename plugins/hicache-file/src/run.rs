//! A run: pages that are read or written at once. They are neighbours in a data file, and lie anywhere in memory.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use crate::format::Value;
use crate::memory::{Buffer, Vector};
use crate::queue::Claimed;
use crate::segment::Segment;
use crate::writer::OpenSegment;

/// A page of a run.
pub struct RunPage {
    pub page: Claimed,
    pub value: Value,
    /// Number of its record, for a read.
    pub number: u32,
    /// Its bytes could not be read before.
    pub is_suspect: bool,
    /// Buffer for memory that is not aligned.
    pub buffer: Option<Buffer>,
}

pub enum RunPlace {
    /// Read from this segment.
    From(Arc<Segment>),
    /// Written to this segment.
    To(Arc<OpenSegment>),
}

/// Neighbouring pages of a data file and their places in memory. While the system works on it, it must neither move nor be dropped.
pub struct Run {
    pub place: RunPlace,
    pub parts: Vec<RunPage>,
    pub file: Arc<OwnedFd>,
    start: u64,
    vectors: Vec<Vector>,
    /// How many vectors are done.
    behind: usize,
    pub total: usize,
    pub done: usize,
}

// SAFETY: the vectors point to the parts' memory, which may be used by one thread at a time.
unsafe impl Send for Run {}

impl Run {
    /// Makes a run of parts that lie one after the other in the file.
    pub fn new(place: RunPlace, file: Arc<OwnedFd>, mut parts: Vec<RunPage>) -> Self {
        let vector = |part: &mut RunPage| match (&mut part.buffer, part.page.span) {
            (Some(buffer), _) => buffer.vector(),
            (None, Some(span)) => span.vector(),
            (None, None) => Vector { base: std::ptr::null_mut(), length: 0 },
        };
        let mut vectors: Vec<Vector> = Vec::with_capacity(parts.len());
        let mut after_host = false;
        for part in &mut parts {
            let (is_host, next) = (part.buffer.is_none(), vector(part));
            match vectors.last_mut() {
                // One vector for neighbours in the host's memory.
                Some(last) if is_host && after_host && last.base.wrapping_add(last.length) == next.base => {
                    last.length += next.length;
                }
                _ => vectors.push(next),
            }
            after_host = is_host;
        }
        let total = vectors.iter().map(|vector| vector.length).sum();
        let start = parts.first().map_or(0, |part| part.value.start());
        Self { place, parts, file, start, vectors, behind: 0, total, done: 0 }
    }

    pub fn is_read(&self) -> bool {
        matches!(self.place, RunPlace::From(_))
    }

    /// The piece of `size` bytes of the host's memory that contains the whole run: its region, its number and its
    /// place. None when there is no such piece.
    pub fn piece(&self, size: u64) -> Option<(u32, u64, Vector)> {
        let of = |part: &RunPage| {
            let span = part.page.span.filter(|_| part.buffer.is_none())?;
            let (number, piece) = span.piece(size)?;
            Some((part.page.what.region.0, number, piece))
        };
        let first = self.parts.first().and_then(of)?;
        let same = |part: &RunPage| {
            of(part).is_some_and(|(region, number, _)| (region, number) == (first.0, first.1))
        };
        self.parts[1..].iter().all(same).then_some(first)
    }

    /// The vectors that are left, and the byte of the file where they start.
    pub fn rest(&self) -> (&[Vector], u64) {
        (&self.vectors[self.behind..], self.start + self.done as u64)
    }

    /// Notes that `bytes` more bytes are done. Says whether that is all.
    pub fn advance(&mut self, bytes: usize) -> bool {
        self.done += bytes;
        let mut left = bytes;
        while let Some(vector) = self.vectors.get_mut(self.behind)
            && left > 0
        {
            let step = left.min(vector.length);
            vector.base = vector.base.wrapping_add(step);
            vector.length -= step;
            left -= step;
            if vector.length == 0 {
                self.behind += 1;
            }
        }
        self.done >= self.total
    }

    /// Carries out the run in this thread. A read that meets the end of the file ends early, without an error.
    pub fn execute(&mut self) -> io::Result<()> {
        while self.done < self.total {
            let (vectors, at) = self.rest();
            let moved = if self.is_read() {
                // SAFETY: the parts' memory belongs to the run until their completions, and nothing else writes it.
                let slice =
                    |v: &Vector| IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(v.base, v.length) });
                rustix::io::preadv(&self.file, &mut vectors.iter().map(slice).collect::<Vec<_>>(), at)
            } else {
                // SAFETY: as above, and nothing writes it.
                let slice =
                    |v: &Vector| IoSlice::new(unsafe { std::slice::from_raw_parts(v.base, v.length) });
                rustix::io::pwritev(&self.file, &vectors.iter().map(slice).collect::<Vec<_>>(), at)
            };
            match moved {
                Ok(0) if self.is_read() => return Ok(()),
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => {
                    self.advance(bytes);
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }
}
