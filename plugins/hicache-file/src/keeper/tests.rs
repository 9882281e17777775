//! What the keeper does when the system refuses.

use super::*;
use crate::config::Config;
use crate::format::Value;
use crate::queue::Kind;
use crate::writer::{NoSpace, OpenSegment};
use host_plugin_api::{Address, ErrorCode, Key, Memory, MemoryKind, RegionId, Tag, TierPage};
use host_tests::wait;
use parking_lot::Mutex;

/// Calls `run` with a keeper of this store.
fn with_keeper(store: &Store, run: impl FnOnce(&mut Keeper<'_>)) {
    with_device(store, &Mutex::new(()), run);
}

/// As [`with_keeper`], with a device that does nothing while it is locked.
fn with_device(store: &Store, device: &Mutex<()>, run: impl FnOnce(&mut Keeper<'_>)) {
    let seal = |open: &OpenSegment| {
        drop(device.lock());
        open.seal(store.config.fsync)
    };
    let (sealer, work) = sealer::new();
    std::thread::scope(|scope| {
        scope.spawn(|| work.run(store, seal));
        run(&mut Keeper::new(store, sealer));
    });
}

/// Fills a segment with one page. `None` when there is no segment.
fn fill(store: &Store, n: u8) -> Option<Arc<OpenSegment>> {
    let (Ok(space), _) = store.writer.space(1 << 20) else { return None };
    let value = Value { key: Key([n; 32]), checksum: 0, block: 0, length: 1 << 20 };
    space.open.publish(&[value], Fsync::Never).unwrap();
    space.open.ended();
    Some(space.open)
}

/// Fills segments that the keeper makes, without time to have them sealed.
fn fill_all(keeper: &mut Keeper<'_>, count: u8) {
    for n in 0..count {
        assert!(fill(keeper.store, n).is_none());
        keeper.store.writer.supply(keeper.make());
        assert!(fill(keeper.store, n).is_some());
    }
    assert!(fill(keeper.store, count).is_none());
}

#[test]
fn a_directory_that_cannot_be_looked_at_is_not_said_to_be_gone_and_either_is_said_once() {
    let above = tempfile::tempdir().unwrap();
    let (dir, away) = (above.path().join("pages"), above.path().join("away"));
    let text = format!("dir = {dir:?}\nfree_floor_mib = 0\nsegment_mib = 1\nsize_limit_mib = 8");
    let store = Store::new(Config::parse(&text).unwrap(), 0).unwrap();
    with_keeper(&store, |keeper| {
        let said = |keeper: &mut Keeper<'_>| {
            keeper.refresh(false);
            let said = keeper.trouble.clone().unwrap();
            assert!(matches!(keeper.make(), Err((ErrorCode::IO, _))));
            assert_eq!(keeper.trouble.as_ref(), Some(&said), "another text would be another line in the log");
            said
        };
        std::fs::rename(&dir, &away).unwrap();
        assert!(said(keeper).contains("is gone or was replaced"));
        // A link to itself fails for every user, unlike a missing right, which root ignores.
        std::os::unix::fs::symlink(&dir, &dir).unwrap();
        let looped = said(keeper);
        assert!(looped.contains("cannot be looked at") && !looped.contains("gone"), "{looped}");
        std::fs::remove_file(&dir).unwrap();
        std::fs::rename(&away, &dir).unwrap();
        assert!(keeper.make().is_ok(), "the same directory is used again");
        assert_eq!(keeper.trouble, None);
    });
}

#[test]
fn files_with_holes_reserve_no_more_than_the_pages_that_they_can_hold() {
    const SPARSE: u64 = 8 << 30;
    let cases = [(SPARSE, 1 << 20, 256), (1 << 20, SPARSE, 16_384), (SPARSE, SPARSE, 65_536)];
    for (index, data, pages) in cases {
        let dir = tempfile::tempdir().unwrap();
        let text = format!("dir = {:?}\nsegment_mib = 64\nsize_limit_mib = 256", dir.path());
        let store = Store::new(Config::parse(&text).unwrap(), 0).unwrap();
        let name = Name { birth: 1, random: 2 };
        for (file, length) in [(name.index(), index), (name.data(), data)] {
            let path = store.directory.path().join(file);
            std::fs::File::create(path).unwrap().set_len(length).unwrap();
        }
        with_keeper(&store, |keeper| keeper.refresh(true));
        let room = store.index.lock().room();
        assert!((pages..4 * pages).contains(&room), "{room} for {pages} pages");
    }
}

#[test]
fn a_segment_that_could_not_be_sealed_is_sealed_later_and_what_was_deleted_meanwhile_stays_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!("dir = {:?}\nfree_floor_mib = 0\nsegment_mib = 1\nsize_limit_mib = 8", dir.path());
    let store = Store::new(Config::parse(&text).unwrap(), 0).unwrap();
    with_keeper(&store, |keeper| {
        // A writer whose data cannot be cut, because its descriptor is only for reading.
        let lock = store.directory.lock().unwrap();
        let name = Name { birth: 1, random: 2 };
        let (index, _data) = store.directory.make(name, 1 << 20, &lock).unwrap();
        drop(lock);
        let data = Arc::new(store.directory.data(name).unwrap());
        let segment = store.index.lock().add(|id| Segment::new(id, name, Some(data.clone())));
        store.writer.supply(Ok(OpenSegment::new(segment.clone(), data, index, 1 << 20)));
        let value = |n: u8| Value { key: Key([n; 32]), checksum: 0, block: n.into(), length: 4096 };
        let (Ok(space), _) = store.writer.space(3 * 4096) else { panic!("there is room") };
        space.open.publish(&[value(0), value(1), value(2)], Fsync::Never).unwrap();
        (0..3).for_each(|n| assert!(store.index.lock().insert(segment.id, n.into(), value(n))));
        space.open.ended();
        drop(space);
        store.delete(&value(0).key).unwrap();
        store.writer.retire();
        keeper.seal_all();
        assert!(!segment.is_sealed() && store.writer.open_segment(segment.id).is_none());
        store.delete(&value(1).key).unwrap();
        let records =
            || read_records(&store.directory.index(name, false).unwrap(), name, 0, 1 << 20).unwrap();
        assert!(!records().sealed && records().values.len() == 2);
        keeper.refresh(false);
        assert!(segment.is_sealed() && records().sealed);
        assert_eq!(records().values.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [2]);
        let found = |n: u8| store.index.lock().find(&value(n).key).is_some();
        assert!(!found(0) && !found(1) && found(2));
    });
}

