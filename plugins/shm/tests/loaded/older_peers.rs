//! Peers whose plugin knows version 1 of the handshake alone. Their bytes, descriptors and pages are made by hand, as
//! that version had them.
//!
//! Nothing here comes from the plugin: tests with its code could not tell when both sides change at once.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{JoinHandle, spawn};

use host_plugin_api::RegionId;
use host_plugin_api::*;
use host_test_peer::*;
use host_tests::plugin_files;
use host_tests::wait::PATIENCE;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::net::*;

const MAGIC: &[u8] = b"hostshm\x01";
const BYTES: usize = 1 << 16;

/// Bytes of the control page, and where in it which words of eight bytes are.
const CONTROL_BYTES: usize = 66_752;
const CLOSED: usize = 0;
const PUSHED: usize = 8;
const TAKEN: usize = 16;
const BUSY: usize = 24;
const COPY_THREADS: usize = 16;
const RING: usize = 152;
/// Bytes of the table of live regions.
const LIVE_BYTES: usize = 1024;

/// A file, mapped for as long as this process runs.
fn map(file: impl AsFd, bytes: usize, writable: bool) -> &'static [AtomicU64] {
    let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
    // SAFETY: a fresh mapping, which stays. It has so many bytes, and all that share it use atomics or take turns.
    unsafe {
        let address = mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0).unwrap();
        std::slice::from_raw_parts(address.cast(), bytes / 8)
    }
}

fn load(word: &AtomicU64) -> u64 {
    word.load(Ordering::SeqCst)
}

fn store(word: &AtomicU64, value: u64) {
    word.store(value, Ordering::SeqCst);
}

fn socket() -> OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn address(name: &[u8; 16]) -> SocketAddrUnix {
    let name = format!("host-shm-{:032x}", u128::from_le_bytes(*name));
    SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()
}

fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(fds)));
    sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
}

fn receive(socket: impl AsFd) -> (Vec<u8>, Vec<OwnedFd>) {
    let mut bytes = vec![0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got =
        recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC).unwrap();
    bytes.truncate(got.bytes);
    let rights = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    (bytes, rights.flatten().collect())
}

fn refusal(bytes: &[u8]) -> (i32, String) {
    let code = i32::from_le_bytes(bytes[8..12].try_into().unwrap());
    assert_eq!(&bytes[..8], MAGIC, "it can be read by a process of version 1");
    (code, String::from_utf8(bytes[12..].to_vec()).unwrap())
}

/// A sender of version 1: says hello to the instance that made an endpoint, and returns its connection and the answer.
fn say_hello(endpoint: &[u8]) -> (OwnedFd, Vec<u8>, Vec<OwnedFd>) {
    assert_eq!(&endpoint[..8], MAGIC);
    let (name, token) = (endpoint[8..24].try_into().unwrap(), &endpoint[24..40]);
    let socket = socket();
    connect(&socket, &address(name)).unwrap();
    send(&socket, &[MAGIC, token, &[9; 16], b"prefill"].concat(), &[]);
    let (answer, fds) = receive(&socket);
    (socket, answer, fds)
}

/// What a sender of version 1 has of its peer.
struct OldSender {
    socket: OwnedFd,
    region: u64,
    control: &'static [AtomicU64],
    live: &'static [AtomicU64],
    event: OwnedFd,
    memory: &'static [AtomicU64],
}

impl OldSender {
    fn connect(endpoint: &[u8]) -> Self {
        let (socket, answer, fds) = say_hello(endpoint);
        let [control, live, event, memory] = fds.try_into().expect("four descriptors");
        let sizes = [&control, &live, &memory].map(|file| fstat(file).unwrap().st_size as usize);
        assert_eq!(sizes, [CONTROL_BYTES, LIVE_BYTES, BYTES]);
        // One region: its id, generation, length, and where in its file it begins.
        assert_eq!(answer.len(), 12 + 24);
        let region = u32::from_le_bytes(answer[12..16].try_into().unwrap());
        let bytes = (BYTES as u64).to_le_bytes();
        let of_region = [&region.to_le_bytes(), 1u32.to_le_bytes().as_slice(), &bytes, &[0; 8]].concat();
        assert_eq!(answer, [MAGIC, &[0; 4], &of_region].concat());
        Self {
            socket,
            region: region.into(),
            control: map(control, CONTROL_BYTES, true),
            live: map(live, LIVE_BYTES, false),
            event,
            memory: map(memory, BYTES, true),
        }
    }

