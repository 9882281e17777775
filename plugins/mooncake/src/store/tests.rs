//! The tier over a pool that a test keeps, with a listening socket as its master: calls fail, hang, or leave transfers behind.

mod masters;

use std::collections::BTreeMap;
use std::io::Read as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, Sender, channel};

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::{Address, MemoryKind};
use host_tests::wait::poll_until;

use super::client::{Client, Setup, Span};
use super::*;

const PAGE: usize = 4096;
const PAGES: usize = 16;
/// So long that no call in these tests counts as unsettled, and that nothing waits for that long.
const NEVER: Duration = Duration::from_secs(3600);

/// What the fake has to do, and what happened to it.
#[derive(Default)]
struct World {
    values: Mutex<BTreeMap<String, Vec<u8>>>,
    /// Codes that keys end with, by their first byte in hex.
    codes: Mutex<BTreeMap<String, i64>>,
    master_is_gone: AtomicBool,
    /// A get reports that it has begun, and waits for permission to go on.
    hang: Mutex<Option<(Sender<()>, Receiver<()>)>>,
    calls: AtomicUsize,
    connected: AtomicUsize,
    closed: AtomicUsize,
    /// Whether all other calls wait while a client is made or closed.
    holds_others_up: AtomicBool,
    registered: Mutex<Vec<Span>>,
    /// A master that is stopped as soon as a client says goodbye to it, and its address.
    stops_at_goodbye: Mutex<Option<(Master, SocketAddr)>>,
}

struct FakeLibrary(Arc<World>);
struct FakeClient(Arc<World>);

impl Library for FakeLibrary {
    fn connect(&self, _: &Setup) -> std::result::Result<Box<dyn Client>, String> {
        self.0.connected.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(FakeClient(self.0.clone())))
    }

    fn holds_others_up(&self) -> bool {
        self.0.holds_others_up.load(Ordering::SeqCst)
    }

    fn describe(&self) -> String {
        "a fake".into()
    }
}

impl FakeClient {
    fn each(
        &self,
        names: &[String],
        mut each: impl FnMut(usize, &String) -> i64,
    ) -> std::result::Result<Vec<i64>, String> {
        // The probe of the master does not count as a call.
        let asks = names[0].ends_with("is-anybody-there");
        self.0.calls.fetch_add(usize::from(!asks), Ordering::SeqCst);
        if self.0.master_is_gone.load(Ordering::SeqCst) {
            return Ok(vec![-900; names.len()]);
        }
        let code = |name: &String| locked(&self.0.codes).get(&name[8..10]).copied();
        Ok(names.iter().enumerate().map(|(at, name)| code(name).unwrap_or_else(|| each(at, name))).collect())
    }
}

impl Client for FakeClient {
    fn exist(&self, names: &[String]) -> std::result::Result<Vec<i64>, String> {
        self.each(names, |_, name| locked(&self.0.values).contains_key(name).into())
    }

    fn put(&self, names: &[String], spans: &[Span]) -> std::result::Result<Vec<i64>, String> {
        self.each(names, |at, name| {
            let Span { address, length } = spans[at];
            // SAFETY: a page of the test's memory, which the batch has.
            let value = unsafe { std::slice::from_raw_parts(address as *const u8, length as usize) };
            locked(&self.0.values).entry(name.clone()).or_insert_with(|| value.to_vec());
            0
        })
    }

    fn get(&self, names: &[String], spans: &[Span]) -> std::result::Result<Vec<i64>, String> {
        let hang = locked(&self.0.hang).take();
        if let Some((begun, leave)) = hang {
            begun.send(()).unwrap();
            leave.recv().unwrap();
        }
        self.each(names, |at, name| {
            let values = locked(&self.0.values);
            let Some(value) = values.get(name) else { return -704 };
            if value.len() as u64 > spans[at].length {
                return -600;
            }
            // SAFETY: a page of the test's memory, which the batch has, and at least as long as the value.
            unsafe { std::ptr::copy(value.as_ptr(), spans[at].address as *mut u8, value.len()) };
            value.len() as i64
        })
    }

