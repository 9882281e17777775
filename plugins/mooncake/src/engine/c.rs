//! The engine of Mooncake's C library, which is looked up and loaded when it is used.
//!
//! Only what `transfer_engine_c.h` declared from 0.3.6 on is required. Since then the header has only grown.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::{Driver, Engine, MESSAGE_NAME, Range, Run, State, Target, Ticket, Undelivered};
use crate::config::{Config, P2P, Protocol};

type Handle = *mut c_void;

/// `transfer_request_t`.
#[repr(C)]
struct Request {
    opcode: c_int,
    source: *mut c_void,
    target: i32,
    /// A field in some releases, padding in the others.
    file: u32,
    target_offset: u64,
    length: u64,
}

/// `transfer_status_t`.
#[repr(C)]
struct Status {
    status: c_int,
    transferred: u64,
}

/// `notify_msg_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Notify {
    name: *mut c_char,
    message: *mut c_char,
}

/// `buffer_entry_t`.
#[repr(C)]
struct Buffer {
    address: *mut c_void,
    length: usize,
}

const WRITE: c_int = 1;
/// Codes of a task's status. A task with another code runs, waits, or has run out of time and may still go on.
const COMPLETED: c_int = 4;
const ENDED_BADLY: [c_int; 3] = [2, 3, 6];
/// `INVALID_BATCH`.
const NO_BATCH: u64 = u64::MAX;
/// No process listened at a message's address.
const REFUSED: c_int = -102;
/// The location of memory, for Mooncake's choice of an adapter: Mooncake finds out by itself.
const ANYWHERE: &CStr = c"*";
/// Longest name of an engine that is accepted.
const SESSION_BYTES: usize = 300;

macro_rules! api {
    ($($name:ident($($argument:ty),*) -> $result:ty;)*) => {
        #[allow(non_snake_case)]
        struct Api { $($name: unsafe extern "C" fn($($argument),*) -> $result,)* }

        /// The functions without which a library is not used.
        pub const SYMBOLS: &[&str] = &[$(stringify!($name)),*];

        #[allow(non_snake_case)]
        impl Api {
            /// # Errors
            /// The functions that the library lacks.
            fn look_up(library: &Library) -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                $(
                    // SAFETY: the type is the function's in the header that this file names.
                    let $name = unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> $result>(
                            stringify!($name).as_bytes(),
                        )
                    };
                    if $name.is_err() {
                        missing.push(stringify!($name));
                    }
                )*
                match ($($name,)*) {
                    ($(Ok($name),)*) => Ok(Self { $($name: *$name,)* }),
                    _ => Err(missing),
                }
            }
        }
    };
}

api! {
    createTransferEngine(*const c_char, *const c_char, *const c_char, u64, c_int) -> Handle;
    destroyTransferEngine(Handle) -> ();
    installTransport(Handle, *const c_char, *mut *mut c_void) -> Handle;
    getLocalIpAndPort(Handle, *mut c_char, usize) -> c_int;
    openSegment(Handle, *const c_char) -> i32;
    closeSegment(Handle, i32) -> c_int;
    registerLocalMemoryBatch(Handle, *mut Buffer, usize, *const c_char) -> c_int;
    unregisterLocalMemoryBatch(Handle, *mut *mut c_void, usize) -> c_int;
    allocateBatchID(Handle, usize) -> u64;
    submitTransfer(Handle, u64, *mut Request, usize) -> c_int;
    getTransferStatus(Handle, u64, usize, *mut Status) -> c_int;
    freeBatchID(Handle, u64) -> c_int;
    genNotifyInEngine(Handle, u64, Notify) -> c_int;
    getNotifsFromEngine(Handle, *mut c_int) -> *mut Notify;
    freeNotifsMsgBuf(*mut Notify, c_int) -> c_int;
}

/// The loaded library, for good: its threads and what it registered with the system would outlive an unloaded library.
pub struct CDriver {
    api: Arc<Api>,
    host: CString,
    protocol: Protocol,
    what: String,
}

impl CDriver {
    /// Loads a library and looks every function up.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn load(path: &Path, config: &Config) -> Result<Self, String> {
        crate::environment::set(&config.preloads())?;
        if config.protocol == Protocol::Tcp {
            crate::environment::force_tcp();
        }
        // SAFETY: its constructors run. It is Mooncake's, named by the user or found where it is installed.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|error| crate::loader::whole(&error))?;
        let api = Api::look_up(&library).map_err(|missing| {
            format!(
                "{} has no {}: it is not Mooncake's, or older than 0.3.6",
                path.display(),
                missing.join(", ")
            )
        });
        std::mem::forget(library);
        let host = CString::new(config.local_hostname.as_str()).map_err(|error| error.to_string())?;
        let what = format!("the C library {}", path.display());
        Ok(Self { api: Arc::new(api?), host, protocol: config.protocol, what })
    }
}

