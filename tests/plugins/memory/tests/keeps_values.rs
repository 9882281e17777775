//! Tests one value in and out. `host plugins test` tests much more. Add your own tests here.

#![allow(clippy::unwrap_used)]

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::{
    Address, Key, Memory, MemoryKind, Opening, StorageTier, Tag, TierCompletion, TierPage,
};
use host_plugin_memory::open;

/// Polls for the completion of a batch of one page.
fn ended(tier: &dyn StorageTier) -> TierCompletion {
    let mut done = [TierCompletion::default()];
    // A tier that works in the background is polled until it returns 1.
    assert_eq!(tier.poll(&mut done), 1);
    done[0]
}

#[test]
fn what_was_put_comes_back_and_what_was_deleted_does_not() {
    let tier = open(&Opening { name: "test".into(), config: String::new() }).unwrap();
    let mut bytes = *b"a value.........";
    let memory = Memory {
        address: Address::of(bytes.as_mut_ptr()),
        length: bytes.len() as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 0,
        fd_offset: 0,
    };
    let region = tier.register(&memory).unwrap();
    let key = Key([7; 32]);
    let page = |offset| TierPage { key, region, length: 7, offset };

    assert_eq!(tier.put(Tag(1), &[page(0)]), 0);
    assert_eq!(ended(&tier).status, STORED);
    assert_eq!(tier.get(Tag(2), &[page(8)]), 0);
    assert_eq!(ended(&tier).status, FOUND);
    assert_eq!(tier.delete(Tag(3), &[key]), 0);
    assert_eq!(ended(&tier).status, FOUND);
    assert_eq!(tier.exists(Tag(4), &[key]), 0);
    assert_eq!(ended(&tier).status, MISSING);
    tier.shutdown(1000).unwrap();
    assert_eq!(&bytes[8..15], b"a value");
}