    fn remove(&self, names: &[String]) -> std::result::Result<Vec<i64>, String> {
        self.each(names, |_, name| if locked(&self.0.values).remove(name).is_some() { 0 } else { -704 })
    }

    fn register(&self, span: Span) -> std::result::Result<(), String> {
        locked(&self.0.registered).push(span);
        Ok(())
    }

    fn unregister(&self, span: Span) -> std::result::Result<(), String> {
        locked(&self.0.registered).retain(|other| *other != span);
        Ok(())
    }

    fn close(&self) {
        if let Some((master, address)) = locked(&self.0.stops_at_goodbye).take() {
            master.is_stopped.store(true, Ordering::SeqCst);
            // Waits for an answer or the end of the connection, as Mooncake does.
            let mut answer = TcpStream::connect(address).unwrap();
            assert_eq!(answer.read(&mut [0]).unwrap_or(0), 0);
        }
        locked(&self.0.registered).clear();
        self.0.closed.fetch_add(1, Ordering::SeqCst);
    }
}

/// A master, as far as probes of it go. Its thread ends with the process.
#[derive(Clone, Default)]
struct Master {
    is_stopped: Arc<AtomicBool>,
}

impl Master {
    fn serve(&self, listener: TcpListener) {
        let is_stopped = self.is_stopped.clone();
        std::thread::spawn(move || {
            let mut unanswered = Vec::new();
            for stream in listener.incoming() {
                unanswered.push(stream);
                if !is_stopped.load(Ordering::SeqCst) {
                    unanswered.clear();
                }
            }
        });
    }
}

struct Rig {
    world: Arc<World>,
    tier: Arc<MooncakeTier>,
    memory: &'static mut [u8],
    region: RegionId,
    master: Master,
    address: SocketAddr,
}

fn rig(more: &str, unsettled: Duration) -> Rig {
    let (master, listener) = (Master::default(), TcpListener::bind("127.0.0.1:0").unwrap());
    let world = Arc::new(World::default());
    let address = listener.local_addr().unwrap();
    master.serve(listener);
    let default = |key: &str, line: &'static str| if more.contains(key) { "" } else { line };
    // A test waits for that long only when a master is silent.
    let patience = default("master_timeout_ms", "master_timeout_ms = 2000\n");
    let deadline = default("store_deadline_ms", "store_deadline_ms = 600000\n");
    let threads = default("read_threads", "read_threads = 1\n");
    let table = format!("master_server_address = \"{address}\"\n{patience}{deadline}{threads}{more}");
    let config = Config::parse(&table).unwrap();
    // The master may answer too late. The library is not called before it has answered.
    let tier = poll_until("the master's answer", || {
        let library = FakeLibrary(world.clone());
        match MooncakeTier::start(&config, Box::new(|| Ok(Box::new(library))), unsettled) {
            Err(error) if error.code == ErrorCode::TIMEOUT => Err(error),
            started => Ok(started.unwrap()),
        }
    });
    // Leaked: threads that a test left hanging may still use it.
    let memory = Vec::leak(vec![0; PAGE * PAGES]);
    let region = tier.register(&Memory {
        address: Address::of(memory.as_ptr()),
        length: memory.len() as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 1,
        fd_offset: 0,
    });
    Rig { world, tier: Arc::new(tier), memory, region: region.unwrap(), master, address }
}

fn key(page: usize) -> Key {
    Key([page as u8; 32])
}

impl Rig {
    fn pages(&self, pages: std::ops::Range<usize>) -> Vec<TierPage> {
        let offset = |page: usize| (page * PAGE) as u64;
        let page = |page| TierPage {
            key: key(page),
            region: self.region,
            length: PAGE as u32,
            offset: offset(page),
        };
        pages.map(page).collect()
    }

    fn wait<T>(&self, what: &str, mut is: impl FnMut() -> Option<T>) -> T {
        poll_until(what, || is().ok_or("nothing"))
    }

