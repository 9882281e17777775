//! Files whose headers name more bytes than a plugin has: checking a small file on disk must not need much memory.

use host_plugins::{Policy, needed_libraries, preflight};
use host_tests::elf::{LOAD, NOTE, Segment, dynamic, note, object};

/// Bytes of a segment of zeros, which read as notes of 12 bytes without name and content.
const NOTES: u64 = 3 << 20;

/// The label and the sentence of the error for such an object.
fn refused(segments: &[Segment], content: &[(u64, &[u8])]) -> (&'static str, String) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("plugin.so");
    object(&file, segments, content);
    let error = preflight(&file, &Policy::default()).unwrap_err();
    (error.reason(), error.to_string())
}

/// The note of a manifest.
fn manifest(id: &str) -> Vec<u8> {
    let text = format!(
        "manifest_version = 1\n[plugin]\nid = \"{id}\"\nname = \"n\"\nversion = \"1.0.0\"\n[api]\nversion = \"{}\"\n\
         [build]\npanic = \"unwind\"\ntarget = \"{}\"\nrustc = \"\"\nsymbol = \"s\"\n",
        host_plugin_api::VERSION,
        host_plugin_api::note::BUILT_FOR
    );
    note(host_plugin_api::note::NAME, host_plugin_api::note::TYPE_MANIFEST, text.as_bytes())
}

#[test]
fn notes_in_the_holes_of_a_sparse_file_are_refused_before_they_are_read() {
    let load = (LOAD, 0, 4096);
    // Each segment is another range. A reader that caches ranges would keep all of them.
    let many: Vec<Segment> =
        [load].into_iter().chain((0..12).map(|n| (NOTE, 4096 + 16 * n, NOTES))).collect();
    for segments in [many, vec![load, (NOTE, 4096, 8 * NOTES)]] {
        let (reason, text) = refused(&segments, &[]);
        assert_eq!(reason, "oversized", "{text}");
        assert!(text.contains("headers and notes have more than 16777216 bytes"), "{text}");
    }
    let (reason, text) = refused(&[load, (NOTE, 4096, NOTES)], &[]);
    assert_eq!(reason, "no_note", "{text}");
}

#[test]
fn more_segments_or_manifests_than_any_plugin_has_are_refused() {
    let segments = vec![(LOAD, 0, 4096); 1025];
    let (reason, text) = refused(&segments, &[]);
    assert_eq!(
        (reason, text.contains("it has 1025 segments, 1024 are allowed")),
        ("oversized", true),
        "{text}"
    );
    assert_eq!(refused(&segments[1..], &[]).0, "no_note");

    let notes =
        |count: usize| -> Vec<u8> { (0..count).flat_map(|n| manifest(&format!("id{n:04}"))).collect() };
    let refused = |count| {
        let notes = notes(count);
        refused(&[(LOAD, 0, 4096), (NOTE, 4096, notes.len() as u64)], &[(4096, &notes)])
    };
    assert_eq!(refused(64).0, "ambiguous");
    let (reason, text) = refused(65);
    assert_eq!((reason, text.contains("more than 64 manifests")), ("oversized", true), "{text}");
}

#[test]
fn names_of_libraries_are_read_up_to_a_bound_and_at_the_end_of_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("plugin.so");
    let named = |count: u64| {
        let entries: Vec<(u64, u64)> = (0..count).map(|n| (1, n % 4)).collect();
        dynamic(&file, &entries, b"lib.so\0");
        needed_libraries(&file)
    };
    assert_eq!(named(2), ["lib.so", "ib.so"]);
    // A name may have 4096 bytes, so the reader counts each as 4096.
    assert_eq!(named(100_000), Vec::<String>::new());

    // The file ends directly after the names.
    named(1);
    std::fs::File::options().write(true).open(&file).unwrap().set_len(8192 + 32).unwrap();
    assert_eq!(needed_libraries(&file), ["lib.so"]);
}
