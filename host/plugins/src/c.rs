//! Plugins in C and C++: wraps their tables of functions into the same objects that plugins in Rust return.
//!
//! The other modules of the host do not know in which language a plugin was written.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use host_plugin_api::abi::{AllocatorObject, TierObject, TransferObject};
use host_plugin_api::{Error, ErrorCode, Opening, PoolOpening, Result, c};
use parking_lot::Mutex;

use super::manifest::Manifest;
use super::services::Services;

mod allocator;
mod opening;
mod tier;
mod transfer;

use opening::Settings;

/// Longest text of an error.
const ERROR_BYTES: usize = 1024;
/// Deadline of `shutdown`, in milliseconds, for an instance that is dropped without a call of `shutdown`.
const GIVEN_UP_MS: u64 = 1000;

/// The checked symbol and tables that a plugin in C exports.
#[derive(Clone)]
pub struct Root {
    /// Address of the symbol. Each loaded file has its own.
    symbol: usize,
    plugin: c::Plugin,
    manifest: Manifest,
    transfer: Option<c::TransferTable>,
    tier: Option<c::TierTable>,
    allocator: Option<c::AllocatorTable>,
}

// SAFETY: the pointers are to constants of a library that is never unloaded, and its functions may be called by any thread.
unsafe impl Send for Root {}
// SAFETY: as above.
unsafe impl Sync for Root {}

impl Root {
    /// Reads the struct at the symbol's address.
    ///
    /// # Errors
    /// A sentence that says what is wrong with the struct.
    ///
    /// # Safety
    /// `symbol` is the address of [`c::SYMBOL`] in a library that is never unloaded, and whose manifest says that it is C.
    pub unsafe fn from_symbol(symbol: NonNull<()>, manifest: &Manifest) -> std::result::Result<Self, String> {
        // SAFETY: an exported object has at least these eight bytes, whatever it is.
        let magic = unsafe { symbol.as_ptr().cast::<[u8; c::MAGIC.len()]>().read_unaligned() };
        if magic != c::MAGIC {
            return Err(format!("{} does not begin with HOST_PLUGIN_MAGIC", c::SYMBOL));
        }
        // SAFETY: by the caller's contract a `host_plugin` is there, which begins with its magic bytes and its length.
        let plugin: c::Plugin = unsafe { table(symbol.as_ptr().cast(), c::MAGIC.len()) }?;
        // SAFETY: each is null or names a table that begins with its length, as the header says of `host_plugin`.
        unsafe {
            Ok(Self {
                symbol: symbol.as_ptr() as usize,
                plugin,
                manifest: manifest.clone(),
                transfer: role(plugin.transfer)?,
                tier: role(plugin.tier)?,
                allocator: role(plugin.allocator)?,
            })
        }
    }

    /// The text of the manifest to which the plugin's struct points.
    ///
    /// # Errors
    /// When the two pointers do not enclose a text.
    pub fn describe(&self) -> std::result::Result<String, String> {
        let (start, end) = (self.plugin.manifest as usize, self.plugin.manifest_end as usize);
        let length = end.checked_sub(start).filter(|length| start != 0 && *length <= 1 << 20);
        let length = length.ok_or("it names no manifest: begin host_plugin_c with HOST_PLUGIN_HEADER")?;
        // SAFETY: HOST_PLUGIN_HEADER names the first and the last byte of the note.
        let bytes = unsafe { std::slice::from_raw_parts(self.plugin.manifest.cast::<u8>(), length) };
        std::str::from_utf8(bytes)
            .map(str::to_owned)
            .map_err(|error| format!("its manifest is no text: {error}"))
    }

    /// Hands the host's services to the plugin, once for each file that this process loads.
    pub fn attach(&self, services: &Arc<Services>) {
        static ATTACHED: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());
        let Some(attach) = self.plugin.attach else { return };
        // The lock is held during the call, so that no other thread opens an instance before the call has ended.
        let mut attached = ATTACHED.lock();
        if attached.insert(self.symbol) {
            // SAFETY: the function takes a pointer to services that live as long as the process.
            unsafe { attach(services.table()) };
        }
    }

    /// See [`host_plugin_api::abi::Root::check_config`].
    ///
    /// # Errors
    /// The plugin's error, if it refuses the configuration.
    pub fn check_config(&self, role: &str, config: &str) -> Result<()> {
        let Some(check) = self.plugin.check_config else { return Ok(()) };
        let settings = Settings::new(&self.manifest, config)?;
        let opening = settings.opening("", config);
        // SAFETY: all arguments are valid until the function returns.
        fallible(|error| unsafe { check(text(role), &raw const opening, error) })
    }

    /// Opens an instance of the transfer role.
    ///
    /// # Errors
    /// `UNSUPPORTED` without the role, else the plugin's error.
    pub fn open_transfer(&self, opening: &Opening) -> Result<TransferObject> {
        let table = self.transfer.as_ref().ok_or_else(|| lacks("transfer"))?;
        let settings = Settings::new(&self.manifest, &opening.config)?;
        transfer::open(table, &settings.opening(&opening.name, &opening.config))
    }

    /// Opens an instance of the storage role.
    ///
    /// # Errors
    /// `UNSUPPORTED` without the role, else the plugin's error.
    pub fn open_tier(&self, opening: &Opening) -> Result<TierObject> {
        let table = self.tier.as_ref().ok_or_else(|| lacks("tier"))?;
        let settings = Settings::new(&self.manifest, &opening.config)?;
        tier::open(table, &settings.opening(&opening.name, &opening.config))
    }

    /// Opens an instance of the allocator role.
    ///
    /// # Errors
    /// `UNSUPPORTED` without the role, else the plugin's error.
    pub fn open_allocator(&self, opening: &PoolOpening) -> Result<AllocatorObject> {
        let table = self.allocator.as_ref().ok_or_else(|| lacks("allocator"))?;
        let settings = Settings::new(&self.manifest, &opening.config)?;
        allocator::open(table, settings.opening(&opening.name, &opening.config), opening)
    }

    /// The kinds of role for which the plugin has a table.
    pub fn roles(&self) -> Vec<&'static str> {
        let named = [
            ("transfer", self.transfer.is_some()),
            ("tier", self.tier.is_some()),
            ("allocator", self.allocator.is_some()),
        ];
        named.into_iter().filter_map(|(role, there)| there.then_some(role)).collect()
    }
}

