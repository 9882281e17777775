//! Devices, their memory that other processes open, and host memory that they copy without a detour.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use host_transfer_kit::locked;

use super::driver::{
    Driver, HOST_MEMORY_ALREADY_REGISTERED, INVALID_CONTEXT, IpcHandle, Object, PEER_ACCESS_ALREADY_ENABLED,
    Refused, Uuid,
};

/// What a peer needs to open memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// The device, by UUID: its number differs between processes.
    pub uuid: Uuid,
    /// The allocation that the memory lies in.
    pub handle: IpcHandle,
    /// Where in the allocation it begins, in bytes.
    pub offset: u64,
}

/// A device, in its primary context: the one in which the host takes memory.
pub struct Device {
    driver: &'static Driver,
    /// Its number in this process.
    pub ordinal: u32,
    uuid: Uuid,
    handle: i32,
    context: Object,
}

// SAFETY: the driver's functions may be called from any thread, and a context be current in several.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    fn open(driver: &'static Driver, ordinal: u32) -> Result<Self, Refused> {
        let (mut handle, mut uuid, mut context) = (0, Uuid::default(), std::ptr::null_mut());
        let number = i32::try_from(ordinal).unwrap_or(i32::MAX);
        // SAFETY: it writes one number.
        let found = unsafe { (driver.cuDeviceGet)(&raw mut handle, number) };
        driver.check(found, &format!("find GPU {ordinal}"))?;
        // SAFETY: it writes the 16 bytes.
        let named = unsafe { (driver.cuDeviceGetUuid)(&raw mut uuid, handle) };
        driver.check(named, &format!("tell the UUID of GPU {ordinal}"))?;
        // SAFETY: it writes one pointer. The context is released on drop.
        let retained = unsafe { (driver.cuDevicePrimaryCtxRetain)(&raw mut context, handle) };
        driver.check(retained, &format!("use GPU {ordinal}"))?;
        Ok(Self { driver, ordinal, uuid, handle, context })
    }

    /// Calls `with` while the device's context is current in this thread.
    pub fn within<R>(&self, with: impl FnOnce(&Driver) -> Result<R, Refused>) -> Result<R, Refused> {
        // SAFETY: the context lives as long as `self`.
        let pushed = unsafe { (self.driver.cuCtxPushCurrent)(self.context) };
        self.driver.check(pushed, &format!("use GPU {}", self.ordinal))?;
        let result = with(self.driver);
        let mut popped = std::ptr::null_mut();
        // SAFETY: it pops the context that was pushed above. There is nothing to do about an error.
        let _popped = unsafe { (self.driver.cuCtxPopCurrent)(&raw mut popped) };
        result
    }

    /// Exports `length` bytes at an address of the device, so that peers can open them.
    pub fn export(&self, address: u64, length: u64) -> Result<Export, Refused> {
        self.within(|driver| {
            let (mut base, mut size, mut handle) = (0, 0, IpcHandle([0; 64]));
            // SAFETY: it writes an address and a number.
            let found = unsafe { (driver.cuMemGetAddressRange)(&raw mut base, &raw mut size, address) };
            driver.check(found, &format!("find the allocation of {address:#x}"))?;
            let offset = address.wrapping_sub(base);
            if offset.checked_add(length).is_none_or(|end| end > size as u64) {
                let text = format!("{length} bytes at {address:#x} leave their allocation of {size} bytes");
                return Err(Refused::new(text));
            }
            // SAFETY: it writes the handle.
            let made = unsafe { (driver.cuIpcGetMemHandle)(&raw mut handle, base) };
            driver
                .check(made, "share the allocation with other processes, as what cuMemAlloc gives can be")?;
            Ok(Export { uuid: self.uuid, handle, offset })
        })
    }

    /// Lets kernels and copies of this device reach memory of another device of the same process.
    fn reach(&self, other: &Self) -> Result<(), Refused> {
        if self.ordinal == other.ordinal {
            return Ok(());
        }
        let what = format!("have GPU {} reach GPU {}", self.ordinal, other.ordinal);
        let mut can = 0;
        // SAFETY: it writes one number.
        let answered =
            unsafe { (self.driver.cuDeviceCanAccessPeer)(&raw mut can, self.handle, other.handle) };
        self.driver.check(answered, &what)?;
        if can == 0 {
            return Err(Refused::new(format!("cannot {what}: they have no peer access")));
        }
        self.within(|driver| {
            // SAFETY: the other context lives as long as `other`, and the access only as long as the context.
            match unsafe { (driver.cuCtxEnablePeerAccess)(other.context, 0) } {
                PEER_ACCESS_ALREADY_ENABLED => Ok(()),
                code => driver.check(code, &what),
            }
        })
    }

    /// Pins a range of host memory, so that this device and the others copy it without a detour. `None` when it is pinned already.
    pub fn pin(self: &Arc<Self>, address: u64, length: u64) -> Result<Option<Pinned>, Refused> {
        const PORTABLE: u32 = 1;
        const RANGE_START: i32 = 11;
        const RANGE_SIZE: i32 = 12;
        let page = rustix::param::page_size() as u64;
        let start = address / page * page;
        let end = (address + length).next_multiple_of(page);
        self.within(|driver| {
            // SAFETY: the pages are mapped as long as the value lives, which the caller sees to.
            match unsafe {
                (driver.cuMemHostRegister)(start as *mut c_void, (end - start) as usize, PORTABLE)
            } {
                HOST_MEMORY_ALREADY_REGISTERED => {
                    let (mut first, mut size) = (0u64, 0usize);
                    // SAFETY: these attributes are an address and a size.
                    let known = unsafe {
                        [
                            (driver.cuPointerGetAttribute)((&raw mut first).cast(), RANGE_START, address),
                            (driver.cuPointerGetAttribute)((&raw mut size).cast(), RANGE_SIZE, address),
                        ]
                    };
                    if known == [0, 0] && first <= address && address + length <= first + size as u64 {
                        return Ok(None);
                    }
                    driver.check(HOST_MEMORY_ALREADY_REGISTERED, "pin the host memory")?;
                    Ok(None)
                }
                code => {
                    driver.check(code, "pin the host memory")?;
                    Ok(Some(Pinned { device: self.clone(), address: start }))
                }
            }
        })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained when it was opened. An error means that the process ends anyway.
        let _released = unsafe { (self.driver.cuDevicePrimaryCtxRelease)(self.handle) };
    }
}

