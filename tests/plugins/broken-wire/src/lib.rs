//! A fake for tests: the backend over TCP with one defect that shows only while bytes are on their way, or with several regions.
//!
//! The plugin's file itself names the defect, see [`host_plugin_mark`].

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use host_plugin_api::{
    Completion, ErrorCode, Memory, MemoryKind, Notification, NotificationKind, Opening, PeerId, RegionId,
    Result, Submission, Tag, TransferBackend, TransferLimits, Write,
};
use host_plugin_wire::Backend;

/// Time from an early notification to the sending of its data.
const EARLY: Duration = Duration::from_millis(3);
/// Delay of a fence that is carried out after its call has returned.
const LATE: Duration = Duration::from_millis(50);
/// Longest write that `misplaces-long` puts in the right place.
const SHORT: u32 = 192 << 10;
/// For `completes-early`: the bytes that land after their submission has completed, and the least bytes of such a submission.
const TAIL: (u32, u64) = (4096, 1 << 20);
/// Bit in the tags of submissions that this fake makes by itself.
const OWN: u64 = 1 << 63;

/// The backend over TCP with one defect.
pub struct BrokenWire {
    inner: Arc<Backend>,
    defect: String,
    /// Regions, in the order of their registration.
    regions: Mutex<Vec<(RegionId, Memory)>>,
    /// The peer that was connected last.
    peer: AtomicU32,
    /// Number of calls of `limits`, for answers that alternate.
    asked: AtomicU32,
    /// The submission that was cancelled last.
    cancelled: Mutex<Option<Tag>>,
    /// Accepted submissions with their bytes, by tag, for defects that report them wrongly later.
    accepted: Mutex<HashMap<u64, (Submission, u64)>>,
    /// For `keeps-peer`: the id that each peer's name keeps, and the current id of the peer behind it.
    kept: Mutex<(HashMap<String, u32>, HashMap<u32, PeerId>)>,
}