impl Driver for CDriver {
    fn engine(&self) -> Result<Box<dyn Engine>, String> {
        let api = self.api.clone();
        let metadata = CString::new(P2P).map_err(|error| error.to_string())?;
        let rdma = self.protocol == Protocol::Rdma;
        let host = self.host.as_ptr();
        // SAFETY: the texts end in a zero and are not used after the call.
        let handle = unsafe { (api.createTransferEngine)(metadata.as_ptr(), host, host, 0, rdma.into()) };
        if handle.is_null() {
            return Err("Mooncake's createTransferEngine failed (MC_LOG_LEVEL=INFO says more)".to_owned());
        }
        let mut engine = CEngine { api, handle, session: String::new(), met: Mutex::default() };
        if !rdma {
            // SAFETY: the engine is ours. The transport takes no arguments.
            let tcp = unsafe { (engine.api.installTransport)(handle, c"tcp".as_ptr(), std::ptr::null_mut()) };
            if tcp.is_null() {
                return Err("Mooncake's installTransport refused tcp".to_owned());
            }
        }
        let mut name = [0u8; SESSION_BYTES];
        // SAFETY: the place is ours, and as long as said.
        let code = unsafe { (engine.api.getLocalIpAndPort)(handle, name.as_mut_ptr().cast(), name.len()) };
        let session = CStr::from_bytes_until_nul(&name).ok().and_then(|name| name.to_str().ok());
        match session.filter(|session| code == 0 && session.contains(':')) {
            Some(session) => engine.session = session.to_owned(),
            None => return Err(format!("Mooncake's getLocalIpAndPort answered {code}")),
        }
        Ok(Box::new(engine))
    }

    fn describe(&self) -> String {
        self.what.clone()
    }
}

struct CEngine {
    api: Arc<Api>,
    handle: Handle,
    session: String,
    /// Engines that messages went to, with their segments.
    met: Mutex<HashMap<String, i32>>,
}

// SAFETY: Mooncake's engine may be called from any thread. The handle is ours until our drop.
unsafe impl Send for CEngine {}
// SAFETY: as above.
unsafe impl Sync for CEngine {}

fn must(what: &str, code: c_int) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("Mooncake's {what} answered {code}")) }
}

impl CEngine {
    fn segment(&self, session: &str) -> Result<i32, String> {
        let name = CString::new(session).map_err(|error| error.to_string())?;
        // SAFETY: the engine is alive. The text ends in a zero and is not used after the call.
        let segment = unsafe { (self.api.openSegment)(self.handle, name.as_ptr()) };
        if segment < 0 {
            Err(format!("{session} cannot be reached: Mooncake's openSegment answered {segment}"))
        } else {
            Ok(segment)
        }
    }

    /// Looks at the tasks of a batch, from the first on that had not ended.
    fn look(&self, ticket: &mut Ticket) -> State {
        while ticket.ended < ticket.runs {
            let mut status = Status { status: 0, transferred: 0 };
            let task = ticket.ended as usize;
            // SAFETY: the engine is alive, and so is the batch until all of its tasks have ended.
            let code =
                unsafe { (self.api.getTransferStatus)(self.handle, ticket.batch, task, &raw mut status) };
            if code != 0 {
                return State::Running;
            }
            match status.status {
                COMPLETED => {}
                // The other tasks go on until the engine ends. The caller ends the engine, and the batch with it.
                code if ENDED_BADLY.contains(&code) => return State::Failed,
                _ => return State::Running,
            }
            ticket.ended += 1;
        }
        // SAFETY: as above. It refuses while something of the batch runs.
        if unsafe { (self.api.freeBatchID)(self.handle, ticket.batch) } != 0 {
            return State::Running;
        }
        State::Done
    }
}

impl Engine for CEngine {
    fn session(&self) -> &str {
        &self.session
    }

    fn register(&self, ranges: &[Range]) -> Result<(), String> {
        let buffer =
            |range: &Range| Buffer { address: range.address as *mut c_void, length: range.length as usize };
        let mut buffers: Vec<Buffer> = ranges.iter().map(buffer).collect();
        let (list, count) = (buffers.as_mut_ptr(), buffers.len());
        if count == 0 {
            return Ok(());
        }
        // SAFETY: the engine is alive. The list is ours and as long as said. The memory's owner keeps it.
        let code =
            unsafe { (self.api.registerLocalMemoryBatch)(self.handle, list, count, ANYWHERE.as_ptr()) };
        must("registerLocalMemoryBatch", code)
    }

