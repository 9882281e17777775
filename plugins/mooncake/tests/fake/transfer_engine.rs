//! The functions of Mooncake's C library that the plugin calls, within one process. Engines know each other by address.
//! Writes are copies that happen when their state is polled. Built by the tests with `rustc`, and loaded like the real one.
//!
//! A write of 13 bytes fails. A write of 17 bytes never ends. A write of 19 bytes ends at the fourth poll.

#![allow(non_snake_case, static_mut_refs)]
#![allow(clippy::missing_safety_doc, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::net::TcpListener;
use std::sync::{LazyLock, Mutex};

#[repr(C)]
pub struct Request {
    opcode: c_int,
    source: *const u8,
    target: i32,
    file: u32,
    target_offset: u64,
    length: u64,
}

#[repr(C)]
pub struct Status {
    status: c_int,
    transferred: u64,
}

#[repr(C)]
pub struct Notify {
    name: *mut c_char,
    message: *mut c_char,
}

#[repr(C)]
pub struct Buffer {
    address: *mut c_void,
    length: usize,
}

struct Task {
    source: u64,
    target: u64,
    length: u64,
    session: String,
    questions: u32,
    status: c_int,
}

struct Engine {
    _listener: TcpListener,
    session: String,
    memory: Vec<(u64, u64)>,
    notes: Vec<(CString, CString)>,
    segments: Vec<String>,
    transport: bool,
}

#[derive(Default)]
struct World {
    engines: HashMap<u64, Engine>,
    /// Batches, each with its engine.
    batches: HashMap<u64, (u64, Vec<Task>)>,
    last: u64,
    most: usize,
}

static WORLD: LazyLock<Mutex<World>> = LazyLock::new(Mutex::default);

impl World {
    fn by_session(&mut self, session: &str) -> Option<&mut Engine> {
        self.engines.values_mut().find(|engine| engine.session == session)
    }
}

fn key(engine: *mut c_void) -> u64 {
    engine as u64
}

unsafe fn text(text: *const c_char) -> String {
    unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()
}