    fn region_lives(&self) -> bool {
        load(&self.live[self.region as usize % 128]) == self.region << 32 | 1
    }

    /// Writes all memory as the copy thread of this number, and notifies the receiver.
    fn write(&self, thread: usize, value: u8) {
        let line = &self.control[BUSY + 8 * thread];
        store(line, load(line) | 1);
        assert!(load(&self.control[CLOSED]) == 0 && self.region_lives());
        self.memory.iter().for_each(|word| store(word, u64::from_ne_bytes([value; 8])));
        let pushed = load(&self.control[PUSHED]);
        let entry = &self.control[RING + 8 * (pushed % 1024) as usize..][..8];
        store(&entry[0], 1);
        store(&entry[1], value.into());
        store(&self.control[PUSHED], pushed + 1);
        rustix::io::write(&self.event, &1u64.to_ne_bytes()).unwrap();
        store(line, load(line) + 1);
    }
}

#[test]
fn a_sender_of_version_1_writes_and_is_heard_and_fenced() {
    let directory = plugin_files::directory(&["shm"]);
    let receiver = Worker::open(directory.path(), "shm", "decode", BYTES, "fence_timeout_ms = 100");
    let endpoint = receiver.backend.endpoint().unwrap();
    let sender = OldSender::connect(&endpoint);
    for thread in 0..COPY_THREADS {
        let value = 7 + thread as u8;
        sender.write(thread, value);
        let notification = receiver.notification();
        assert_eq!((notification.kind, notification.payload[0]), (NotificationKind::ARRIVED, value));
        assert!(receiver.bytes().iter().all(|byte| *byte == value));
        assert_eq!(load(&sender.control[TAKEN]), thread as u64 + 1);
    }
    drop(sender.socket);
    assert_eq!(receiver.notification().kind, NotificationKind::PEER_LOST);

    let sender = OldSender::connect(&endpoint);
    let line = &sender.control[BUSY + 8 * (COPY_THREADS - 1)];
    store(line, 1);
    let refused = receiver.backend.deregister(receiver.region).unwrap_err();
    assert_eq!(refused.code, ErrorCode::TIMEOUT, "it is copying: {refused}");
    assert!(!sender.region_lives());
    store(line, 2);
    receiver.backend.deregister(receiver.region).unwrap();
    receiver.backend.shutdown(60_000).unwrap();
    assert_eq!(load(&sender.control[CLOSED]), 1);
    assert!(receive(&sender.socket).0.is_empty(), "its end");
}

#[test]
fn a_sender_of_version_1_is_refused_memory_of_a_gpu_in_words_that_it_reads() {
    crate::between_devices::load_stand_in();
    let directory = plugin_files::directory(&["shm"]);
    let receiver = Worker::open_on(Place::Device, directory.path(), "shm", "decode", BYTES, crate::PATIENT);
    let (_socket, answer, fds) = say_hello(&receiver.backend.endpoint().unwrap());
    let (code, text) = refusal(&answer);
    assert_eq!((code, fds.len()), (ErrorCode::VERSION.0, 0));
    assert_eq!(
        text,
        "the shm plugin of prefill is older than this one and cannot write to the memory of a GPU: update it"
    );
    receiver.backend.deregister(receiver.region).unwrap();
}

/// A receiver of version 1, with one region.
struct OldReceiver {
    listener: OwnedFd,
    endpoint: Vec<u8>,
    control: OwnedFd,
    live: OwnedFd,
    event: OwnedFd,
    memory: OwnedFd,
}

/// The id of its region.
const REGION: u32 = 128 + 5;