    fn unregister(&self, ranges: &[Range]) -> Result<(), String> {
        let mut addresses: Vec<*mut c_void> =
            ranges.iter().map(|range| range.address as *mut c_void).collect();
        let (list, count) = (addresses.as_mut_ptr(), addresses.len());
        if count == 0 {
            return Ok(());
        }
        // SAFETY: as above.
        must("unregisterLocalMemoryBatch", unsafe {
            (self.api.unregisterLocalMemoryBatch)(self.handle, list, count)
        })
    }

    fn open(&self, session: &str) -> Result<Target, String> {
        Ok(Target { session: session.to_owned(), segment: self.segment(session)? })
    }

    fn submit(&self, to: &Target, runs: &[Run], tickets: &mut Vec<Ticket>) -> Result<(), String> {
        if runs.is_empty() {
            return Ok(());
        }
        let request = |run: &Run| Request {
            opcode: WRITE,
            source: run.from as *mut c_void,
            target: to.segment,
            file: 0,
            target_offset: run.to,
            length: run.length,
        };
        let mut requests: Vec<Request> = runs.iter().map(request).collect();
        // SAFETY: the engine is alive.
        let batch = unsafe { (self.api.allocateBatchID)(self.handle, requests.len()) };
        if batch == NO_BATCH {
            return Err("Mooncake's allocateBatchID failed".to_owned());
        }
        // SAFETY: the batch is new and has room for these. The list is ours and as long as said.
        let code =
            unsafe { (self.api.submitTransfer)(self.handle, batch, requests.as_mut_ptr(), requests.len()) };
        if code != 0 {
            // SAFETY: as above. Mooncake keeps a batch that it does not free.
            let _kept = unsafe { (self.api.freeBatchID)(self.handle, batch) };
            return must("submitTransfer", code);
        }
        tickets.push(Ticket { batch, runs: requests.len() as u32, ended: 0 });
        Ok(())
    }

    fn poll(&self, ticket: &mut Ticket) -> State {
        self.look(ticket)
    }

    fn notify(&self, session: &str, text: &str, _look: bool) -> Result<(), Undelivered> {
        let other = |error: String| Undelivered::Other(error);
        let known = self.met.lock().unwrap_or_else(PoisonError::into_inner).get(session).copied();
        let segment = match known {
            Some(segment) => segment,
            None => {
                super::look_for(session)?;
                let segment = self.segment(session).map_err(other)?;
                let mut met = self.met.lock().unwrap_or_else(PoisonError::into_inner);
                met.insert(session.to_owned(), segment);
                segment
            }
        };
        let name = CString::new(MESSAGE_NAME).map_err(|error| other(error.to_string()))?;
        let text = CString::new(text).map_err(|error| other(error.to_string()))?;
        // Mooncake copies both texts, although the header's types are not const.
        let message = Notify { name: name.as_ptr().cast_mut(), message: text.as_ptr().cast_mut() };
        // SAFETY: the engine is alive. The texts end in a zero and are not used after the call.
        match unsafe { (self.api.genNotifyInEngine)(self.handle, segment as u64, message) } {
            0 => Ok(()),
            REFUSED => super::look_for(session)
                .and_then(|()| Err(other("Mooncake's genNotifyInEngine answered -102".to_owned()))),
            code => Err(other(format!("Mooncake's genNotifyInEngine answered {code}"))),
        }
    }

    fn messages(&self) -> Vec<String> {
        let mut count = 0;
        // SAFETY: the engine is alive. The place for the count is ours.
        let list = unsafe { (self.api.getNotifsFromEngine)(self.handle, &raw mut count) };
        if list.is_null() {
            return Vec::new();
        }
        let many = usize::try_from(count).unwrap_or(0);
        // SAFETY: as many as said, ours until they are given back.
        let messages = unsafe { std::slice::from_raw_parts(list, many) };
        let text = |text: *mut c_char| {
            // SAFETY: null, or a string that Mooncake ended with a zero.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        let ours = |message: &Notify| {
            text(message.name).filter(|name| name == MESSAGE_NAME).and(text(message.message))
        };
        let texts = messages.iter().filter_map(ours).collect();
        // SAFETY: given back once, with its count.
        let _freed = unsafe { (self.api.freeNotifsMsgBuf)(list, count) };
        texts
    }
}

impl Drop for CEngine {
    fn drop(&mut self) {
        let met = std::mem::take(&mut *self.met.lock().unwrap_or_else(PoisonError::into_inner));
        for segment in met.into_values() {
            // SAFETY: the engine is alive, and the segment was opened once.
            let _closed = unsafe { (self.api.closeSegment)(self.handle, segment) };
        }
        super::end_quickly(super::idle_connections::port(&self.session).as_slice(), super::VAIN, || {
            // SAFETY: ended once. Nothing of ours uses it any more.
            unsafe { (self.api.destroyTransferEngine)(self.handle) };
        });
    }
}
