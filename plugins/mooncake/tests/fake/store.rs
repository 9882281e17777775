//! A library with the symbols of `libmooncake_store.so` that a tier calls: one pool for the whole process, without a master.
//! Built by the test that uses it.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{LazyLock, Mutex};

static POOL: LazyLock<Mutex<HashMap<Vec<u8>, Vec<u8>>>> = LazyLock::new(Mutex::default);

/// A client, and the memory that is registered with it.
#[derive(Default)]
struct Client {
    is_set_up: bool,
    memory: Mutex<HashSet<(usize, usize)>>,
}

unsafe fn client<'a>(handle: *mut c_void) -> &'a Client {
    let client = unsafe { &*handle.cast::<Client>() };
    assert!(client.is_set_up, "it is called before it was set up");
    client
}

unsafe fn bytes(text: *const c_char) -> Vec<u8> {
    unsafe { CStr::from_ptr(text) }.to_bytes().to_vec()
}

impl Client {
    fn knows(&self, place: *mut c_void, length: usize) -> bool {
        let memory = self.memory.lock().unwrap();
        memory.iter().any(|(start, size)| *start <= place as usize && place as usize + length <= start + size)
    }
}

#[unsafe(no_mangle)]
extern "C" fn mooncake_store_create() -> *mut c_void {
    Box::into_raw(Box::<Client>::default()).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mooncake_store_destroy(handle: *mut c_void) {
    drop(unsafe { Box::from_raw(handle.cast::<Client>()) });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mooncake_store_setup(
    handle: *mut c_void,
    host: *const c_char,
    metadata: *const c_char,
    segment: u64,
    buffer: u64,
    protocol: *const c_char,
    device: *const c_char,
    master: *const c_char,
) -> c_int {
    let [host, metadata, protocol, device, master] =
        [host, metadata, protocol, device, master].map(|text| unsafe { bytes(text) });
    if device == b"no-such-device" {
        return -1;
    }
    assert_eq!(
        (&*host, &*metadata, &*protocol, &*device),
        (&b"127.0.0.1"[..], &b"P2PHANDSHAKE"[..], &b"tcp"[..], &b""[..])
    );
    assert_eq!((segment, buffer), (64 << 20, 16 << 20));
    assert!(master.starts_with(b"127.0.0.1:"));
    unsafe { &mut *handle.cast::<Client>() }.is_set_up = true;
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mooncake_store_batch_put_from(
    handle: *mut c_void,
    keys: *mut *const c_char,
    buffers: *mut *mut c_void,
    sizes: *const usize,
    count: usize,
    config: *const c_void,
    results: *mut c_int,
) -> c_int {
    let client = unsafe { client(handle) };
    assert!(config.is_null());
    for at in 0..count {
        let (key, place, size) = unsafe { (bytes(*keys.add(at)), *buffers.add(at), *sizes.add(at)) };
        let result = if client.knows(place, size) {
            let value = unsafe { std::slice::from_raw_parts(place.cast::<u8>(), size) };
            POOL.lock().unwrap().entry(key).or_insert_with(|| value.to_vec());
            0
        } else {
            -600
        };
        unsafe { *results.add(at) = result };
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mooncake_store_batch_get_into(
    handle: *mut c_void,
    keys: *mut *const c_char,
    buffers: *mut *mut c_void,
    sizes: *const usize,
    count: usize,
    results: *mut i64,
) -> c_int {
    let client = unsafe { client(handle) };
    for at in 0..count {
        let (key, place, size) = unsafe { (bytes(*keys.add(at)), *buffers.add(at), *sizes.add(at)) };
        let pool = POOL.lock().unwrap();
        let result = match pool.get(&key) {
            None => -704,
            Some(value) if value.len() > size || !client.knows(place, size) => -600,
            Some(value) => {
                unsafe { std::ptr::copy(value.as_ptr(), place.cast(), value.len()) };
                value.len() as i64
            }
        };
        unsafe { *results.add(at) = result };
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mooncake_store_batch_is_exist(
    handle: *mut c_void,
    keys: *mut *const c_char,
    count: usize,
    results: *mut c_int,
) -> c_int {
    let _ = unsafe { client(handle) };
    for at in 0..count {
        let there = POOL.lock().unwrap().contains_key(&unsafe { bytes(*keys.add(at)) });
        unsafe { *results.add(at) = there.into() };
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mooncake_store_remove(handle: *mut c_void, key: *const c_char, force: c_int) -> c_int {
    let _ = unsafe { client(handle) };
    // Every value counts as just read, so only a forced removal works.
    match POOL.lock().unwrap().remove(&unsafe { bytes(key) }) {
        _ if force == 0 => -706,
        Some(_) => 0,
        None => -704,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mooncake_store_register_buffer(
    handle: *mut c_void,
    place: *mut c_void,
    size: usize,
) -> c_int {
    let fresh = unsafe { client(handle) }.memory.lock().unwrap().insert((place as usize, size));
    if fresh { 0 } else { -7 }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mooncake_store_unregister_buffer(handle: *mut c_void, place: *mut c_void) -> c_int {
    let mut memory = unsafe { client(handle) }.memory.lock().unwrap();
    let before = memory.len();
    memory.retain(|(start, _)| *start != place as usize);
    if memory.len() < before { 0 } else { -3 }
}