impl OldReceiver {
    fn new() -> Self {
        let name: [u8; 16] = std::array::from_fn(|_| rand_byte());
        let listener = socket();
        bind(&listener, &address(&name)).unwrap();
        listen(&listener, 8).unwrap();
        // So that a hello that never comes fails the test.
        sockopt::set_socket_timeout(&listener, sockopt::Timeout::Recv, Some(PATIENCE)).unwrap();
        let file = |bytes: usize| {
            let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            ftruncate(&file, bytes as u64).unwrap();
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
            file
        };
        let endpoint = [MAGIC, &name, &[2; 16], &[3; 16], b"decode"].concat();
        let [control, live, memory] = [CONTROL_BYTES, LIVE_BYTES, BYTES].map(file);
        store(&map(&live, LIVE_BYTES, true)[5], u64::from(REGION) << 32 | 1);
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        Self { listener, endpoint, control, live, event, memory }
    }

    /// The connection of the next hello.
    fn accept(&self) -> OwnedFd {
        let accepted = accept_with(&self.listener, SocketFlags::CLOEXEC);
        accepted.unwrap_or_else(|error| panic!("waited {PATIENCE:?} for a hello: {error}"))
    }

    /// Answers the next hello. Returns the connection if the hello was welcome.
    fn greet(&self) -> Option<OwnedFd> {
        let socket = self.accept();
        // Descriptors of a refused hello are not looked at.
        let (hello, fds) = receive(&socket);
        if &hello[..8] != MAGIC {
            let why = format!("a hello is of version {}, this plugin speaks 1", hello[7]);
            self.refuse(&socket, &why);
            return None;
        }
        assert!(fds.is_empty());
        let [token, instance] = [&hello[8..24], &hello[24..40]];
        assert!(token == [2; 16] && instance != [0; 16] && &hello[40..] == b"prefill");
        let (id, length) = (REGION.to_le_bytes(), (BYTES as u64).to_le_bytes());
        let region = [id.as_slice(), &1u32.to_le_bytes(), &length, &[0; 8]].concat();
        let fds = [&self.control, &self.live, &self.event, &self.memory].map(AsFd::as_fd);
        send(&socket, &[MAGIC, &[0; 4], &region].concat(), &fds);
        Some(socket)
    }

    fn refuse(&self, socket: &OwnedFd, why: &str) {
        let code = ErrorCode::VERSION.0.to_le_bytes();
        send(socket, &[MAGIC, &code, why.as_bytes()].concat(), &[]);
    }

    /// Answers hellos on a thread of its own, until one is welcome.
    fn greet_until_one_is_welcome(self) -> JoinHandle<(Self, OwnedFd)> {
        spawn(move || {
            assert!(self.greet().is_none(), "the first hello is of the newest version");
            let connection = self.greet().expect("the second one is of version 1");
            (self, connection)
        })
    }

    /// Whether no connection waits for an answer.
    fn is_alone(&self) -> bool {
        rustix::io::ioctl_fionbio(&self.listener, true).unwrap();
        accept_with(&self.listener, SocketFlags::CLOEXEC).is_err()
    }
}

fn rand_byte() -> u8 {
    let mut byte = [0];
    rustix::rand::getrandom(&mut byte, rustix::rand::GetRandomFlags::empty()).unwrap();
    byte[0]
}

fn write_to(source_region: RegionId, length: usize) -> Write {
    let target_region = RegionId(REGION);
    Write { source_region, target_region, length: length as u32, target_generation: 1, ..Write::default() }
}