    /// The next completions, as many as are wanted, by tag and page.
    fn ends(&self, count: usize) -> BTreeMap<(u64, u32), i32> {
        let mut ends = BTreeMap::new();
        self.wait("completions", || {
            let mut done = [TierCompletion::default(); 8];
            let taken = self.tier.poll(&mut done) as usize;
            for end in &done[..taken] {
                assert!(ends.insert((end.tag.0, end.page), end.status).is_none(), "{end:?} came twice");
            }
            (ends.len() >= count).then_some(())
        });
        ends
    }

    fn statuses(&self, code: i32, count: usize) -> Vec<i32> {
        assert_eq!(code, 0);
        self.ends(count).into_values().collect()
    }

    fn put(&self, pages: std::ops::Range<usize>) -> Vec<i32> {
        let pages = self.pages(pages);
        self.statuses(self.tier.put(Tag(1), &pages), pages.len())
    }

    fn get(&self, pages: std::ops::Range<usize>) -> Vec<i32> {
        let pages = self.pages(pages);
        self.statuses(self.tier.get(Tag(2), &pages), pages.len())
    }

    fn exist(&self, pages: std::ops::Range<usize>) -> Vec<i32> {
        let keys: Vec<Key> = pages.map(key).collect();
        self.statuses(self.tier.exists(Tag(3), &keys), keys.len())
    }

    fn calls(&self) -> usize {
        self.world.calls.load(Ordering::SeqCst)
    }

    /// Waits until no call runs. A call ends its pages before it ends itself.
    fn wait_quiet(&self) {
        self.wait("no call to run", || self.tier.shared.link.is_quiet().then_some(()));
    }

    /// Makes the next get hang. Returns what reports that it hangs, and what ends that.
    fn hang(&self) -> (Receiver<()>, Sender<()>) {
        let ((begun, begins), (ends, leave)) = (channel(), channel());
        *locked(&self.world.hang) = Some((begun, leave));
        (begins, ends)
    }
}

#[test]
fn each_key_of_a_batch_ends_as_its_own_code_says() {
    let rig = rig("", NEVER);
    rig.memory.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / PAGE + 1) as u8);
    assert_eq!(rig.put(0..8), [STORED; 8]);
    *locked(&rig.world.codes) =
        [("01", -800), ("02", -200), ("03", -706), ("04", 100)].map(|(k, c)| (k.into(), c)).into();
    locked(&rig.world.values).remove(&format!("host-kv/{}", "05".repeat(32)));
    rig.memory.fill(0);
    let (io, full) = (ErrorCode::IO.0, ErrorCode::NO_RESOURCE.0);
    assert_eq!(rig.get(0..8), [FOUND, io, full, io, io, MISSING, FOUND, FOUND]);
    let right = |page: usize| rig.memory[page * PAGE..][..PAGE].iter().all(|byte| *byte as usize == page + 1);
    assert!([0, 6, 7].into_iter().all(right));
    assert_eq!(rig.exist(0..8), [FOUND, io, full, io, io, MISSING, FOUND, FOUND]);
    assert_eq!(rig.put(0..4), [STORED, io, full, io]);
    // One call for each batch.
    assert_eq!(rig.calls(), 4);
    // A page outside of its region ends alone.
    let mut pages = rig.pages(5..8);
    pages[1].offset = (PAGE * PAGES) as u64;
    let ends = rig.statuses(rig.tier.get(Tag(1), &pages), 3);
    assert_eq!(ends, [MISSING, ErrorCode::INVALID_ARGUMENT.0, FOUND]);
}

