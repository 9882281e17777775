//! Copies of one device, one after the other, each of many runs.

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use host_plugin_api::{Level, log};

use super::device::Device;
use super::driver::{Driver, NOT_READY, Object, Refused};
use super::list::{BATCH_BYTES, BATCH_RUNS, Batch, Overlaps, Run};

/// Text of the kernel. Every driver compiles it for its device when it is loaded.
const KERNEL: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("copy_pieces.ptx"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("the kernel's text has a zero in it"),
    };

/// Longest piece that a block of the kernel takes, in bytes: longer runs are cut, so that all of a device's processors have some.
const PIECE: u64 = 32 << 10;
/// Most pieces of a batch. Each run has at most one piece that is shorter.
const PIECES: usize = (BATCH_BYTES / PIECE) as usize + BATCH_RUNS;
/// Threads of a block, as the kernel's text has them.
const THREADS: u32 = 256;
/// Most blocks. An H100 is as fast as it gets with about half of the bytes that these blocks have on the way.
const BLOCKS: u32 = 528;

/// A piece as the kernel reads it.
#[repr(C)]
#[derive(Clone, Copy)]
struct DevicePiece {
    to: u64,
    from: u64,
    bytes: u64,
}

/// A place for a copy that was begun.
struct Slot {
    event: Object,
    /// `PIECES` of them, in memory that the device reads. Null without a kernel.
    list: *mut DevicePiece,
}

/// A stream of copies on one device. It belongs to one thread.
pub struct Stream {
    device: Arc<Device>,
    stream: Object,
    slots: Vec<Slot>,
    module: Object,
    /// Null when the driver does not take the kernel.
    kernel: Object,
    overlaps: Overlaps,
}

impl Stream {
    /// A stream that has at most `at_once` copies under way.
    pub fn new(device: Arc<Device>, at_once: usize) -> Result<Self, Refused> {
        let null = std::ptr::null_mut();
        let mut made = Self {
            device: device.clone(),
            stream: null,
            slots: Vec::new(),
            module: null,
            kernel: null,
            overlaps: Overlaps::default(),
        };
        device.within(|driver| made.fill(driver, at_once))?;
        Ok(made)
    }

    fn fill(&mut self, driver: &Driver, at_once: usize) -> Result<(), Refused> {
        const NON_BLOCKING: u32 = 1;
        const DISABLE_TIMING: u32 = 2;
        const PORTABLE_AND_MAPPED: u32 = 1 | 2;
        // SAFETY: it writes one pointer.
        let made = unsafe { (driver.cuStreamCreate)(&raw mut self.stream, NON_BLOCKING) };
        driver.check(made, "make a stream")?;
        if let Err(refused) = self.load(driver) {
            log!(
                Level::WARN,
                "pages are copied one by one, because the driver does not take the kernel: {refused}"
            );
        }
        for _ in 0..at_once {
            let mut slot = Slot { event: std::ptr::null_mut(), list: std::ptr::null_mut() };
            // SAFETY: it writes one pointer.
            let made = unsafe { (driver.cuEventCreate)(&raw mut slot.event, DISABLE_TIMING) };
            driver.check(made, "make an event")?;
            let mut list: *mut c_void = std::ptr::null_mut();
            let bytes = PIECES * size_of::<DevicePiece>();
            // SAFETY: it writes one pointer.
            let given = unsafe { (driver.cuMemHostAlloc)(&raw mut list, bytes, PORTABLE_AND_MAPPED) };
            slot.list = list.cast();
            self.slots.push(slot);
            driver.check(given, "take pinned memory")?;
        }
        Ok(())
    }

    fn load(&mut self, driver: &Driver) -> Result<(), Refused> {
        // SAFETY: the text ends with a zero, and the driver copies it.
        let loaded = unsafe { (driver.cuModuleLoadData)(&raw mut self.module, KERNEL.as_ptr().cast()) };
        driver.check(loaded, "compile it")?;
        // SAFETY: the module was loaded just now.
        let found = unsafe {
            (driver.cuModuleGetFunction)(&raw mut self.kernel, self.module, c"copy_pieces".as_ptr())
        };
        driver.check(found, "find it")
    }