fn lacks(role: &str) -> Error {
    Error::new(ErrorCode::UNSUPPORTED, format!("the plugin has no {role} role"))
}

/// The table of a role, or `None` for null.
///
/// # Safety
/// As for [`table`], except that the pointer may be null.
unsafe fn role<T: Copy>(at: *const T) -> std::result::Result<Option<T>, String> {
    if at.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller keeps the contract of `table`.
    unsafe { table(at, 0) }.map(Some)
}

/// Copies a struct that has its length in bytes at offset `before`. Fields that an older plugin's struct lacks become zero, which
/// means "no function". Fields that a newer plugin's struct adds are left out.
///
/// # Safety
/// `at` names a struct that starts as `T` does, as far as its length says. `T` is a table of this module, and all zeros are a valid
/// `T`.
unsafe fn table<T: Copy>(at: *const T, before: usize) -> std::result::Result<T, String> {
    // SAFETY: the contract says that the length is there. It need not be aligned.
    let size = unsafe { at.cast::<u8>().add(before).cast::<u64>().read_unaligned() };
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    // Each field has eight bytes. Part of a field would not be a function.
    if size < before + size_of::<u64>() || size > 1 << 16 || size % size_of::<u64>() != 0 {
        return Err(format!("a table says that it has {size} bytes: write sizeof of it into its field size"));
    }
    let mut copy = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: both structs have at least so many bytes, and they do not overlap.
    unsafe {
        std::ptr::copy_nonoverlapping(
            at.cast::<u8>(),
            copy.as_mut_ptr().cast::<u8>(),
            size.min(size_of::<T>()),
        );
        Ok(copy.assume_init())
    }
}

/// Unwraps a function that each plugin of the role must have.
fn needed<F>(role: &str, name: &str, function: Option<F>) -> Result<F> {
    function.ok_or_else(|| {
        Error::new(ErrorCode::INTERNAL, format!("host_{role}_role has no function {name}: fill it in"))
    })
}

/// A text as it crosses the boundary.
fn text(text: &str) -> c::Text {
    c::Text { data: text.as_ptr().cast(), length: text.len() }
}

/// Calls a function that returns 0 or an error code and writes the reason into its argument.
fn fallible(call: impl FnOnce(*mut c::ErrorText) -> i32) -> Result<()> {
    let mut room = [0_u8; ERROR_BYTES];
    let mut error = c::ErrorText { text: room.as_mut_ptr().cast(), room: room.len(), length: 0 };
    let answer = call(&raw mut error);
    let said = String::from_utf8_lossy(&room[..error.length.min(ERROR_BYTES)]);
    match answer {
        0 => Ok(()),
        code @ ..0 if said.is_empty() => Err(Error::new(ErrorCode(code), "the plugin does not say why")),
        code @ ..0 => Err(Error::new(ErrorCode(code), said)),
        other => {
            Err(Error::new(ErrorCode::INTERNAL, format!("the plugin answered {other} where 0 or a code is")))
        }
    }
}

/// The answer of `cancel` for a plugin without this function: a transfer that is not settled goes on.
fn uncancelled(settled: i32) -> i32 {
    match settled {
        1.. => ErrorCode::INVALID_ARGUMENT.0,
        other => other,
    }
}

/// An open instance. Dropping it closes it.
struct Instance {
    at: *mut c_void,
    close: unsafe extern "C" fn(*mut c_void),
    shutdown: unsafe extern "C" fn(*mut c_void, u64, *mut c::ErrorText) -> i32,
    is_shut: AtomicBool,
}

// SAFETY: any thread may call any function of an instance, by the header's first rule.
unsafe impl Send for Instance {}
// SAFETY: as above.
unsafe impl Sync for Instance {}

impl Instance {
    /// Calls `open` and keeps the instance that it makes, with the two functions that end it.
    fn open(
        close: unsafe extern "C" fn(*mut c_void),
        shutdown: unsafe extern "C" fn(*mut c_void, u64, *mut c::ErrorText) -> i32,
        open: impl FnOnce(*mut *mut c_void, *mut c::ErrorText) -> i32,
    ) -> Result<Self> {
        let mut at = std::ptr::null_mut();
        fallible(|error| open(&raw mut at, error))?;
        if at.is_null() {
            let text = "the plugin's open answered 0 and made no instance: it must set *instance";
            return Err(Error::new(ErrorCode::INTERNAL, text));
        }
        Ok(Self { at, close, shutdown, is_shut: AtomicBool::new(false) })
    }

    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        self.is_shut.store(true, Ordering::Relaxed);
        // SAFETY: the instance is open.
        fallible(|error| unsafe { (self.shutdown)(self.at, deadline_ms, error) })
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if !*self.is_shut.get_mut() {
            // The instance was not shut down, for instance because another part could not be opened. No caller is left for its
            // error.
            drop(self.shutdown(GIVEN_UP_MS));
        }
        // SAFETY: the last call of this instance.
        unsafe { (self.close)(self.at) };
    }
}
