//! `keep_little` makes a process return what its threads have freed. The setting applies to the whole process, so this test has one
//! of its own.
#![cfg(target_env = "gnu")]
#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

use std::sync::mpsc::channel;
use std::thread;

use host_memory::heap::keep_little;

/// Threads that allocate, each with an area of its own.
const THREADS: usize = 4;
/// Bytes that each thread frees, first in one allocation, then in many small ones.
const FREED: usize = 16 << 20;

/// Resident memory of this process that no file backs, in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() << 10
}

#[test]
fn what_threads_free_goes_back_to_the_system() {
    keep_little();
    let before = resident();
    let (freed, all_freed) = channel();
    let threads: Vec<_> = (0..THREADS)
        .map(|_| {
            let freed = freed.clone();
            let (go, gone) = channel::<()>();
            let thread = thread::spawn(move || {
                // By default glibc keeps more freed memory after it has freed a large allocation.
                drop(vec![1_u8; FREED]);
                let small: Vec<Box<[u8; 1000]>> = (0..FREED / 1000).map(|_| Box::new([1; 1000])).collect();
                drop(small);
                freed.send(()).unwrap();
                // The thread stays alive while memory is measured, so its area remains.
                gone.recv().unwrap_err();
            });
            (thread, go)
        })
        .collect();
    (0..THREADS).for_each(|_| all_freed.recv().unwrap());
    let kept = resident().saturating_sub(before);
    assert!(kept < FREED, "{kept} bytes of {} are kept", THREADS * FREED);
    for (thread, go) in threads {
        drop(go);
        thread.join().unwrap();
    }
}
