//! The storage and allocator roles through loaded files; what they do in detail is the conformance kit's to check.

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::*;
use host_plugins::{Catalog, open_allocator, open_tier, open_transfer};
use host_tests::plugin_files;

fn opening() -> Opening {
    Opening { name: "test".into(), config: String::new() }
}

#[test]
fn a_tier_gives_back_what_was_put_and_says_what_is_missing() {
    let directory = plugin_files::directory(&["memory"]);
    let catalog = Catalog::scan([directory.path()]);
    let tier = open_tier(catalog.find("memory").unwrap(), &opening()).unwrap();
    let mut memory: Vec<u8> = (0..8192u32).map(|i| (i % 251) as u8).collect();
    let region = tier.register(&Memory {
        address: memory.as_mut_ptr() as u64,
        length: 8192,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 0,
        fd_offset: 0,
    });
    let page = |key: u8, offset| TierPage {
        key: Key([key; 32]),
        region: region.as_ref().unwrap().0,
        length: 1000,
        offset,
    };
    let mut done = [TierCompletion::default(); 8];
    assert_eq!(tier.put(Tag(1), &[page(1, 0), page(2, 1000)]), 0);
    assert_eq!(tier.poll(&mut done), 2);
    assert!(done[..2].iter().all(|d| (d.tag, d.status) == (1, STORED)));
    assert_eq!(tier.get(Tag(2), &[page(2, 5000), page(3, 7000)]), 0);
    assert_eq!(tier.poll(&mut done), 2);
    assert_eq!((done[0].page, done[0].status, done[1].page, done[1].status), (0, FOUND, 1, MISSING));
    assert_eq!(memory[5000..6000], memory[1000..2000]);
    let mut keys = [Key::default(); 1];
    assert_eq!(tier.scan(0, &mut keys).unwrap().keys, 1);
    assert_eq!(tier.usage().unwrap().values, 2);
    tier.shutdown(1000).unwrap();
    assert_eq!(tier.poll(&mut done), ErrorCode::CLOSED.0);
}

#[test]
fn an_allocator_grants_all_components_at_once_or_nothing() {
    let directory = plugin_files::directory(&["plain"]);
    let catalog = Catalog::scan([directory.path()]);
    let pool = |component, pages, window| ComponentPool { component, pages, window, reserved: 0 };
    let opening = PoolOpening {
        name: "test".into(),
        config: String::new(),
        page_tokens: 16,
        components: vec![pool(Component::FULL, 10, 0), pool(Component::WINDOW, 4, 20)],
    };
    let allocator = open_allocator(catalog.find("plain").unwrap(), &opening).unwrap();
    let growth = [Growth { held: 0, target: 100 }];
    let (mut grants, mut pages) = ([Grant::default(); 2], [PoolPage::default(); 32]);
    assert_eq!(allocator.extend(&growth, &mut grants, &mut pages), ErrorCode::WOULD_BLOCK.0);
    assert_eq!(allocator.extend_tail(&growth, &mut grants, &mut pages), 9);
    assert_eq!(grants, [Grant { first: 0, pages: 7 }, Grant { first: 5, pages: 2 }]);
    let mut budgets = [Budget::default(); 2];
    assert_eq!(allocator.budgets(&mut budgets), 2);
    assert_eq!((budgets[0].free, budgets[1].free), (3, 2));
    assert_eq!(allocator.free(Component::FULL, &[pages[0], pages[0]]), ErrorCode::INVALID_ARGUMENT.0);
    assert_eq!(allocator.free(Component::FULL, &pages[..7]), 0);
}

#[test]
fn a_role_that_a_plugin_does_not_play_is_refused_by_name() {
    let directory = plugin_files::directory(&["memory"]);
    let catalog = Catalog::scan([directory.path()]);
    let error = open_transfer(catalog.find("memory").unwrap(), &opening()).err().unwrap();
    assert_eq!(error.to_string(), "plugin \"memory\" has no transfer role, only: tier");
}

/// The golden file was built from API 0.1.0, which had the transfer role only.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_plugin_built_from_the_first_api_loads_today() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/null-0.1.0-x86_64.so");
    let directory = tempfile::tempdir().unwrap();
    std::fs::copy(golden, directory.path().join("null.so")).unwrap();
    let catalog = Catalog::scan([directory.path()]);
    let entry = catalog.find("null").unwrap();
    assert_eq!(entry.manifest.api.version.to_string(), "0.1.0");
    let backend = open_transfer(entry, &opening()).unwrap();
    assert_eq!(backend.settled(Tag(1)), 1);
    let root = host_plugins::load_root(entry).unwrap();
    assert_eq!(root.roles(), ["transfer"]);
    let error = root.open_tier(&opening()).err().unwrap();
    assert_eq!(error.to_string(), "UNSUPPORTED: the plugin has no tier role");
}
