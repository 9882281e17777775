//! Copies pages on the CPU, and divides the work among threads.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::rows::{self, CopyRows, Rows};
use super::{CopyError, CopyPages, Dimension, Memory, PagesCopy, Strip, plan};

/// Copies shorter than this stay on the caller's thread: waking another one costs as much as copying about this.
const PARALLEL_FROM: usize = 256 << 10;

/// Bytes that a thread takes at a time.
const CHUNK: usize = 128 << 10;

/// With [`Stores::Auto`], copies from this size on go past the caches. They would not fit in the caches, and such stores
/// need not read the memory that they overwrite.
const STREAMING_FROM: usize = 16 << 20;

/// How targets are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stores {
    /// Chosen by the size of the copy.
    #[default]
    Auto,
    /// Through the caches: for a target that this machine reads soon.
    Cached,
    /// Past the caches where the target's alignment and the CPU allow.
    Streaming,
}

/// Copies pages of the CPU's memory, on its caller's thread and some of its own.
///
/// A copier is meant for one caller at a time. Concurrent callers share its threads.
#[derive(Debug)]
pub struct Copier {
    /// All threads except the caller's. Absent if the copier has one thread only.
    pool: Option<rayon::ThreadPool>,
    threads: usize,
    stores: Stores,
}

impl Copier {
    /// A copier that uses `threads` threads for large copies, including the caller's. With 1 it starts no thread, and all work
    /// stays on the caller's thread. With 0 it uses one thread per core.
    ///
    /// # Errors
    /// When the system refuses to start the threads.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            some => some,
        };
        let pool = if threads == 1 {
            None
        } else {
            let builder =
                rayon::ThreadPoolBuilder::new().num_threads(threads - 1).thread_name(|i| format!("copy-{i}"));
            Some(builder.build().map_err(std::io::Error::other)?)
        };
        Ok(Self { pool, threads, stores: Stores::Auto })
    }

    /// The same copier, which writes targets in this way.
    #[must_use]
    pub fn with_stores(self, stores: Stores) -> Self {
        Self { stores, ..self }
    }

    /// Copies pages of `source` into pages of `target`.
    ///
    /// # Errors
    /// As [`CopyPages::copy_memory`]. Nothing was copied then.
    pub fn copy(&self, copy: &PagesCopy<'_>, source: &[u8], target: &mut [u8]) -> Result<(), CopyError> {
        let from = Memory::new(source.as_ptr().cast_mut(), source.len());
        let to = Memory::new(target.as_mut_ptr(), target.len());
        // SAFETY: both slices are borrowed until the copy is done, the target exclusively. `from` is only read.
        unsafe { self.copy_memory(copy, from, to) }
    }

    /// Copies pages of `pool` into other pages of it.
    ///
    /// # Errors
    /// As [`CopyPages::copy_memory`], so also when a page is both source and target. Nothing was copied then.
    pub fn copy_within(&self, copy: &PagesCopy<'_>, pool: &mut [u8]) -> Result<(), CopyError> {
        let memory = Memory::new(pool.as_mut_ptr(), pool.len());
        // SAFETY: the pool is borrowed exclusively until the copy is done. The check refuses copies that write rows which
        // they read.
        unsafe { self.copy_memory(copy, memory, memory) }
    }
}

impl CopyPages for Copier {
    unsafe fn copy_memory(
        &self,
        copy: &PagesCopy<'_>,
        source: Memory,
        target: Memory,
    ) -> Result<(), CopyError> {
        let strips = plan(copy, source, target)?;
        let bytes = copy.bytes();
        let streaming = match self.stores {
            Stores::Auto => bytes >= STREAMING_FROM,
            Stores::Cached => false,
            Stores::Streaming => true,
        };
        for strip in &strips {
            let work = StripCopy::new(strip, copy.pages, source, target, streaming);
            match &self.pool {
                Some(pool) if bytes >= PARALLEL_FROM => in_parallel(pool, self.threads, &work),
                // SAFETY: the plan was checked against both memories, for which the caller vouches.
                _ => unsafe { work.copy(0, work.bytes) },
            }
        }
        Ok(())
    }
}

/// Copies a strip in chunks, which the caller and idle threads take.
///
/// The caller begins at once. Threads that wake late find fewer chunks left, or none.
fn in_parallel(pool: &rayon::ThreadPool, threads: usize, work: &StripCopy<'_>) {
    let chunks = work.bytes.div_ceil(CHUNK);
    let next = AtomicUsize::new(0);
    let take = || {
        loop {
            let chunk = next.fetch_add(1, Ordering::Relaxed);
            if chunk >= chunks {
                return;
            }
            let start = chunk * CHUNK;
            // SAFETY: the plan was checked against both memories, for which the caller of the copy vouches. Chunks are
            // different bytes of the target, because no two of its rows overlap.
            unsafe { work.copy(start, (start + CHUNK).min(work.bytes)) };
        }
    };
    pool.in_place_scope(|scope| {
        for _ in 1..threads.min(chunks) {
            scope.spawn(|_| take());
        }
        take();
    });
}

/// Pages that follow each other on both sides, if the strip lets pages join. Otherwise a single page.
struct PageRun {
    source: usize,
    target: usize,
    /// Position of its first page in the list.
    first: usize,
    pages: usize,
}

/// A strip over all its pages, treated as one line of bytes: page run after page run, row after row.
struct StripCopy<'a> {
    strip: &'a Strip,
    source: Memory,
    target: Memory,
    streaming: bool,
    page_runs: Vec<PageRun>,
    page_bytes: usize,
    bytes: usize,
    /// The loop for whole rows of one page.
    copy_rows: CopyRows,
}