#[test]
fn what_is_full_and_not_sealed_yet_is_sealed_and_evicted_before_anything_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    // Room for seven segments, with what their indices may grow to.
    let text = format!("dir = {:?}\nfree_floor_mib = 0\nsegment_mib = 1\nsize_limit_mib = 8", dir.path());
    let store = Store::new(Config::parse(&text).unwrap(), 0).unwrap();
    with_keeper(&store, |keeper| {
        fill_all(keeper, 7);
        assert!(store.writer.has_full());
        let made = keeper.make();
        assert!(made.is_ok(), "{:?}", keeper.trouble);
        assert_eq!(keeper.trouble, None, "nothing is said to be refused");
        store.writer.supply(made);
        // Segments that writes still reach into cannot be evicted. The keeper waits for them, but not for long.
        let mut busy = Vec::new();
        let refused = loop {
            match store.writer.space(1 << 20) {
                (Ok(space), _) => busy.push(space),
                (Err(NoSpace::Wait), _) => store.writer.supply(keeper.make()),
                (Err(NoSpace::Refused(code)), _) => break code,
            }
        };
        assert_eq!((refused, busy.len()), (ErrorCode::NO_RESOURCE, 7));
        assert!(keeper.trouble.as_ref().is_some_and(|text| text.contains("nothing is left to evict")));
    });
}