/// Counts engines that are alive, batches that were not given back, or the most tasks that ran at once since the last such call.
#[unsafe(no_mangle)]
pub extern "C" fn fakeCount(what: c_int) -> usize {
    let mut world = WORLD.lock().unwrap();
    match what {
        0 => world.engines.len(),
        1 => world.batches.len(),
        _ => std::mem::take(&mut world.most),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn createTransferEngine(
    metadata: *const c_char,
    host: *const c_char,
    _address: *const c_char,
    _port: u64,
    discover: c_int,
) -> *mut c_void {
    assert_eq!(unsafe { text(metadata) }, "P2PHANDSHAKE");
    assert_eq!(discover, 0, "tcp needs no adapters");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let session = format!("{}:{}", unsafe { text(host) }, listener.local_addr().unwrap().port());
    let mut world = WORLD.lock().unwrap();
    world.last += 1;
    let id = world.last;
    let engine = Engine {
        _listener: listener,
        session,
        memory: Vec::new(),
        notes: Vec::new(),
        segments: Vec::new(),
        transport: false,
    };
    world.engines.insert(id, engine);
    id as *mut c_void
}

#[unsafe(no_mangle)]
pub extern "C" fn destroyTransferEngine(engine: *mut c_void) {
    let mut world = WORLD.lock().unwrap();
    assert!(world.engines.remove(&key(engine)).is_some(), "ended twice");
    world.batches.retain(|_, (owner, _)| *owner != key(engine));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn installTransport(
    engine: *mut c_void,
    name: *const c_char,
    _arguments: *mut *mut c_void,
) -> *mut c_void {
    assert_eq!(unsafe { text(name) }, "tcp");
    WORLD.lock().unwrap().engines.get_mut(&key(engine)).unwrap().transport = true;
    engine
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getLocalIpAndPort(engine: *mut c_void, to: *mut c_char, room: usize) -> c_int {
    let session = CString::new(WORLD.lock().unwrap().engines[&key(engine)].session.clone()).unwrap();
    let bytes = session.as_bytes_with_nul();
    assert!(bytes.len() <= room);
    unsafe { to.cast::<u8>().copy_from(bytes.as_ptr(), bytes.len()) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn openSegment(engine: *mut c_void, session: *const c_char) -> i32 {
    let session = unsafe { text(session) };
    let mut world = WORLD.lock().unwrap();
    if world.by_session(&session).is_none() {
        return -1;
    }
    let segments = &mut world.engines.get_mut(&key(engine)).unwrap().segments;
    segments.push(session);
    segments.len() as i32 - 1
}

#[unsafe(no_mangle)]
pub extern "C" fn closeSegment(_engine: *mut c_void, _segment: i32) -> c_int {
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn registerLocalMemoryBatch(
    engine: *mut c_void,
    list: *mut Buffer,
    count: usize,
    location: *const c_char,
) -> c_int {
    assert_eq!(unsafe { text(location) }, "*");
    let mut world = WORLD.lock().unwrap();
    let memory = &mut world.engines.get_mut(&key(engine)).unwrap().memory;
    for buffer in unsafe { std::slice::from_raw_parts(list, count) } {
        let (start, length) = (buffer.address as u64, buffer.length as u64);
        if memory.iter().any(|(other, bytes)| start < other + bytes && *other < start + length) {
            return -7;
        }
        memory.push((start, length));
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unregisterLocalMemoryBatch(
    engine: *mut c_void,
    list: *mut *mut c_void,
    count: usize,
) -> c_int {
    let mut world = WORLD.lock().unwrap();
    let memory = &mut world.engines.get_mut(&key(engine)).unwrap().memory;
    for address in unsafe { std::slice::from_raw_parts(list, count) } {
        let Some(at) = memory.iter().position(|(start, _)| *start == *address as u64) else { return -3 };
        memory.swap_remove(at);
    }
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn allocateBatchID(engine: *mut c_void, _size: usize) -> u64 {
    let mut world = WORLD.lock().unwrap();
    world.last += 1;
    let id = world.last;
    world.batches.insert(id, (key(engine), Vec::new()));
    id
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn submitTransfer(
    engine: *mut c_void,
    batch: u64,
    list: *mut Request,
    count: usize,
) -> c_int {
    let mut world = WORLD.lock().unwrap();
    let sender = &world.engines[&key(engine)];
    assert!(sender.transport);
    let mut tasks = Vec::new();
    for request in unsafe { std::slice::from_raw_parts(list, count) } {
        assert_eq!((request.opcode, request.file), (1, 0));
        let Some(session) = sender.segments.get(request.target as usize) else { return 1 };
        let (source, length) = (request.source as u64, request.length);
        let known = sender.memory.iter().any(|(s, n)| *s <= source && source + length <= s + n);
        assert!(known, "an engine reads only what it was told of");
        let (target, session) = (request.target_offset, session.clone());
        tasks.push(Task { source, target, length, session, questions: 0, status: 0 });
    }
    world.batches.get_mut(&batch).unwrap().1 = tasks;
    let running = world.batches.values().flat_map(|(_, tasks)| tasks).filter(|task| task.status < 2).count();
    world.most = world.most.max(running);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getTransferStatus(
    _engine: *mut c_void,
    batch: u64,
    number: usize,
    status: *mut Status,
) -> c_int {
    let mut world = WORLD.lock().unwrap();
    let task = &mut world.batches.get_mut(&batch).unwrap().1[number];
    task.questions += 1;
    let needed = match task.length {
        17 => u32::MAX,
        19 => 4,
        _ => 2,
    };
    let (questions, session) = (task.questions, task.session.clone());
    let (source, target, length) = (task.source, task.target, task.length);
    let endpoint = world.by_session(&session);
    let lands = endpoint.is_some_and(|endpoint| {
        endpoint.memory.iter().any(|(start, bytes)| *start <= target && target + length <= start + bytes)
    });
    let task = &mut world.batches.get_mut(&batch).unwrap().1[number];
    if task.status < 2 && questions >= needed {
        if lands && length != 13 {
            unsafe { (target as *mut u8).copy_from(source as *const u8, length as usize) };
        }
        task.status = if lands && length != 13 { 4 } else { 6 };
    }
    unsafe { *status = Status { status: task.status, transferred: 0 } };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn freeBatchID(_engine: *mut c_void, batch: u64) -> c_int {
    let mut world = WORLD.lock().unwrap();
    if world.batches[&batch].1.iter().any(|task| task.status < 2) {
        return 4;
    }
    world.batches.remove(&batch);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn genNotifyInEngine(engine: *mut c_void, segment: u64, note: Notify) -> c_int {
    let (name, message) = unsafe { (text(note.name), text(note.message)) };
    let mut world = WORLD.lock().unwrap();
    let session = world.engines[&key(engine)].segments[segment as usize].clone();
    let Some(target) = world.by_session(&session) else { return -102 };
    target.notes.push((CString::new(name).unwrap(), CString::new(message).unwrap()));
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getNotifsFromEngine(engine: *mut c_void, count: *mut c_int) -> *mut Notify {
    let notes = std::mem::take(&mut WORLD.lock().unwrap().engines.get_mut(&key(engine)).unwrap().notes);
    unsafe { *count = notes.len() as c_int };
    let list: Vec<Notify> = notes
        .into_iter()
        .map(|(name, text)| Notify { name: name.into_raw(), message: text.into_raw() })
        .collect();
    Box::into_raw(list.into_boxed_slice()).cast()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn freeNotifsMsgBuf(list: *mut Notify, count: c_int) -> c_int {
    let list = std::ptr::slice_from_raw_parts_mut(list, count as usize);
    for note in unsafe { Box::from_raw(list) } {
        unsafe { drop((CString::from_raw(note.name), CString::from_raw(note.message))) };
    }
    0
}