impl<'a> StripCopy<'a> {
    fn new(strip: &'a Strip, pages: &[[u32; 2]], source: Memory, target: Memory, streaming: bool) -> Self {
        let mut page_runs: Vec<PageRun> = Vec::with_capacity(pages.len());
        for (first, &[from, to]) in pages.iter().enumerate() {
            let (from, to) = (from as usize, to as usize);
            if let Some(last) = page_runs.last_mut()
                && strip.pages_join
                && (last.source + last.pages, last.target + last.pages) == (from, to)
            {
                last.pages += 1;
            } else {
                page_runs.push(PageRun { source: from, target: to, first, pages: 1 });
            }
        }
        let steps = strip.dims.iter().fold(strip.target_page, |bits, dimension| bits | dimension.target);
        let alignment = alignment_of(target.address().wrapping_add(strip.target) | steps);
        let page_bytes = strip.page_bytes();
        Self {
            strip,
            source,
            target,
            streaming,
            page_runs,
            page_bytes,
            bytes: page_bytes * pages.len(),
            copy_rows: rows::choose(strip.run, streaming, alignment),
        }
    }

    /// Copies the bytes from `start` to `end` of the line.
    ///
    /// # Safety
    /// Both memories are as [`CopyPages::copy_memory`] says, and no other thread copies any of these bytes.
    unsafe fn copy(&self, start: usize, end: usize) {
        let mut at = start;
        let mut next = self.page_runs.partition_point(|run| run.first * self.page_bytes <= start) - 1;
        while at < end {
            let pages = &self.page_runs[next];
            next += 1;
            let first = pages.first * self.page_bytes;
            let run = self.strip.run * pages.pages;
            let last = (first + self.page_bytes * pages.pages).min(end);
            while at < last {
                let (row, skip) = ((at - first) / run, (at - first) % run);
                let rows = (last - at) / run;
                if skip == 0 && rows > 0 {
                    // SAFETY: whole rows of these pages, which the plan found inside both memories. The caller vouches
                    // for the memories.
                    unsafe { self.copy_whole(pages, self.page_runs.get(next), run, row, rows) };
                    at += rows * run;
                } else {
                    let part = (run - skip).min(last - at);
                    // SAFETY: as above, for a part of one row.
                    unsafe { self.copy_part(pages, row, skip, part) };
                    at += part;
                }
            }
        }
        if self.streaming {
            rows::settle();
        }
    }

    /// Copies `rows` rows of the pages, from the row number `row` on. `after` is the next page run.
    ///
    /// # Safety
    /// As [`Self::copy`].
    unsafe fn copy_whole(
        &self,
        pages: &PageRun,
        after: Option<&PageRun>,
        run: usize,
        mut row: usize,
        mut rows: usize,
    ) {
        let inner = self.strip.dims.last().copied().unwrap_or(Dimension::NONE);
        let most = if self.streaming { (rows::AHEAD / run).max(1) } else { usize::MAX };
        let (mut source, mut target) = self.addresses(pages, row);
        while rows > 0 {
            let count = (inner.extent - row % inner.extent).min(rows).min(most);
            let following = match after {
                _ if rows > count => Some((pages, row + count)),
                Some(pages) if self.streaming => Some((pages, 0)),
                _ => None,
            };
            let next = following.map_or((source, target), |(pages, row)| self.addresses(pages, row));
            let these = Rows {
                source,
                target,
                source_step: inner.source,
                target_step: inner.target,
                count,
                run,
                ahead: next.0,
            };
            let copy = if run == self.strip.run { self.copy_rows } else { self.choose(&these) };
            // SAFETY: these rows lie inside both memories and apart from each other, as the plan was checked. The
            // caller vouches for the memories.
            unsafe { copy(these) };
            (source, target) = next;
            row += count;
            rows -= count;
        }
    }

    /// Copies `part` bytes of one row, after its first `skip`.
    ///
    /// # Safety
    /// As [`Self::copy`].
    unsafe fn copy_part(&self, pages: &PageRun, row: usize, skip: usize, part: usize) {
        let (source, target) = self.addresses(pages, row);
        let these = Rows {
            source: source.wrapping_add(skip),
            target: target.wrapping_add(skip),
            source_step: 0,
            target_step: 0,
            count: 1,
            run: part,
            ahead: source,
        };
        // SAFETY: a part of a row that lies inside both memories. The caller vouches for the memories.
        unsafe { self.choose(&these)(these) };
    }

    fn choose(&self, rows: &Rows) -> CopyRows {
        rows::choose(rows.run, self.streaming, alignment_of(rows.target.addr() | rows.target_step))
    }

    /// Where a row of the pages begins on both sides.
    fn addresses(&self, pages: &PageRun, mut row: usize) -> (*const u8, *mut u8) {
        let strip = self.strip;
        let mut source = strip.source + pages.source * strip.source_page;
        let mut target = strip.target + pages.target * strip.target_page;
        for dimension in strip.dims.iter().rev() {
            let index = row % dimension.extent;
            row /= dimension.extent;
            source += index * dimension.source;
            target += index * dimension.target;
        }
        (self.source.base.wrapping_add(source).cast_const(), self.target.base.wrapping_add(target))
    }
}

/// The largest power of two up to 4096 that divides all these addresses and steps, given as their bitwise OR.
fn alignment_of(bits: usize) -> usize {
    1 << bits.trailing_zeros().min(12)
}