    /// The device.
    pub fn device(&self) -> u32 {
        self.device.ordinal
    }

    /// Begins to copy, in an unused slot. The memory must stay until [`is_done`](Self::is_done) says so. After an error
    /// it is unknown which part of the copy is under way.
    ///
    /// # Safety
    /// The device reaches all bytes of the runs as they say it does, and no other copy touches them meanwhile.
    pub unsafe fn begin(&mut self, slot: usize, batch: &Batch) -> Result<(), Refused> {
        let device = self.device.clone();
        // SAFETY: the caller's promise, passed on.
        device.within(|driver| unsafe { self.begin_within(driver, slot, batch.runs()) })
    }

    unsafe fn begin_within(&mut self, driver: &Driver, slot: usize, runs: &[Run]) -> Result<(), Refused> {
        let Slot { event, list } = self.slots[slot];
        // The kernel copies its pieces in no order. Only the driver's copies keep the order of the runs.
        let by_kernel = !self.kernel.is_null() && !self.overlaps.any(runs);
        let mut pieces = 0;
        for run in runs {
            if !by_kernel || !run.is_for_kernel() {
                // SAFETY: the caller's promise about the runs.
                let begun =
                    unsafe { (driver.cuMemcpyAsync)(run.to, run.from, run.bytes as usize, self.stream) };
                driver.check(begun, "copy")?;
                continue;
            }
            for at in (0..run.bytes).step_by(PIECE as usize) {
                let piece =
                    DevicePiece { to: run.to + at, from: run.from + at, bytes: PIECE.min(run.bytes - at) };
                assert!(pieces < PIECES, "a batch is bounded");
                // SAFETY: the list has room for `PIECES`, and no kernel reads it: the slot is unused.
                unsafe { list.add(pieces).write(piece) };
                pieces += 1;
            }
        }
        if pieces > 0 {
            self.launch(driver, list, pieces as u32)?;
        }
        // SAFETY: both are ours.
        driver.check(unsafe { (driver.cuEventRecord)(event, self.stream) }, "mark the end of a copy")
    }

    fn launch(&self, driver: &Driver, mut list: *mut DevicePiece, mut pieces: u32) -> Result<(), Refused> {
        let blocks = pieces.min(BLOCKS);
        let mut parameters: [*mut c_void; 2] = [(&raw mut list).cast(), (&raw mut pieces).cast()];
        let parameters = parameters.as_mut_ptr();
        // SAFETY: the kernel takes these two, which the call copies. What the list says is the caller's promise.
        let launched = unsafe {
            let none = std::ptr::null_mut();
            (driver.cuLaunchKernel)(
                self.kernel,
                blocks,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                self.stream,
                parameters,
                none,
            )
        };
        driver.check(launched, "launch a copy")
    }

    /// Whether the copy that was begun in a slot has ended.
    pub fn is_done(&self, slot: usize) -> Result<bool, Refused> {
        self.device.within(|driver| {
            // SAFETY: the event is ours.
            match unsafe { (driver.cuEventQuery)(self.slots[slot].event) } {
                NOT_READY => Ok(false),
                code => driver.check(code, "copy").map(|()| true),
            }
        })
    }
}

// SAFETY: the lists and the driver's objects belong to the value, which one thread has at a time.
unsafe impl Send for Stream {}

impl Drop for Stream {
    fn drop(&mut self) {
        let freed = self.device.clone().within(|driver| {
            // SAFETY: all of this is ours, and no copy is under way. Errors mean that the driver has gone before.
            unsafe {
                for slot in self.slots.drain(..) {
                    if !slot.event.is_null() {
                        let _freed = (driver.cuEventDestroy)(slot.event);
                    }
                    if !slot.list.is_null() {
                        let _freed = (driver.cuMemFreeHost)(slot.list.cast());
                    }
                }
                if !self.stream.is_null() {
                    let _freed = (driver.cuStreamDestroy)(self.stream);
                }
                if !self.module.is_null() {
                    let _freed = (driver.cuModuleUnload)(self.module);
                }
            }
            Ok(())
        });
        drop(freed);
    }
}
