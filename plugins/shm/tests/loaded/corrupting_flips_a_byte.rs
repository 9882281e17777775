//! The fixture that corrupts does exactly that: one byte of the configured write, and nothing else.

use host_plugin_api::*;
use host_test_peer::*;
use host_tests::plugin_files;

#[test]
fn exactly_the_configured_writes_differ_in_one_byte_and_the_source_is_intact() {
    const PAGE: usize = 4096;
    let directory = plugin_files::directory(&["corrupting", "shm"]);
    let (name, config) = ("corrupting", "flip_write = 3\nflips = 2");
    let sender = Worker::open(directory.path(), name, "prefill", 8 * PAGE, config);
    let receiver = Worker::open(directory.path(), "shm", "decode", 8 * PAGE, crate::PATIENT);
    let peer = sender.backend.connect("decode", &receiver.backend.endpoint().unwrap()).unwrap();
    for (i, byte) in sender.bytes_mut().iter_mut().enumerate() {
        *byte = (i * 31 % 251) as u8;
    }
    let before = sender.bytes().to_vec();
    let page = |i: usize| Write {
        source_region: sender.region,
        target_region: receiver.region,
        source_offset: (i * PAGE) as u64,
        target_offset: (i * PAGE) as u64,
        length: PAGE as u32,
        target_generation: 1,
    };
    // The count goes on through all submissions.
    assert_eq!(sender.backend.submit(&submission(peer, 1, b"x"), &[page(0), page(1), page(2)]), 0);
    assert_eq!(sender.backend.submit(&submission(peer, 2, b"x"), &[page(3), page(4), page(5)]), 0);
    assert_eq!(sender.backend.submit(&submission(peer, 3, b"x"), &[page(6), page(7)]), 0);
    for _ in 0..3 {
        assert_eq!(receiver.notification().kind, NotificationKind::ARRIVED);
        assert_eq!(sender.completion().status, 0);
    }
    let differing: Vec<usize> = (0..8 * PAGE).filter(|i| receiver.bytes()[*i] != before[*i]).collect();
    assert_eq!(differing, [2 * PAGE + PAGE / 2, 3 * PAGE + PAGE / 2]);
    assert_eq!(sender.bytes(), before);
}