#[test]
fn a_receiver_of_version_1_is_written_to_and_told() {
    let directory = plugin_files::directory(&["shm"]);
    let config = format!("{}copy_threads = 2", crate::PATIENT);
    let sender = Worker::open(directory.path(), "shm", "prefill", BYTES, &config);
    sender.bytes_mut().fill(7);
    let receiver = OldReceiver::new();
    let endpoint = receiver.endpoint.clone();
    let receiver = receiver.greet_until_one_is_welcome();
    let peer = sender.backend.connect("decode", &endpoint).unwrap();
    let (receiver, connection) = receiver.join().unwrap();
    let control = map(&receiver.control, CONTROL_BYTES, true);

    assert_eq!(
        sender.backend.submit(&submission(peer, 1, b"arrived."), &[write_to(sender.region, BYTES)]),
        0
    );
    assert_eq!(sender.completion().status, 0);
    assert!(map(&receiver.memory, BYTES, true).iter().all(|word| load(word) == u64::from_ne_bytes([7; 8])));
    assert_eq!((load(&control[PUSHED]), load(&control[RING]) as u32), (1, 8));
    assert_eq!(load(&control[RING + 1]).to_ne_bytes(), *b"arrived.");
    let mut count = [0; 8];
    assert_eq!(rustix::io::read(&receiver.event, &mut count), Ok(8), "it is woken");
    let lines = |from: usize, to: usize| (from..to).map(|at| load(&control[BUSY + at])).sum::<u64>();
    assert!(lines(0, 16) >= 2 && lines(0, 16).is_multiple_of(2), "two threads mark two lines");
    assert_eq!(lines(16, RING - BUSY), 0);

    store(&control[CLOSED], 1);
    assert_eq!(sender.backend.submit(&submission(peer, 2, b""), &[write_to(sender.region, 8)]), 0);
    assert_eq!(sender.completion().status, ErrorCode::PEER_LOST.0, "it closed");
    drop(connection);
    let lost = sender.notification();
    assert_eq!(lost.kind, NotificationKind::PEER_LOST);
    sender.backend.shutdown(60_000).unwrap();
}

#[test]
fn a_receiver_that_refuses_version_1_too_is_left_alone() {
    let directory = plugin_files::directory(&["shm"]);
    let sender = Worker::open(directory.path(), "shm", "prefill", BYTES, crate::PATIENT);
    let receiver = OldReceiver::new();
    let endpoint = receiver.endpoint.clone();
    let receiver = spawn(move || {
        for _ in 0..2 {
            let socket = receiver.accept();
            receive(&socket);
            receiver.refuse(&socket, "no version will do");
        }
        receiver
    });
    let refused = sender.backend.connect("decode", &endpoint).unwrap_err();
    assert_eq!(refused.code, ErrorCode::VERSION);
    assert!(refused.message.contains("no version will do"), "{refused}");
    assert!(receiver.join().unwrap().is_alone());
}

#[test]
fn memory_of_a_gpu_is_not_sent_to_a_receiver_of_version_1() {
    crate::between_devices::load_stand_in();
    let directory = plugin_files::directory(&["shm"]);
    let sender = Worker::open_on(Place::Device, directory.path(), "shm", "prefill", BYTES, crate::PATIENT);
    let receiver = OldReceiver::new();
    let endpoint = receiver.endpoint.clone();
    let receiver = spawn(move || {
        assert!(receiver.greet().is_none());
        receiver
    });
    let refused = sender.backend.connect("decode", &endpoint).unwrap_err();
    assert_eq!(refused.code, ErrorCode::VERSION);
    let text = "the shm plugin of decode is older than this one and cannot be sent what is in the memory of a GPU: update it";
    assert!(refused.message.contains(text), "{refused}");
    let receiver = receiver.join().unwrap();
    assert!(receiver.is_alone());

    // Device memory that is registered when the connection is there already.
    let sender = Worker::open(directory.path(), "shm", "prefill", BYTES, crate::PATIENT);
    let receiver = OldReceiver::new();
    let endpoint = receiver.endpoint.clone();
    let receiver = receiver.greet_until_one_is_welcome();
    let peer = sender.backend.connect("decode", &endpoint).unwrap();
    let (_receiver, _connection) = receiver.join().unwrap();
    let memory = DeviceMemory::new(BYTES);
    let region = sender.backend.register(&memory.offer(1)).unwrap();
    let writes = [write_to(sender.region, 8), write_to(region, 8)];
    for (tag, writes) in [&writes[..], &writes[1..]].into_iter().enumerate() {
        assert_eq!(sender.backend.submit(&submission(peer, tag as u64, b"never"), writes), 0);
        assert_eq!(sender.completion().status, ErrorCode::UNSUPPORTED.0);
    }
    assert_eq!(sender.backend.submit(&submission(peer, 9, b""), &writes[..1]), 0);
    assert_eq!(sender.completion().status, 0, "host memory is sent");
    sender.backend.deregister(region).unwrap();
}
