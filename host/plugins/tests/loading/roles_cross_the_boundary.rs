//! The storage and allocator roles through loaded files. The conformance kit checks what they do in detail.

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
        address: Address::of(memory.as_mut_ptr()),
        length: 8192,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 0,
        fd_offset: 0,
    });
    let page = |key: u8, offset| TierPage {
        key: Key([key; 32]),
        region: *region.as_ref().unwrap(),
        length: 1000,
        offset,
    };
    let mut done = [TierCompletion::default(); 8];
    assert_eq!(tier.put(Tag(1), &[page(1, 0), page(2, 1000)]), 0);
    assert_eq!(tier.poll(&mut done), 2);
    assert!(done[..2].iter().all(|d| (d.tag, d.status) == (Tag(1), STORED)));
    assert_eq!(tier.get(Tag(2), &[page(2, 5000), page(3, 7000)]), 0);
    assert_eq!(tier.poll(&mut done), 2);
    assert_eq!((done[0].page, done[0].status, done[1].page, done[1].status), (0, FOUND, 1, MISSING));
    assert_eq!(memory[5000..6000], memory[1000..2000]);
    let mut keys = [Key::default(); 1];
    assert_eq!(tier.scan(0, &mut keys).unwrap().keys, 1);
    assert_eq!(tier.usage().unwrap().values, 2);
    tier.shutdown(60_000).unwrap();
    assert_eq!(tier.poll(&mut done), ErrorCode::CLOSED.0);
}

#[test]
fn an_allocator_declares_its_components_and_hands_out_pages() {
    let directory = plugin_files::directory(&["plain"]);
    let catalog = Catalog::scan([directory.path()]);
    let full = LayerGroup { kind: LayerKind::FULL, layers: 2, window: 0, parts: 1 };
    let window = LayerGroup { kind: LayerKind::WINDOW, layers: 4, window: 20, parts: 2 };
    let opening = PoolOpening {
        name: "test".into(),
        config: String::new(),
        page_tokens: 16,
        pages: 10,
        groups: vec![full, window],
    };
    let allocator = open_allocator(catalog.find("plain").unwrap(), &opening).unwrap();
    let mut components = [Component::default(); 3];
    assert_eq!(allocator.components(&mut components[..1]), ErrorCode::INVALID_ARGUMENT.0);
    assert_eq!(allocator.components(&mut components), 2);
    let [full, window, _] = components;
    assert_eq!((full.retains, full.pages), (Retains::ALL, 10));
    assert_eq!((window.retains, window.tokens, window.pages), (Retains::NEWEST, 20, 5));
    let mut pages = [PoolPage::default(); 8];
    assert_eq!(allocator.alloc(window.id, &mut pages), 0);
    assert_eq!(allocator.alloc(full.id, &mut [PoolPage::default(); 3]), ErrorCode::WOULD_BLOCK.0);
    assert_eq!(allocator.free(window.id, &[pages[0], pages[0]]), ErrorCode::INVALID_ARGUMENT.0);
    assert_eq!(allocator.free(window.id, &pages[..7]), 0);
    assert_eq!(allocator.free(full.id, &pages[7..]), ErrorCode::INVALID_ARGUMENT.0);
}

#[test]
fn a_role_that_a_plugin_does_not_play_is_refused_by_name() {
    let directory = plugin_files::directory(&["memory"]);
    let catalog = Catalog::scan([directory.path()]);
    let error = open_transfer(catalog.find("memory").unwrap(), &opening()).err().unwrap();
    assert_eq!(error.to_string(), "plugin \"memory\" has no transfer role, only: tier");
}

/// Golden files of API 0.2.0, the first version that is kept: one plugin in Rust, one in C.
#[test]
#[cfg(target_arch = "x86_64")]
fn plugins_built_from_the_first_kept_api_load_today() {
    for (file, role) in [("null-0.2.0-x86_64.so", "transfer"), ("c-allocator-0.2.0-x86_64.so", "allocator")] {
        let golden = format!("{}/../../tests/golden/{file}", env!("CARGO_MANIFEST_DIR"));
        let directory = tempfile::tempdir().unwrap();
        std::fs::copy(golden, directory.path().join("golden.so")).unwrap();
        let catalog = Catalog::scan([directory.path()]);
        let entry = catalog.entries().first().unwrap();
        assert_eq!(entry.manifest.api.version.to_string(), "0.2.0");
        let root = host_plugins::load_root(entry).unwrap();
        assert_eq!(root.roles(), [role]);
        let error = root.open_tier(&opening()).err().unwrap();
        assert_eq!(error.to_string(), "UNSUPPORTED: the plugin has no tier role");
    }
}

/// A file of API 0.1 is refused before any of its code runs. The error names both versions.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_plugin_built_from_an_api_that_is_not_kept_is_refused_with_both_versions() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/null-0.1.0-x86_64.so");
    let directory = tempfile::tempdir().unwrap();
    std::fs::copy(golden, directory.path().join("null.so")).unwrap();
    let catalog = Catalog::scan([directory.path()]);
    let error = catalog.find("null").unwrap_err().to_string();
    assert!(error.contains("0.1.0") && error.contains(host_plugin_api::VERSION), "{error}");
}
