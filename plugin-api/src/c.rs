//! The tables of functions that plugins in C and C++ export: `include/host_plugin.h`, in Rust.
//!
//! Hosts use this module. The header and the trait of the role say what a table's functions do. Structs that are moved
//! in batches ([`Write`], [`Completion`], [`TierPage`], ..) have the layout of the Rust ABI, so that nothing is copied.

use std::ffi::{c_char, c_void};

use crate::allocator::{Component, LayerGroup};
use crate::tier::{Key, Scanned, TierCompletion, TierLimits, TierPage, TierUsage};
use crate::transfer::{Completion, Memory, Notification, Submission, TransferLimits, Write};

/// The symbol that a plugin in C exports.
pub const SYMBOL: &str = "host_plugin_c";

/// The value of `[build] abi` in its manifest.
pub const ABI: &str = "c";

/// First bytes of the struct that the symbol names.
pub const MAGIC: [u8; 8] = *b"HOSTPLGC";

/// UTF-8, not terminated.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Text {
    /// First byte. May be null when the text is empty.
    pub data: *const c_char,
    /// Bytes.
    pub length: usize,
}

/// Where a function writes why it failed.
#[repr(C)]
#[derive(Debug)]
pub struct ErrorText {
    /// Room for the text.
    pub text: *mut c_char,
    /// Bytes of room.
    pub room: usize,
    /// Bytes written.
    pub length: usize,
}

/// Kinds of [`Setting`].
pub mod setting {
    /// A text.
    pub const STRING: u32 = 1;
    /// An integer.
    pub const INTEGER: u32 = 2;
    /// A floating-point number.
    pub const FLOAT: u32 = 3;
    /// 0 or 1.
    pub const BOOLEAN: u32 = 4;
    /// An array or a table, as TOML.
    pub const TOML: u32 = 5;
}

/// One key of the plugin's configuration.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Its name.
    pub key: Text,
    /// The value of a text. The TOML of an array or a table.
    pub text: Text,
    /// The value of an integer or a boolean.
    pub integer: i64,
    /// The value of a floating-point number.
    pub number: f64,
    /// See [`setting`].
    pub kind: u32,
    /// Zero.
    pub reserved: u32,
}

/// What an instance is opened with.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Opening {
    /// Bytes of this struct.
    pub size: u64,
    /// See [`crate::Opening::name`].
    pub name: Text,
    /// See [`crate::Opening::config`].
    pub config: Text,
    /// The settings of `config`, parsed, with the manifest's defaults.
    pub settings: *const Setting,
    /// How many settings there are.
    pub settings_count: u64,
}

/// What an allocator is opened with. See [`crate::PoolOpening`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolOpening {
    /// Bytes of this struct.
    pub size: u64,
    /// Name and settings.
    pub opening: Opening,
    /// Tokens in a page.
    pub page_tokens: u32,
    /// Pages of the pool.
    pub pages: u32,
    /// The model's layers.
    pub groups: *const LayerGroup,
    /// How many groups there are.
    pub groups_count: u64,
}

/// What the host offers. See [`crate::Host`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Services {
    /// Bytes of this struct.
    pub size: u64,
    /// First argument of the functions.
    pub host: *mut c_void,
    /// The least important level that is logged.
    pub level: *const u64,
    /// Writes a line.
    pub log: Option<unsafe extern "C" fn(*mut c_void, u32, Text, Text)>,
    /// Gives a counter or gauge.
    pub word: Option<unsafe extern "C" fn(*mut c_void, u32, Text, *mut *mut u64, *mut ErrorText) -> i32>,
    /// Wakes the host.
    pub wake: Option<unsafe extern "C" fn(*mut c_void)>,
}

// SAFETY: the host fills the table. Any thread may use its pointers, and their targets live as long as the process.
unsafe impl Send for Services {}
// SAFETY: as above.
unsafe impl Sync for Services {}

/// A function that opens an instance with an opening of type `O`.
pub type Open<O> = Option<unsafe extern "C" fn(*const O, *mut *mut c_void, *mut ErrorText) -> i32>;
/// A function that takes the instance alone.
pub type Plain<R> = Option<unsafe extern "C" fn(*mut c_void) -> R>;
/// A function that fills a struct of the caller's.
pub type Fill<T> = Option<unsafe extern "C" fn(*mut c_void, *mut T)>;
/// A function that registers memory.
pub type Register = Option<unsafe extern "C" fn(*mut c_void, *const Memory, *mut u32, *mut ErrorText) -> i32>;
/// A function about a region or a peer.
pub type About = Option<unsafe extern "C" fn(*mut c_void, u32, *mut ErrorText) -> i32>;
/// A function about a tag.
pub type Tagged = Option<unsafe extern "C" fn(*mut c_void, u64) -> i32>;
/// A function that starts a batch under a tag.
pub type Batch<T> = Option<unsafe extern "C" fn(*mut c_void, u64, *const T, usize) -> i32>;
/// A function that writes entries into the caller's memory, as many as there are and fit.
pub type Fetch<T> = Option<unsafe extern "C" fn(*mut c_void, *mut T, usize) -> i32>;
/// A function that stops an instance.
pub type Shutdown = Option<unsafe extern "C" fn(*mut c_void, u64, *mut ErrorText) -> i32>;

