//! The state that the threads of an instance share.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use host_plugin_api::{ErrorCode, Key, Level, Result, log};
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;

use crate::backing::{Directory, write_at};
use crate::config::Config;
use crate::format::{RECORD, position};
use crate::index::{Hit, Index};
use crate::metrics::Metrics;
use crate::queue::Queue;
use crate::segment::{OpenFiles, Segment};
use crate::writer::Writer;

/// The shared state of one instance.
pub struct Store {
    pub config: Config,
    pub directory: Directory,
    pub queue: Queue,
    pub index: Mutex<Index>,
    pub files: OpenFiles,
    pub writer: Writer,
    pub metrics: Metrics,
    /// Whether the keeper must work before its time.
    call: Mutex<bool>,
    called: Condvar,
    broken: AtomicBool,
    /// A ring was dropped while the kernel worked on its runs. The kernel may touch the host's memory at any later time.
    pub abandoned: Arc<AtomicBool>,
}

impl Store {
    pub fn new(config: Config, wakers: usize) -> Result<Self> {
        let metrics = Metrics::new()?;
        let (batches, pages) = (config.max_batches, config.max_pages);
        let queue = Queue::new(batches, pages, config.max_value(), wakers, metrics)?;
        let mut index = Index::new();
        index.loading = true;
        Ok(Self {
            directory: Directory::open(&config)?,
            queue,
            index: Mutex::new(index),
            files: OpenFiles::default(),
            writer: Writer::new(),
            metrics,
            call: Mutex::new(false),
            called: Condvar::new(),
            broken: AtomicBool::new(false),
            abandoned: Arc::default(),
            config,
        })
    }

    /// Wakes the keeper.
    pub fn call_keeper(&self) {
        *self.call.lock() = true;
        self.called.notify_all();
    }

    /// Waits, in the keeper, for a call or for the time `most`.
    pub fn wait_for_call(&self, most: Duration) {
        let mut call = self.call.lock();
        let _timed_out = self.called.wait_while_for(&mut call, |called| !*called, most);
        *call = false;
    }

    /// Breaks the instance, because a thread of it panicked.
    pub fn set_broken(&self) {
        self.broken.store(true, Ordering::SeqCst);
        self.queue.close();
        self.call_keeper();
    }

    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Forgets one record of a page.
    fn remove(&self, key: &Key, segment: &Segment, number: u32) -> io::Result<()> {
        if self.index.lock().remove(key, segment.id, number) { self.erase(segment, number) } else { Ok(()) }
    }

    /// Forgets a page, with all known records of it. Returns the first error of several.
    pub fn delete(&self, key: &Key) -> io::Result<()> {
        let records = self.index.lock().remove_all(key);
        let erased = records.iter().map(|(segment, number)| self.erase(segment, *number));
        erased.fold(Ok(()), io::Result::and)
    }

    /// Removes a record that the index has forgotten from the disk: now, or when its segment is sealed.
    fn erase(&self, segment: &Segment, number: u32) -> io::Result<()> {
        if self.directory.read_only {
            return Ok(());
        }
        if let Some(open) = self.writer.open_segment(segment.id) {
            return open.erase(number);
        }
        if self.index.lock().doom(segment.id, number) {
            return Ok(());
        }
        self.erase_sealed(segment, &[number])
    }

    fn erase_sealed(&self, segment: &Segment, numbers: &[u32]) -> io::Result<()> {
        let index = match self.directory.index(segment.name, true) {
            // The segment was evicted meanwhile, with its records.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        numbers.iter().try_for_each(|number| write_at(&index, &[0; RECORD], position(*number)))
    }

    /// Marks a segment as sealed that another process or a writer of this instance had open, and erases its doomed records.
    pub fn sealed(&self, segment: &Segment) {
        segment.set_sealed();
        let doomed = self.index.lock().take_doomed(segment.id);
        if !doomed.is_empty()
            && !self.directory.read_only
            && let Err(e) = self.erase_sealed(segment, &doomed)
        {
            let path = self.directory.path().display();
            let (count, name) = (doomed.len(), segment.name.index());
            log!(Level::WARN, "{count} deleted pages stay in {path}/{name}, and come back at a restart: {e}");
        }
    }

    /// Counts, logs and removes a page whose bytes are not those that were written.
    pub fn corrupt(&self, key: &Key, segment: &Segment, number: u32) {
        self.metrics.corrupt.add(1);
        let (path, file) = (self.directory.path().display(), segment.name.data());
        let then = if self.directory.read_only { "not served any more" } else { "removed" };
        log!(Level::WARN, "a page in {path}/{file} is damaged: {then}");
        if let Err(e) = self.remove(key, segment, number) {
            log!(Level::WARN, "the record of a damaged page in {path}/{file} stays: {e}");
        }
    }

    /// Forgets a segment whose files are gone.
    pub fn forget(&self, segment: &Arc<Segment>) -> usize {
        let pages = self.index.lock().drop_segment(segment.id);
        self.files.close(segment);
        self.writer.give_up(segment.id);
        pages
    }

    pub fn find(&self, key: &Key) -> (Option<Hit>, bool) {
        let index = self.index.lock();
        let hit = index.find(key);
        (hit, index.loading)
    }
}

/// Whether the error says that there is no room.
pub fn is_full(error: &io::Error) -> bool {
    let full = [Errno::NOSPC, Errno::DQUOT, Errno::FBIG];
    full.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// Whether the error says that the process has no memory or descriptors, or gave the call up, and nothing about the file.
pub fn is_of_this_process(error: &io::Error) -> bool {
    let own =
        [Errno::NOMEM, Errno::FAULT, Errno::MFILE, Errno::NFILE, Errno::AGAIN, Errno::INTR, Errno::CANCELED];
    own.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// The code that a put ends in.
pub fn code_of(error: &io::Error) -> ErrorCode {
    if is_full(error) { ErrorCode::NO_RESOURCE } else { ErrorCode::IO }
}
