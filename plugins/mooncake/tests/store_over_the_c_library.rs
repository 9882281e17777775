//! The tier over Mooncake Store's C library: over a library with the same symbols, built here, with a listening socket for a
//! master.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use host_plugin_api::Address;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::*;
use host_plugin_mooncake::MooncakeTier;
use host_tests::wait::poll_until;

const PAGE: usize = 4096;

/// The library, built once.
fn library() -> &'static Path {
    static BUILT: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = BUILT.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libmooncake_store.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake/store.rs");
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let built = Command::new(rustc)
            .args(["--edition", "2024", "--crate-type", "cdylib", "-C", "panic=abort", "-o"])
            .args([&path, &source])
            .output()
            .unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        (folder, path)
    });
    path
}

/// Starts a listener that answers a probe as a master does. Returns its address.
fn master() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    address
}

fn config(address: SocketAddr, library: &Path, more: &str) -> String {
    format!(
        "master_server_address = \"{address}\"\nstore_library = {:?}\nglobal_segment_size = \"64mb\"\n\
         master_timeout_ms = 60000\nstore_deadline_ms = 60000\n{more}",
        library.display().to_string()
    )
}

fn open(config: String) -> Result<MooncakeTier> {
    host_plugin_mooncake::open_storage(&Opening { name: "test".into(), config })
}

fn region(tier: &MooncakeTier, memory: &[u8]) -> RegionId {
    let offered = Memory {
        address: Address::of(memory.as_ptr()),
        length: memory.len() as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 1,
        fd_offset: 0,
    };
    tier.register(&offered).unwrap()
}

fn key(page: usize) -> Key {
    let mut key = [0xC5; 32];
    key[..8].copy_from_slice(&(page as u64).to_le_bytes());
    Key(key)
}

fn pages(region: RegionId, pages: std::ops::Range<usize>, length: usize) -> Vec<TierPage> {
    let page =
        |page| TierPage { key: key(page), region, length: length as u32, offset: (page * PAGE) as u64 };
    pages.map(page).collect()
}

fn finish(tier: &MooncakeTier, code: i32, count: usize) -> Vec<i32> {
    assert_eq!(code, 0);
    let mut ends = vec![None; count];
    poll_until("the pages of a batch to end", || {
        let mut done = [TierCompletion::default(); 16];
        let taken = tier.poll(&mut done) as usize;
        for end in &done[..taken] {
            assert!(ends[end.page as usize].replace(end.status).is_none(), "{end:?} came twice");
        }
        if ends.iter().all(Option::is_some) { Ok(()) } else { Err(format!("{ends:?}")) }
    });
    ends.into_iter().flatten().collect()
}

#[test]
fn values_go_through_the_library_and_are_found_by_another_instance() {
    let master = master();
    let tier = open(config(master, library(), "")).unwrap();
    let count = 1024;
    let mut memory: Vec<u8> = (0..count * PAGE).map(|at| (at / 5 + at / PAGE) as u8).collect();
    let own = region(&tier, &memory);
    let all = pages(own, 0..count, PAGE);
    assert!(finish(&tier, tier.put(Tag(1), &all), count).iter().all(|status| *status == STORED));
    let other = open(config(master, library(), "")).unwrap();
    let right = std::mem::take(&mut memory);
    let memory = vec![0; count * PAGE];
    let theirs = region(&other, &memory);
    let keys: Vec<Key> = (0..4).chain([count]).map(key).collect();
    assert_eq!(finish(&other, other.exists(Tag(1), &keys), 5), [FOUND, FOUND, FOUND, FOUND, MISSING]);
    let all = pages(theirs, 0..count, PAGE);
    assert!(finish(&other, other.get(Tag(2), &all), count).iter().all(|status| *status == FOUND));
    assert!(memory == right);
    // A value that is longer than the get is not found, and nothing is written. A shorter value is an error.
    let short = finish(&other, other.get(Tag(3), &pages(theirs, 0..1, PAGE - 1)), 1);
    assert_eq!(short, [MISSING]);
    assert_eq!(finish(&other, other.delete(Tag(4), &keys), 5), [FOUND, FOUND, FOUND, FOUND, MISSING]);
    assert_eq!(finish(&tier, tier.exists(Tag(5), &keys), 5), [MISSING; 5]);
    tier.deregister(own).unwrap();
    assert_eq!(tier.deregister(own).unwrap_err().code, ErrorCode::INVALID_ARGUMENT);
    for tier in [tier, other] {
        tier.shutdown(60_000).unwrap();
    }
}

#[test]
fn a_library_that_cannot_be_used_is_an_error_with_its_path_and_nothing_else_is_tried() {
    let master = master();
    for (path, says) in
        [("/no/such/libmooncake_store.so", "no such file"), ("/proc/self/exe", "/proc/self/exe")]
    {
        let error = open(config(master, Path::new(path), "")).err().unwrap();
        let lower = error.message.to_lowercase();
        assert!(
            error.code == ErrorCode::UNSUPPORTED && lower.contains(says) && lower.contains(path),
            "{error}"
        );
        assert!(!error.message.contains("    python"), "{error}");
    }
    let error = open(config(master, library(), "device_name = \"no-such-device\"\n")).err().unwrap();
    assert!(
        error.code == ErrorCode::IO && error.message.contains("mooncake_store_setup answered -1"),
        "{error}"
    );
}