/// `host_transfer_role`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TransferTable {
    /// Bytes of the plugin's struct.
    pub size: u64,
    /// Opens an instance.
    pub open: Open<Opening>,
    /// Frees an instance.
    pub close: Plain<()>,
    /// See [`TransferBackend::limits`](crate::TransferBackend::limits).
    pub limits: Fill<TransferLimits>,
    /// See [`TransferBackend::register`](crate::TransferBackend::register).
    pub register_memory: Register,
    /// See [`TransferBackend::deregister`](crate::TransferBackend::deregister).
    pub deregister_memory: About,
    /// See [`TransferBackend::endpoint`](crate::TransferBackend::endpoint).
    pub endpoint:
        Option<unsafe extern "C" fn(*mut c_void, *mut u8, usize, *mut usize, *mut ErrorText) -> i32>,
    /// See [`TransferBackend::connect`](crate::TransferBackend::connect).
    pub connect:
        Option<unsafe extern "C" fn(*mut c_void, Text, *const u8, usize, *mut u32, *mut ErrorText) -> i32>,
    /// See [`TransferBackend::disconnect`](crate::TransferBackend::disconnect).
    pub disconnect: About,
    /// See [`TransferBackend::submit`](crate::TransferBackend::submit).
    pub submit: Option<unsafe extern "C" fn(*mut c_void, *const Submission, *const Write, usize) -> i32>,
    /// See [`TransferBackend::poll`](crate::TransferBackend::poll).
    pub poll: Fetch<Completion>,
    /// See [`TransferBackend::notifications`](crate::TransferBackend::notifications).
    pub notifications: Fetch<Notification>,
    /// See [`TransferBackend::cancel`](crate::TransferBackend::cancel).
    pub cancel: Tagged,
    /// See [`TransferBackend::settled`](crate::TransferBackend::settled).
    pub settled: Tagged,
    /// See [`TransferBackend::event_fd`](crate::TransferBackend::event_fd).
    pub event_fd: Plain<i32>,
    /// See [`TransferBackend::shutdown`](crate::TransferBackend::shutdown).
    pub shutdown: Shutdown,
}

/// `host_tier_role`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TierTable {
    /// Bytes of the plugin's struct.
    pub size: u64,
    /// Opens an instance.
    pub open: Open<Opening>,
    /// Frees an instance.
    pub close: Plain<()>,
    /// See [`StorageTier::limits`](crate::StorageTier::limits).
    pub limits: Fill<TierLimits>,
    /// See [`StorageTier::register`](crate::StorageTier::register).
    pub register_memory: Register,
    /// See [`StorageTier::deregister`](crate::StorageTier::deregister).
    pub deregister_memory: About,
    /// See [`StorageTier::exists`](crate::StorageTier::exists).
    pub exists: Batch<Key>,
    /// See [`StorageTier::get`](crate::StorageTier::get).
    pub get: Batch<TierPage>,
    /// See [`StorageTier::put`](crate::StorageTier::put).
    pub put: Batch<TierPage>,
    /// See [`StorageTier::delete`](crate::StorageTier::delete).
    pub remove: Batch<Key>,
    /// See [`StorageTier::poll`](crate::StorageTier::poll).
    pub poll: Fetch<TierCompletion>,
    /// See [`StorageTier::cancel`](crate::StorageTier::cancel).
    pub cancel: Tagged,
    /// See [`StorageTier::settled`](crate::StorageTier::settled).
    pub settled: Tagged,
    /// See [`StorageTier::scan`](crate::StorageTier::scan).
    pub scan:
        Option<unsafe extern "C" fn(*mut c_void, u64, *mut Key, usize, *mut Scanned, *mut ErrorText) -> i32>,
    /// See [`StorageTier::usage`](crate::StorageTier::usage).
    pub usage: Option<unsafe extern "C" fn(*mut c_void, *mut TierUsage, *mut ErrorText) -> i32>,
    /// See [`StorageTier::event_fd`](crate::StorageTier::event_fd).
    pub event_fd: Plain<i32>,
    /// See [`StorageTier::shutdown`](crate::StorageTier::shutdown).
    pub shutdown: Shutdown,
}

/// `host_allocator_role`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllocatorTable {
    /// Bytes of the plugin's struct.
    pub size: u64,
    /// Opens an instance.
    pub open: Open<PoolOpening>,
    /// Frees an instance.
    pub close: Plain<()>,
    /// See [`PoolAllocator::components`](crate::PoolAllocator::components).
    pub components: Fetch<Component>,
    /// See [`PoolAllocator::alloc`](crate::PoolAllocator::alloc).
    pub take: Option<unsafe extern "C" fn(*mut c_void, u32, *mut u32, usize) -> i32>,
    /// See [`PoolAllocator::free`](crate::PoolAllocator::free).
    pub give: Option<unsafe extern "C" fn(*mut c_void, u32, *const u32, usize) -> i32>,
}

/// `host_plugin`: what the symbol names.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Plugin {
    /// [`MAGIC`]
    pub magic: [u8; 8],
    /// Bytes of the plugin's struct.
    pub size: u64,
    /// First byte of the manifest.
    pub manifest: *const c_char,
    /// The byte after its last.
    pub manifest_end: *const c_char,
    /// Takes the host's services.
    pub attach: Option<unsafe extern "C" fn(*const Services)>,
    /// Checks a configuration.
    pub check_config: Option<unsafe extern "C" fn(Text, *const Opening, *mut ErrorText) -> i32>,
    /// The transfer role, or null.
    pub transfer: *const TransferTable,
    /// The tier role, or null.
    pub tier: *const TierTable,
    /// The allocator role, or null.
    pub allocator: *const AllocatorTable,
}
