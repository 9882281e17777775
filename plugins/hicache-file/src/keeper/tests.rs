//! What the keeper does when the system refuses.

use super::*;
use crate::config::Config;
use crate::format::Value;
use crate::writer::NoRoom;
use host_plugin_api::{ErrorCode, Key};

fn keeper(store: &Store) -> Keeper<'_> {
    let now = Instant::now();
    Keeper {
        store,
        known: HashMap::new(),
        listed: None,
        refreshed: now,
        touched: now,
        awaited: None,
        shown: [0; 3],
        trouble: None,
        started: now,
    }
}

#[test]
fn a_directory_that_cannot_be_looked_at_is_not_said_to_be_gone_and_either_is_said_once() {
    let above = tempfile::tempdir().unwrap();
    let (dir, away) = (above.path().join("pages"), above.path().join("away"));
    let text = format!("dir = {dir:?}\nfree_floor_mib = 0\nsegment_mib = 1\nsize_limit_mib = 8");
    let store = Store::new(Config::parse(&text).unwrap(), 0).unwrap();
    let mut keeper = keeper(&store);
    let said = |keeper: &mut Keeper<'_>| {
        keeper.refresh(false);
        let said = keeper.trouble.clone().unwrap();
        assert!(matches!(keeper.make(), Err((ErrorCode::IO, _))));
        assert_eq!(keeper.trouble.as_ref(), Some(&said), "another text would be another line in the log");
        said
    };
    std::fs::rename(&dir, &away).unwrap();
    assert!(said(&mut keeper).contains("is gone or was replaced"));
    // Refused for whoever asks, as a missing right is for all but root.
    std::os::unix::fs::symlink(&dir, &dir).unwrap();
    let looped = said(&mut keeper);
    assert!(looped.contains("cannot be looked at") && !looped.contains("gone"), "{looped}");
    std::fs::remove_file(&dir).unwrap();
    std::fs::rename(&away, &dir).unwrap();
    assert!(keeper.make().is_ok(), "the same directory is used again");
    assert_eq!(keeper.trouble, None);
}

#[test]
fn a_segment_that_could_not_be_sealed_is_sealed_later_and_what_was_deleted_meanwhile_stays_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!("dir = {:?}\nfree_floor_mib = 0\nsegment_mib = 1\nsize_limit_mib = 8", dir.path());
    let store = Store::new(Config::parse(&text).unwrap(), 0).unwrap();
    let mut keeper = keeper(&store);
    // A writer whose data cannot be cut: its descriptor only reads.
    let lock = store.directory.lock().unwrap();
    let name = Name { birth: 1, random: 2 };
    let (index, _data) = store.directory.make(name, 1 << 20, &lock).unwrap();
    drop(lock);
    let data = Arc::new(store.directory.data(name).unwrap());
    let segment = locked(&store.index).add(|id| Segment::new(id, name, Some(data.clone())));
    store.writer.supply(Ok(OpenSegment::new(segment.clone(), data, index, 1 << 20)));
    let value = |n: u8| Value { key: Key([n; 32]), checksum: 0, block: n.into(), length: 4096 };
    let (Ok(room), _) = store.writer.room(3 * 4096) else { panic!("there is room") };
    room.open.publish(&[value(0), value(1), value(2)], Fsync::Never).unwrap();
    (0..3).for_each(|n| assert!(locked(&store.index).insert(segment.id, n.into(), value(n))));
    room.open.ended();
    drop(room);
    store.delete(&value(0).key).unwrap();
    store.writer.retire();
    assert!(keeper.seal());
    assert!(!segment.is_sealed() && store.writer.open_segment(segment.id).is_none());
    store.delete(&value(1).key).unwrap();
    let records = || read_records(&store.directory.index(name, false).unwrap(), name, 0, 1 << 20).unwrap();
    assert!(!records().sealed && records().values.len() == 2);
    keeper.refresh(false);
    assert!(segment.is_sealed() && records().sealed);
    assert_eq!(records().values.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [2]);
    let found = |n: u8| locked(&store.index).find(&value(n).key).is_some();
    assert!(!found(0) && !found(1) && found(2));
}

#[test]
fn what_is_full_and_not_sealed_yet_is_sealed_and_evicted_before_anything_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    // Room for seven segments, with what their indices may grow to.
    let text = format!("dir = {:?}\nfree_floor_mib = 0\nsegment_mib = 1\nsize_limit_mib = 8", dir.path());
    let store = Store::new(Config::parse(&text).unwrap(), 0).unwrap();
    let mut keeper = keeper(&store);
    for n in 0..7 {
        assert!(matches!(store.writer.room(1 << 20), (Err(NoRoom::Wait), true)));
        store.writer.supply(keeper.make());
        let (Ok(room), _) = store.writer.room(1 << 20) else { panic!("there is room") };
        let value = Value { key: Key([n; 32]), checksum: 0, block: 0, length: 1 << 20 };
        room.open.publish(&[value], Fsync::Never).unwrap();
        room.open.ended();
    }
    // All are full, and nobody had time to seal them.
    assert!(matches!(store.writer.room(1 << 20), (Err(NoRoom::Wait), true)));
    assert!(store.writer.has_full());
    let made = keeper.make();
    assert!(made.is_ok(), "{:?}", keeper.trouble);
    assert_eq!(keeper.trouble, None, "nothing is said to be refused");
    store.writer.supply(made);
    // What is still written to cannot go: that is waited for, and not for long.
    let mut busy = Vec::new();
    let refused = loop {
        match store.writer.room(1 << 20) {
            (Ok(room), _) => busy.push(room),
            (Err(NoRoom::Wait), _) => store.writer.supply(keeper.make()),
            (Err(NoRoom::Refused(code)), _) => break code,
        }
    };
    assert_eq!((refused, busy.len()), (ErrorCode::NO_RESOURCE, 7));
    assert!(keeper.trouble.as_ref().is_some_and(|text| text.contains("nothing is left to evict")));
}