/// Opens an instance.
///
/// # Errors
/// As the backend over TCP does.
pub fn open(opening: &Opening) -> Result<BrokenWire> {
    Ok(BrokenWire {
        inner: Arc::new(host_plugin_wire::open(opening)?),
        defect: host_plugin_mark::defect(),
        regions: Mutex::default(),
        peer: AtomicU32::new(0),
        asked: AtomicU32::new(0),
        cancelled: Mutex::default(),
        accepted: Mutex::default(),
        kept: Mutex::default(),
    })
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    transfer: open,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BrokenWire {
    fn is(&self, defect: &str) -> bool {
        self.defect == defect
    }

    fn later(&self, act: impl FnOnce(&Backend) + Send + 'static) {
        let inner = Arc::clone(&self.inner);
        std::thread::spawn(move || {
            std::thread::sleep(LATE);
            act(&inner);
        });
    }

    /// The inner backend's id for a peer that the host names.
    fn peer(&self, named: PeerId) -> PeerId {
        match self.defect.as_str() {
            "same-peer" => PeerId(self.peer.load(Ordering::Relaxed)),
            "keeps-peer" => lock(&self.kept).1.get(&named.0).copied().unwrap_or(named),
            _ => named,
        }
    }

    /// Opens a descriptor that is never closed.
    fn leak(&self, defect: &str) {
        if self.is(defect) {
            // A failure to open is ignored: then nothing leaks.
            std::mem::forget(std::fs::File::open("/dev/null"));
        }
    }

    /// Submits all but the last bytes of a submission, and then the last bytes in one of their own.
    fn without_tail(&self, submission: &Submission, writes: &[Write], bytes: u64) -> i32 {
        let Some((last, rest)) = writes.split_last().filter(|(last, _)| last.length > TAIL.0) else {
            return self.inner.submit(submission, writes);
        };
        let head = Write { length: last.length - TAIL.0, ..*last };
        let code = self.inner.submit(submission, &[rest, &[head]].concat());
        if code == 0 {
            lock(&self.accepted).insert(submission.tag.0, (*submission, bytes));
            let (length, skipped) = (TAIL.0, u64::from(head.length));
            let (source_offset, target_offset) = (last.source_offset + skipped, last.target_offset + skipped);
            let tail = Write { length, source_offset, target_offset, ..*last };
            let own = Submission { tag: Tag(submission.tag.0 | OWN), ..*submission };
            let _lands_later = self.inner.submit(&own, &[tail]);
        }
        code
    }

    /// Changes the completion of a submission, for defects that remember accepted ones.
    fn ended(&self, done: &mut Completion) {
        let Some((submission, bytes)) = lock(&self.accepted).remove(&done.tag.0) else { return };
        match self.defect.as_str() {
            "notifies-refused" if done.status == ErrorCode::INVALID_ARGUMENT.0 => {
                let own = Submission { tag: Tag(submission.tag.0 | OWN), ..submission };
                let _told = self.inner.submit(&own, &[]);
            }
            "cancelled-is-whole" if done.status == ErrorCode::CANCELLED.0 => {
                (done.status, done.bytes) = (0, bytes);
            }
            "completes-early" if done.status == 0 => done.bytes = bytes,
            _ => {}
        }
    }

    /// Changes a write of a submission, as the defect says.
    fn changed(&self, write: Write) -> Write {
        let regions = lock(&self.regions);
        match self.defect.as_str() {
            "same-source" => {
                Write { source_region: regions.first().map_or(RegionId(0), |first| first.0), ..write }
            }
            // In the kit, regions of both sides have the same size.
            "lands-partly" => {
                let size = regions.first().map_or(0, |(_, memory)| memory.length);
                let room = size.saturating_sub(write.source_offset.max(write.target_offset));
                Write { length: write.length.min(u32::try_from(room).unwrap_or(u32::MAX)), ..write }
            }
            _ => write,
        }
    }
}

impl TransferBackend for BrokenWire {
    fn limits(&self) -> TransferLimits {
        let limits = self.inner.limits();
        match self.defect.as_str() {
            "limits-writes" => TransferLimits { max_writes: limits.max_writes * 2, ..limits },
            "limits-change" => {
                let asked = self.asked.fetch_add(1, Ordering::Relaxed);
                TransferLimits { max_submissions: limits.max_submissions - asked % 2, ..limits }
            }
            "limits-submissions" => TransferLimits { max_submissions: limits.max_submissions * 2, ..limits },
            _ => limits,
        }
    }
    fn register(&self, memory: &Memory) -> Result<RegionId> {
        if self.is("registers-anything") && memory.kind != MemoryKind::DRAM {
            return Ok(RegionId(u32::MAX));
        }
        let region = self.inner.register(memory)?;
        let mut regions = lock(&self.regions);
        regions.push((region, *memory));
        Ok(if self.is("same-region") { regions[0].0 } else { region })
    }
    fn deregister(&self, region: RegionId) -> Result<()> {
        match self.defect.as_str() {
            "deregister-nothing" => Ok(()),
            "deregister-late" => {
                self.later(move |inner| drop(inner.deregister(region)));
                Ok(())
            }
            "deregisters-anything" => {
                drop(self.inner.deregister(region));
                Ok(())
            }
            _ => self.inner.deregister(region),
        }
    }
    fn endpoint(&self) -> Result<Vec<u8>> {
        self.inner.endpoint()
    }
    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId> {
        if self.is("connects-anywhere") && self.inner.connect(name, endpoint).is_err() {
            return Ok(PeerId(u32::MAX));
        }
        let peer = self.inner.connect(name, endpoint)?;
        self.leak("leaks-with-connections");
        if self.is("keeps-peer") {
            let mut kept = lock(&self.kept);
            let id = *kept.0.entry(name.to_owned()).or_insert(peer.0);
            kept.1.insert(id, peer);
            return Ok(PeerId(id));
        }
        self.peer.store(peer.0, Ordering::Relaxed);
        Ok(if self.is("same-peer") { PeerId(1) } else { peer })
    }
    fn disconnect(&self, peer: PeerId) -> Result<()> {
        lock(&self.kept).0.retain(|_, id| *id != peer.0);
        let peer = self.peer(peer);
        match self.defect.as_str() {
            "disconnect-nothing" => Ok(()),
            "disconnect-late" => {
                self.later(move |inner| drop(inner.disconnect(peer)));
                Ok(())
            }
            "disconnects-anything" => {
                drop(self.inner.disconnect(peer));
                Ok(())
            }
            "disconnect-unproven" => {
                drop(self.inner.disconnect(peer));
                Err(host_plugin_api::Error::new(ErrorCode::TIMEOUT, "this fake never proves it"))
            }
            _ => self.inner.disconnect(peer),
        }
    }
    fn submit(&self, submission: &Submission, writes: &[Write]) -> i32 {
        let submission = Submission { peer: self.peer(submission.peer), ..*submission };
        let bytes: u64 = writes.iter().map(|write| u64::from(write.length)).sum();
        self.leak("leaks-with-submissions");
        match self.defect.as_str() {
            "hangs-in-submit" => loop {
                std::thread::park();
            },
            "same-source" => {
                let writes: Vec<Write> = writes.iter().map(|write| self.changed(*write)).collect();
                self.inner.submit(&submission, &writes)
            }
            "lands-partly" if writes.iter().any(|write| self.changed(*write).length < write.length) => {
                let writes: Vec<Write> = writes.iter().map(|write| self.changed(*write)).collect();
                let own = Submission { tag: Tag(submission.tag.0 | OWN), ..submission };
                let _landed = self.inner.submit(&own, &writes);
                ErrorCode::INVALID_ARGUMENT.0
            }
            "notifies-early" if submission.notification_length > 0 && !writes.is_empty() => {
                let early = Submission { tag: Tag(submission.tag.0 | OWN), ..submission };
                let _told = self.inner.submit(&early, &[]);
                // Long enough that a kit on a busy machine looks before the data is there.
                std::thread::sleep(EARLY);
                self.inner.submit(&Submission { notification_length: 0, ..submission }, writes)
            }
            "misplaces-long" if writes.iter().any(|write| write.length > SHORT) => {
                let halves = |write: &Write| {
                    let first = Write { length: write.length.min(SHORT), ..*write };
                    let target_offset = write.target_offset.saturating_add(u64::from(first.length));
                    // The defect: the source of the second half begins where that of the first half does.
                    [first, Write { length: write.length - first.length, target_offset, ..*write }]
                };
                let writes: Vec<Write> = writes.iter().flat_map(halves).filter(|w| w.length > 0).collect();
                self.inner.submit(&submission, &writes)
            }
            "completes-early" if submission.notification_length == 0 && bytes >= TAIL.1 => {
                self.without_tail(&submission, writes, bytes)
            }
            "notifies-refused" | "cancelled-is-whole" => {
                lock(&self.accepted).insert(submission.tag.0, (submission, bytes));
                self.inner.submit(&submission, writes)
            }
            _ => self.inner.submit(&submission, writes),
        }
    }
    fn poll(&self, completions: &mut [Completion]) -> i32 {
        let Ok(count) = usize::try_from(self.inner.poll(completions)) else {
            return self.inner.poll(completions);
        };
        let cancelled = *lock(&self.cancelled);
        let mut kept = 0;
        for at in 0..count {
            let mut done = completions[at];
            let swallowed = self.is("forgets-cancelled") && cancelled == Some(done.tag);
            if done.tag.0 & OWN != 0 || swallowed {
                continue;
            }
            if self.is("counts-wrong") && done.bytes > 0 {
                done.bytes -= 1;
            }
            if self.is("cancelled-works") && done.status == ErrorCode::CANCELLED.0 {
                done.status = 0;
            }
            self.ended(&mut done);
            completions[kept] = done;
            kept += 1;
        }
        kept as i32
    }
    fn notifications(&self, notifications: &mut [Notification]) -> i32 {
        let count = self.inner.notifications(notifications);
        for seen in &mut notifications[..usize::try_from(count).unwrap_or(0)] {
            match self.defect.as_str() {
                "kind" => seen.kind = NotificationKind(3),
                "names-none" => seen.peer_name_length = 0,
                _ => {}
            }
        }
        count
    }
    fn cancel(&self, tag: Tag) -> i32 {
        *lock(&self.cancelled) = Some(tag);
        let code = self.inner.cancel(tag);
        if self.is("cancels-anything") && code == ErrorCode::INVALID_ARGUMENT.0 { 0 } else { code }
    }
    fn settled(&self, tag: Tag) -> i32 {
        match self.defect.as_str() {
            "settled-always" => 1,
            "settled-never" => 0,
            "settled-when-closed" => self.inner.settled(tag).max(1),
            _ => self.inner.settled(tag),
        }
    }
    fn event_fd(&self) -> i32 {
        self.inner.event_fd()
    }
    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        self.inner.shutdown(deadline_ms)
    }
}
