//! Values can be read back, also after the database was opened again. `host plugins test` checks much more.

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::{Address, Key, Memory, MemoryKind, Opening, StorageTier, Tag, TierCompletion, TierPage};

use host_sqlite_tier::open;

fn opening(folder: &std::path::Path) -> Opening {
    Opening { name: "test".into(), config: format!("dir = {:?}\nsize_limit_mib = 1", folder.join("pages")) }
}

fn memory(bytes: &mut [u8]) -> Memory {
    Memory {
        address: Address::of(bytes.as_mut_ptr()),
        length: bytes.len() as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 0,
        fd_offset: 0,
    }
}

/// Waits for a batch of one page and returns its status.
fn ended(tier: &dyn StorageTier) -> i32 {
    let mut done = [TierCompletion::default()];
    while tier.poll(&mut done) == 0 {
        std::thread::yield_now();
    }
    done[0].status
}

#[test]
fn a_value_is_there_after_the_database_was_opened_anew() {
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = *b"a value.........";
    let key = Key([7; 32]);
    {
        let tier = open(&opening(folder.path())).unwrap();
        let region = tier.register(&memory(&mut bytes)).unwrap();
        assert_eq!(tier.put(Tag(1), &[TierPage { key, region, length: 7, offset: 0 }]), 0);
        assert_eq!(ended(&tier), STORED);
        tier.shutdown(10_000).unwrap();
    }
    let tier = open(&opening(folder.path())).unwrap();
    let region = tier.register(&memory(&mut bytes)).unwrap();
    assert_eq!(tier.get(Tag(2), &[TierPage { key, region, length: 7, offset: 8 }]), 0);
    assert_eq!(ended(&tier), FOUND);
    assert_eq!(tier.delete(Tag(3), &[key]), 0);
    assert_eq!(ended(&tier), FOUND);
    assert_eq!(tier.exists(Tag(4), &[key]), 0);
    assert_eq!(ended(&tier), MISSING);
    tier.shutdown(10_000).unwrap();
    assert_eq!(&bytes[8..15], b"a value");
}

#[test]
fn a_full_database_refuses_a_value() {
    let folder = tempfile::tempdir().unwrap();
    let tier = open(&opening(folder.path())).unwrap();
    let mut bytes = vec![1; 2 << 20];
    let region = tier.register(&memory(&mut bytes)).unwrap();
    let page = TierPage { key: Key([1; 32]), region, length: 2 << 20, offset: 0 };
    assert_eq!(tier.put(Tag(1), &[page]), 0);
    assert_eq!(ended(&tier), host_plugin_api::ErrorCode::NO_RESOURCE.0);
    tier.shutdown(10_000).unwrap();
}