#[test]
fn what_a_call_leaves_behind_is_held_until_the_client_has_ended() {
    let rig = rig("", Duration::ZERO);
    assert_eq!(rig.put(0..3), [STORED; 3]);
    locked(&rig.world.codes).insert("01".into(), -800);
    let (begun, leave) = rig.hang();
    let pages = rig.pages(0..1);
    assert_eq!(rig.tier.get(Tag(7), &pages), 0);
    begun.recv().unwrap();
    // While a read hangs, a write leaves a transfer behind.
    let written = rig.pages(0..3);
    assert_eq!(rig.tier.put(Tag(8), &written), 0);
    let ends = rig.ends(2);
    assert_eq!(ends.into_iter().collect::<Vec<_>>(), [((8, 0), STORED), ((8, 2), STORED)]);
    assert_eq!((rig.tier.settled(Tag(8)), rig.tier.settled(Tag(7))), (0, 0));
    // No call begins any more, and the client stays as long as one runs.
    assert_eq!(rig.exist(0..1), [ErrorCode::PEER_LOST.0]);
    assert_eq!(rig.world.closed.load(Ordering::SeqCst), 0);
    leave.send(()).unwrap();
    let ends = rig.ends(2);
    assert_eq!(rig.world.closed.load(Ordering::SeqCst), 1);
    assert_eq!(ends.into_iter().collect::<Vec<_>>(), [((7, 0), FOUND), ((8, 1), ErrorCode::IO.0)]);
    assert_eq!((rig.tier.settled(Tag(8)), rig.tier.settled(Tag(7))), (1, 1));
    // The next client knows the memory.
    rig.wait("another client", || (rig.exist(0..1) == [FOUND]).then_some(()));
    assert_eq!(rig.world.connected.load(Ordering::SeqCst), 2);
    assert_eq!(locked(&rig.world.registered).len(), 1);
    assert_eq!(rig.get(0..1), [FOUND]);
}

#[test]
fn what_waits_behind_a_call_that_hangs_ends_at_its_deadline_and_the_call_when_it_comes_back() {
    let rig = rig("", NEVER);
    assert_eq!(rig.put(0..4), [STORED; 4]);
    let (begun, leave) = rig.hang();
    assert_eq!(rig.tier.get(Tag(1), &rig.pages(0..1)), 0);
    begun.recv().unwrap();
    assert_eq!(rig.tier.get(Tag(2), &rig.pages(1..3)), 0);
    rig.tier.shared.watch(Duration::ZERO);
    let timeout = ErrorCode::TIMEOUT.0;
    assert_eq!(rig.ends(2).into_iter().collect::<Vec<_>>(), [((2, 0), timeout), ((2, 1), timeout)]);
    // Work other than reads goes on.
    assert_eq!((rig.exist(0..1), rig.put(5..6)), (vec![FOUND], vec![STORED]));
    assert_eq!((rig.tier.settled(Tag(1)), rig.tier.settled(Tag(2))), (0, 1));
    leave.send(()).unwrap();
    assert_eq!(rig.ends(1).into_values().collect::<Vec<_>>(), [FOUND]);
    assert_eq!(rig.get(3..4), [FOUND]);
}

#[test]
fn a_deadline_passes_without_a_call() {
    let rig = rig("store_deadline_ms = 50\n", NEVER);
    let (begun, leave) = rig.hang();
    // A read that the group takes too late ends in the line, and another read is tried.
    rig.wait("a read that hangs", || {
        assert_eq!(rig.tier.get(Tag(1), &rig.pages(0..1)), 0);
        let begins = rig.wait("the read to begin or to end", || {
            let mut done = [TierCompletion::default()];
            match begun.try_recv() {
                Ok(()) => Some(true),
                Err(_) => (rig.tier.poll(&mut done) == 1).then_some(false),
            }
        });
        begins.then_some(())
    });
    assert_eq!(rig.tier.get(Tag(2), &rig.pages(1..2)), 0);
    assert_eq!(rig.ends(1).into_iter().collect::<Vec<_>>(), [((2, 0), ErrorCode::TIMEOUT.0)]);
    leave.send(()).unwrap();
    assert_eq!(rig.ends(1).into_values().collect::<Vec<_>>(), [MISSING]);
}