/// Pinned host memory. To be dropped before the memory is unmapped.
pub struct Pinned {
    device: Arc<Device>,
    address: u64,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let unpin = |driver: &Driver| {
            // SAFETY: registered by us, and no copy uses it any more.
            let unpinned = unsafe { (driver.cuMemHostUnregister)(self.address as *mut c_void) };
            driver.check(unpinned, "unpin host memory")
        };
        // An error means that the driver has ended before.
        let _unpinned = self.device.within(unpin);
    }
}

/// A peer's memory on a device, opened here.
pub struct Opened {
    device: Arc<Device>,
    /// Address of the first byte of the region.
    address: u64,
    /// The address that the driver gave, which closes the memory. `None` for memory of this process.
    opened: Option<u64>,
    closed: AtomicBool,
}

impl Opened {
    /// The device that it is on.
    pub fn device(&self) -> u32 {
        self.device.ordinal
    }

    /// The address of the region's first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Closes the memory. No copy may use it any more, or begin to.
    pub fn close(&self) {
        if self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        let Some(base) = self.opened else { return };
        let close = |driver: &Driver| {
            // SAFETY: opened by us, and no copy uses it any more.
            let closed = unsafe { (driver.cuIpcCloseMemHandle)(base) };
            driver.check(closed, "close the memory of another process")
        };
        // An error means that the driver has ended before.
        let _closed = self.device.within(close);
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.close();
    }
}

/// The devices that an instance uses.
#[derive(Default)]
pub struct Devices {
    known: Mutex<Vec<Arc<Device>>>,
}

impl Devices {
    /// The device with this number, which is used from now on.
    pub fn get(&self, ordinal: u32) -> Result<Arc<Device>, Refused> {
        let mut known = locked(&self.known);
        if let Some(device) = known.iter().find(|device| device.ordinal == ordinal) {
            return Ok(device.clone());
        }
        let device = Arc::new(Device::open(Driver::get()?, ordinal)?);
        for other in known.iter() {
            // A failure is ignored here: a copy that needs the access is refused when it begins.
            let _apart = device.reach(other).and_then(|()| other.reach(&device));
        }
        known.push(device.clone());
        Ok(device)
    }

    /// The devices in use.
    pub fn known(&self) -> Vec<Arc<Device>> {
        locked(&self.known).clone()
    }

    /// Opens what a peer exported. `here` is its address if it is memory of this process.
    pub fn open(&self, export: &Export, here: Option<u64>) -> Result<Opened, Refused> {
        const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
        let driver = Driver::get()?;
        let device = self.find(driver, export.uuid)?;
        for other in self.known() {
            other.reach(&device)?;
            device.reach(&other)?;
        }
        let mut base = 0;
        if here.is_none() {
            device.within(|driver| {
                // SAFETY: it writes one address.
                let opened = unsafe {
                    (driver.cuIpcOpenMemHandle)(&raw mut base, export.handle, LAZY_ENABLE_PEER_ACCESS)
                };
                match driver.check(opened, "open the memory of another process") {
                    Err(refused) if refused.code == INVALID_CONTEXT => Err(Refused::new(format!(
                        "{refused}: it is memory of this process, by another copy of the plugin"
                    ))),
                    answer => answer,
                }
            })?;
        }
        let address = here.unwrap_or(base.wrapping_add(export.offset));
        let opened = here.is_none().then_some(base);
        Ok(Opened { device, address, opened, closed: AtomicBool::new(false) })
    }

    /// Finds this process's device by its UUID.
    fn find(&self, driver: &'static Driver, uuid: Uuid) -> Result<Arc<Device>, Refused> {
        let mut count = 0;
        // SAFETY: it writes one number.
        driver.check(unsafe { (driver.cuDeviceGetCount)(&raw mut count) }, "count the GPUs")?;
        for ordinal in 0..count {
            let (mut handle, mut its) = (0, Uuid::default());
            // SAFETY: they write one number, and the 16 bytes of a name.
            let named = unsafe {
                match (driver.cuDeviceGet)(&raw mut handle, ordinal) {
                    0 => (driver.cuDeviceGetUuid)(&raw mut its, handle),
                    code => code,
                }
            };
            if named == 0 && its == uuid {
                return self.get(ordinal.unsigned_abs());
            }
        }
        Err(Refused::new(format!("this process does not have {uuid}, see CUDA_VISIBLE_DEVICES")))
    }
}