#[test]
fn what_a_slow_device_has_yet_to_seal_is_waited_for_and_evicted() {
    let dir = tempfile::tempdir().unwrap();
    // Room for three segments.
    let text = format!("dir = {:?}\nfree_floor_mib = 0\nsegment_mib = 1\nsize_limit_mib = 4", dir.path());
    let store = Store::new(Config::parse(&text).unwrap(), 0).unwrap();
    let device = Mutex::new(());
    with_device(&store, &device, |keeper| {
        let ((tell, told), (waits, waiting)) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
        std::thread::scope(|scope| {
            let device = &device;
            scope.spawn(move || {
                let _held = device.lock();
                tell.send(()).unwrap();
                waiting.recv_timeout(wait::PATIENCE).expect("the keeper waits for a seal");
            });
            told.recv().unwrap();
            fill_all(keeper, 3);
            // The device takes longer than any other wait.
            keeper.patience = Duration::from_nanos(1);
            keeper.sealer.waits = Some(waits);
            let made = keeper.make();
            keeper.sealer.waits = None;
            assert!(made.is_ok(), "{:?}", keeper.trouble);
        });
    });
}

#[test]
fn segments_are_made_while_others_wait_for_their_seals_which_are_not_many() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!("dir = {:?}\nfree_floor_mib = 0\nsegment_mib = 1\nsize_limit_mib = 32", dir.path());
    let store = Store::new(Config::parse(&text).unwrap(), 0).unwrap();
    let device = Mutex::new(());
    with_device(&store, &device, |keeper| {
        store.index.lock().complete = true;
        let held = device.lock();
        let made = |keeper: &mut Keeper<'_>, n: usize| {
            assert!(matches!(store.writer.space(1 << 20), (Err(NoSpace::Wait), true)));
            keeper.attend();
            fill(&store, n as u8)
        };
        let first = made(keeper, 0).unwrap();
        for n in 1..sealer::MOST {
            assert!(made(keeper, n).is_some(), "{n} wait for their seals");
        }
        assert!(made(keeper, 99).is_none());
        assert!(!keeper.seal() && store.writer.knows(first.segment.name).is_some());
        // A page waits for a segment, and does not ask for it again and again.
        let bytes = [0; 4096];
        let (address, kind) = (bytes.as_ptr() as u64, MemoryKind::DRAM);
        let memory = Memory {
            address: Address(address),
            length: 4096,
            kind,
            device: 0,
            fd: -1,
            generation: 0,
            fd_offset: 0,
        };
        let region = store.queue.register(&memory).unwrap().0;
        let page = TierPage { key: Key([7; 32]), region: RegionId(region), length: 4096, offset: 0 };
        assert_eq!(store.queue.push(Kind::Put, Tag(1), 1, std::iter::once(page)), 0);
        let (mut claim, mut ended, mut runs) = (Vec::new(), Vec::new(), Vec::new());
        assert!(store.queue.claim(true, &mut claim));
        crate::work::start(&store, &claim, &mut ended, &mut runs);
        assert!(ended.is_empty() && runs.is_empty());
        keeper.attend();
        assert!(!store.queue.claim(true, &mut claim));
        drop(held);
        assert!(keeper.await_sealed());
        keeper.attend();
        assert!(store.queue.claim(true, &mut claim));
        assert!(first.segment.is_sealed() && store.writer.knows(first.segment.name).is_none());
        assert!(fill(&store, 100).is_some());
        store.writer.retire();
        keeper.seal_all();
        assert!(!store.writer.has_full());
        let sealed = |known: &Known| matches!(known, Known::Sealed(segment) if segment.is_sealed());
        let all = sealer::MOST + 1;
        assert_eq!((keeper.known.len(), keeper.known.values().filter(|k| sealed(k)).count()), (all, all));
    });
}
