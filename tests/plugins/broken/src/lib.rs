//! A fake for tests: the loopback backend with one defect, which shows that the conformance kit can fail.
//!
//! The plugin's file itself names the defect, see [`host_plugin_mark`].

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Thread;
use std::time::Duration;

use host_plugin_api::{
    Completion, ErrorCode, Memory, Notification, Opening, PeerId, RegionId, Result, Submission, Tag,
    TransferBackend, TransferLimits, Write,
};
use host_plugin_loopback::LoopbackBackend;

/// The completion, counted from 1, that gets lost or repeated.
const VICTIM: u64 = 40;

/// Number of threads that the library keeps, and the count of instances that wanted one.
const POOL_THREADS: u64 = 6;
static POOL: AtomicU64 = AtomicU64::new(0);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Defect {
    None,
    /// Declares notifications and delivers none.
    WrongCapabilities,
    LeaksThread,
    /// No defect: the first instances start one thread each, which the library keeps for good, up to a fixed number.
    FillsPool,
    /// Stops its thread on `shutdown`, but not when it is dropped.
    NeedsShutdown,
    LosesCompletion,
    RepeatsCompletion,
    AllocatesOnSubmit,
    BlocksInPoll,
    Panics,
    CorruptsByte,
    /// Refuses a submission without writes.
    NeedsWrites,
}

impl Defect {
    fn of_file() -> Option<Self> {
        Some(match host_plugin_mark::defect().as_str() {
            "none" => Self::None,
            "wrong-capabilities" => Self::WrongCapabilities,
            "leaks-thread" => Self::LeaksThread,
            "fills-pool" => Self::FillsPool,
            "needs-shutdown" => Self::NeedsShutdown,
            "loses-completion" => Self::LosesCompletion,
            "repeats-completion" => Self::RepeatsCompletion,
            "allocates-on-submit" => Self::AllocatesOnSubmit,
            "blocks-in-poll" => Self::BlocksInPoll,
            "panics" => Self::Panics,
            "corrupts-byte" => Self::CorruptsByte,
            "needs-writes" => Self::NeedsWrites,
            _ => return None,
        })
    }
}

/// The loopback backend with one defect.
pub struct BrokenBackend {
    inner: LoopbackBackend,
    defect: Defect,
    /// Addresses of the registered regions.
    regions: Mutex<HashMap<u32, u64>>,
    completed: AtomicU64,
    submitted: AtomicU64,
    stopped: Arc<AtomicBool>,
    thread: Option<Thread>,
}

/// Opens an instance.
///
/// # Errors
/// When the mark names no defect.
pub fn open(opening: &Opening) -> Result<BrokenBackend> {
    let unknown = || host_plugin_api::Error::new(ErrorCode::CONFIG, "the mark names no defect");
    let defect = Defect::of_file().ok_or_else(unknown)?;
    let fills = || defect == Defect::FillsPool && POOL.fetch_add(1, Ordering::SeqCst) < POOL_THREADS;
    if defect == Defect::LeaksThread || fills() {
        std::thread::spawn(|| {
            loop {
                std::thread::park();
            }
        });
    }
    let stopped = Arc::new(AtomicBool::new(false));
    let thread = (defect == Defect::NeedsShutdown).then(|| {
        let stopped = Arc::clone(&stopped);
        std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                std::thread::park();
            }
        })
        .thread()
        .clone()
    });
    Ok(BrokenBackend {
        inner: host_plugin_loopback::open(opening)?,
        defect,
        regions: Mutex::default(),
        completed: AtomicU64::new(0),
        submitted: AtomicU64::new(0),
        stopped,
        thread,
    })
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    transfer: open,
}

impl BrokenBackend {
    /// Flips a byte in the middle of the source while `submit` runs.
    fn corrupted(&self, write: &Write, submit: impl FnOnce() -> i32) -> i32 {
        let regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(base) = regions.get(&write.source_region.0) else { return submit() };
        let victim = (base + write.source_offset + u64::from(write.length / 2)) as *mut u8;
        // SAFETY: the byte is in a registered region, if the test that uses this keeps to it. Nothing else reads it now.
        unsafe { *victim ^= 1 };
        let code = submit();
        // SAFETY: as above.
        unsafe { *victim ^= 1 };
        code
    }
}

impl TransferBackend for BrokenBackend {
    fn limits(&self) -> TransferLimits {
        self.inner.limits()
    }
    fn register(&self, memory: &Memory) -> Result<RegionId> {
        let region = self.inner.register(memory)?;
        self.regions.lock().unwrap_or_else(PoisonError::into_inner).insert(region.0, memory.address.0);
        Ok(region)
    }
    fn deregister(&self, region: RegionId) -> Result<()> {
        self.inner.deregister(region)
    }
    fn endpoint(&self) -> Result<Vec<u8>> {
        self.inner.endpoint()
    }
    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId> {
        self.inner.connect(name, endpoint)
    }
    fn disconnect(&self, peer: PeerId) -> Result<()> {
        self.inner.disconnect(peer)
    }
    fn submit(&self, submission: &Submission, writes: &[Write]) -> i32 {
        let submit = || self.inner.submit(submission, writes);
        match (self.defect, writes) {
            (Defect::NeedsWrites, []) => ErrorCode::INVALID_ARGUMENT.0,
            (Defect::Panics, []) if submission.notification_length == 0 => {
                panic!("index out of bounds: there is always a first write")
            }
            (Defect::AllocatesOnSubmit, _) => {
                drop(std::hint::black_box(writes.to_vec()));
                submit()
            }
            (Defect::CorruptsByte, [_, .., last])
                if self.submitted.fetch_add(1, Ordering::Relaxed) > 0 && last.length > 16 =>
            {
                self.corrupted(last, submit)
            }
            _ => submit(),
        }
    }
    fn poll(&self, completions: &mut [Completion]) -> i32 {
        // The repeated completion needs room for one more. The case about limits, which polls 64 at once, has to find its own defect.
        let is_repeated = self.defect == Defect::RepeatsCompletion && (2..64).contains(&completions.len());
        let spare = usize::from(is_repeated);
        let room = completions.len() - spare;
        let Some(count) =
            usize::try_from(self.inner.poll(&mut completions[..room])).ok().filter(|count| *count > 0)
        else {
            if self.defect == Defect::BlocksInPoll {
                std::thread::sleep(Duration::from_millis(1));
            }
            return self.inner.poll(&mut []);
        };
        let first = self.completed.fetch_add(count as u64, Ordering::Relaxed) + 1;
        let victim =
            VICTIM.checked_sub(first).and_then(|at| usize::try_from(at).ok()).filter(|at| *at < count);
        match (self.defect, victim) {
            (Defect::LosesCompletion, Some(at)) => {
                completions.copy_within(at + 1..count, at);
                count as i32 - 1
            }
            (Defect::RepeatsCompletion, Some(at)) if spare > 0 => {
                completions[count] = completions[at];
                count as i32 + 1
            }
            _ => count as i32,
        }
    }
    fn notifications(&self, notifications: &mut [Notification]) -> i32 {
        if self.defect == Defect::WrongCapabilities { 0 } else { self.inner.notifications(notifications) }
    }
    fn cancel(&self, tag: Tag) -> i32 {
        self.inner.cancel(tag)
    }
    fn settled(&self, tag: Tag) -> i32 {
        self.inner.settled(tag)
    }
    fn event_fd(&self) -> i32 {
        self.inner.event_fd()
    }
    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        self.stopped.store(true, Ordering::Relaxed);
        self.thread.iter().for_each(Thread::unpark);
        self.inner.shutdown(deadline_ms)
    }
}
