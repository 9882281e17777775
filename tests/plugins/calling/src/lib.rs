//! A fake for tests: a transfer plugin without a descriptor of its own, that logs, counts and wakes the host.
//!
//! It moves no bytes. Its own thread completes each submission and wakes the host. When it is told to be stubborn, its shutdown
//! never ends and keeps reading the host's memory.

use std::collections::VecDeque;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use host_plugin_api::{
    Completion, Error, ErrorCode, Level, Memory, Notification, Opening, PeerId, RegionId, Result, Submission,
    Tag, TransferBackend, TransferLimits, WAKES, Write, host, log,
};

/// A backend that completes submissions without moving bytes.
pub struct CallingBackend {
    started: Mutex<Option<Sender<Tag>>>,
    done: Arc<Mutex<VecDeque<Completion>>>,
    stubborn: bool,
    /// The addresses of registered memory.
    registered: Mutex<Vec<u64>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The text after a key of the configuration, found without a TOML parser.
fn value<'a>(config: &'a str, key: &str) -> Option<&'a str> {
    config.lines().find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix('=').map(str::trim))
}

fn list<'a>(config: &'a str, key: &str) -> impl Iterator<Item = &'a str> {
    let items = value(config, key).unwrap_or("[]").trim_matches(['[', ']']).split(',');
    items.map(|item| item.trim().trim_matches('"')).filter(|item| !item.is_empty())
}

/// Whether an instance would open with this configuration.
///
/// # Errors
/// `CONFIG` when the configuration asks to be refused.
pub fn check(role: &str, config: &str) -> Result<()> {
    match value(config, "text").map(|text| text.trim_matches('"')) {
        Some("refuse me") => {
            let text = format!("the {role} role refuses the text \"refuse me\": give another");
            Err(Error::new(ErrorCode::CONFIG, text))
        }
        _ => Ok(()),
    }
}

/// Opens an instance.
///
/// # Errors
/// The host's errors about the names of counters and gauges.
///
/// # Panics
/// When the configuration says so.
pub fn open(opening: &Opening) -> Result<CallingBackend> {
    let config = &opening.config;
    for name in list(config, "counters") {
        host().counter(name)?.add(1);
    }
    for name in list(config, "gauges") {
        host().gauge(name)?.set(7);
    }
    let lines: u32 = value(config, "lines").and_then(|lines| lines.parse().ok()).unwrap_or(0);
    for line in 0..lines {
        log!(Level::INFO, "line {line} of many");
    }
    if let Some(text) = value(config, "text") {
        for level in [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE] {
            log!(level, "{} {text}", level.0);
        }
    }
    assert!(value(config, "panic") != Some("true"), "told to panic while opening");
    let (started, tags) = channel::<Tag>();
    let done: Arc<Mutex<VecDeque<Completion>>> = Arc::default();
    let finished = done.clone();
    // The thread ends when the instance's sender is dropped.
    std::thread::spawn(move || {
        for tag in tags {
            locked(&finished).push_back(Completion { tag, bytes: 0, status: 0, reserved: 0 });
            host().wake();
        }
    });
    let stubborn = value(config, "stubborn") == Some("true");
    Ok(CallingBackend { started: Mutex::new(Some(started)), done, stubborn, registered: Mutex::default() })
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    transfer: open,
    check_config: check,
}

impl TransferBackend for CallingBackend {
    fn limits(&self) -> TransferLimits {
        TransferLimits::new(64, 1024)
    }
    fn register(&self, memory: &Memory) -> Result<RegionId> {
        locked(&self.registered).push(memory.address.0);
        Ok(RegionId(1))
    }
    fn deregister(&self, _region: RegionId) -> Result<()> {
        Ok(())
    }
    fn endpoint(&self) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }
    fn connect(&self, _name: &str, _endpoint: &[u8]) -> Result<PeerId> {
        Ok(PeerId(1))
    }
    fn disconnect(&self, _peer: PeerId) -> Result<()> {
        Ok(())
    }
    fn submit(&self, submission: &Submission, _writes: &[Write]) -> i32 {
        let sent = locked(&self.started).as_ref().map(|started| started.send(submission.tag).is_ok());
        if sent == Some(true) { 0 } else { ErrorCode::CLOSED.0 }
    }
    fn poll(&self, completions: &mut [Completion]) -> i32 {
        let mut done = locked(&self.done);
        let mut count = 0;
        for (place, completion) in completions.iter_mut().zip(std::iter::from_fn(|| done.pop_front())) {
            *place = completion;
            count += 1;
        }
        count
    }
    fn notifications(&self, _notifications: &mut [Notification]) -> i32 {
        0
    }
    fn cancel(&self, _tag: Tag) -> i32 {
        ErrorCode::INVALID_ARGUMENT.0
    }
    fn settled(&self, _tag: Tag) -> i32 {
        1
    }
    fn event_fd(&self) -> i32 {
        WAKES
    }
    fn shutdown(&self, _deadline_ms: u64) -> Result<()> {
        locked(&self.started).take();
        if self.stubborn {
            loop {
                for address in &*locked(&self.registered) {
                    // SAFETY: the memory was not deregistered, so the host keeps it mapped.
                    let _byte = unsafe { std::ptr::read_volatile(*address as *const u8) };
                }
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}