#[test]
fn what_is_being_read_is_removed_when_it_was_read() {
    let rig = rig("read_threads = 2\n", NEVER);
    rig.memory.fill(7);
    assert_eq!(rig.put(0..2), [STORED; 2]);
    let (begun, leave) = rig.hang();
    assert_eq!(rig.tier.get(Tag(1), &rig.pages(0..1)), 0);
    begun.recv().unwrap();
    assert_eq!(rig.tier.delete(Tag(2), &[key(0), key(1)]), 0);
    // The other key's removal waits for nothing, and no question behind it waits.
    assert_eq!(rig.ends(1).into_iter().collect::<Vec<_>>(), [((2, 1), FOUND)]);
    assert_eq!(rig.exist(0..2), [FOUND, MISSING]);
    assert_eq!(rig.get(0..1), [MISSING], "a read that begins now is one that comes later");
    assert_eq!((rig.tier.settled(Tag(1)), rig.tier.settled(Tag(2))), (0, 0));
    leave.send(()).unwrap();
    assert_eq!(rig.ends(2).into_iter().collect::<Vec<_>>(), [((1, 0), FOUND), ((2, 0), FOUND)]);
    assert_eq!((rig.exist(0..1), rig.get(0..1)), (vec![MISSING], vec![MISSING]));
    assert_eq!((rig.put(0..1), rig.get(0..1)), (vec![STORED], vec![FOUND]), "it can come again");
}

#[test]
fn a_removal_behind_a_read_that_hangs_ends_at_its_deadline_and_removes_nothing() {
    let rig = rig("read_threads = 2\n", NEVER);
    assert_eq!(rig.put(0..1), [STORED]);
    let (begun, leave) = rig.hang();
    assert_eq!(rig.tier.get(Tag(1), &rig.pages(0..1)), 0);
    begun.recv().unwrap();
    assert_eq!(rig.tier.delete(Tag(2), &[key(0)]), 0);
    // A removal that still stands in the line would end there.
    rig.wait("the removal to wait for the read", || (rig.get(0..1) == [MISSING]).then_some(()));
    rig.tier.shared.watch(Duration::ZERO);
    assert_eq!(rig.ends(1).into_iter().collect::<Vec<_>>(), [((2, 0), ErrorCode::TIMEOUT.0)]);
    leave.send(()).unwrap();
    assert_eq!(rig.ends(1).into_values().collect::<Vec<_>>(), [FOUND]);
    assert_eq!((rig.exist(0..1), rig.get(0..1)), (vec![FOUND], vec![FOUND]));
}

#[test]
fn a_region_stays_while_a_call_is_in_it_and_shutdown_says_so_when_one_does_not_end() {
    let rig = rig("", NEVER);
    let (begun, leave) = rig.hang();
    assert_eq!(rig.tier.get(Tag(1), &rig.pages(0..1)), 0);
    begun.recv().unwrap();
    let (tier, region) = (rig.tier.clone(), rig.region);
    let gone = std::thread::spawn(move || tier.deregister(region));
    // Puts are refused once the region is leaving.
    rig.wait("the region to leave", || (rig.put(1..2) == [ErrorCode::INVALID_ARGUMENT.0]).then_some(()));
    assert!(!gone.is_finished() && locked(&rig.world.registered).len() == 1);
    let error = rig.tier.shutdown(1).unwrap_err();
    assert_eq!(error.code, ErrorCode::TIMEOUT);
    assert_eq!(rig.world.closed.load(Ordering::SeqCst), 0);
    leave.send(()).unwrap();
    rig.tier.shutdown(60_000).unwrap();
    gone.join().unwrap().unwrap();
    assert_eq!(rig.world.closed.load(Ordering::SeqCst), 1);
    assert_eq!(rig.tier.exists(Tag(1), &[key(0)]), ErrorCode::CLOSED.0);
}

#[test]
fn a_read_only_instance_stores_and_removes_nothing() {
    let rig = rig("read_only = true\nmaster_metrics_address = \"127.0.0.1:1\"\n", NEVER);
    let refused = ErrorCode::UNSUPPORTED.0;
    assert_eq!((rig.put(0..2), rig.exist(0..1)), (vec![refused; 2], vec![MISSING]));
    let code = rig.tier.delete(Tag(4), &[key(0)]);
    assert_eq!(rig.statuses(code, 1), [refused]);
    let error = rig.tier.usage().unwrap_err();
    assert!(error.code == ErrorCode::IO && error.message.contains("master_metrics_address"), "{error}");
}
