//! Several instances of the NIXL plugin in each of two processes, one for each rank: all write to all of the other side at
//! once, and end in order.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "plugin_support/fixture.rs"]
mod fixture;
#[path = "plugin_support/nixl.rs"]
mod nixl;
#[path = "plugin_support/peer.rs"]
mod peer;
#[path = "plugin_support/skip.rs"]
mod skip;

use std::path::Path;

use host_plugin_api::*;
use peer::*;

const RANKS: usize = 4;
const SLICE: usize = 96 << 10;
/// Many pieces, so that the writers meet.
const PIECE: usize = 1 << 10;

/// One side: an instance for each rank, whose memory has a slice for each rank of the other side, and as many to send from.
struct Side {
    name: String,
    ranks: Vec<Worker>,
}

fn value(writer: &str, from: usize, to: usize) -> u8 {
    writer.as_bytes()[0] ^ (from * RANKS + to) as u8
}

impl Side {
    fn open(directory: &Path, name: &str, config: &str) -> Self {
        let open =
            |rank| Worker::open(directory, "nixl", &format!("{name}.{rank}"), 2 * RANKS * SLICE, config);
        Self { name: name.to_owned(), ranks: (0..RANKS).map(open).collect() }
    }

    /// What the other side needs: for each rank its region and its endpoint.
    fn card(&self) -> String {
        let of = |rank: &Worker| format!("{}:{}", rank.region.0, hex(&rank.backend.endpoint().unwrap()));
        self.ranks.iter().map(of).collect::<Vec<_>>().join(" ")
    }

    /// Every rank writes its slice of every rank of the other side.
    fn write_all(&self, card: &str) {
        for (from, rank) in self.ranks.iter().enumerate() {
            for (to, other) in card.split(' ').enumerate() {
                let (region, endpoint) = other.split_once(':').unwrap();
                let peer = rank.backend.connect(&format!("other.{to}"), &unhex(endpoint)).unwrap();
                let source = (RANKS + to) * SLICE;
                rank.bytes_mut()[source..source + SLICE].fill(value(&self.name, from, to));
                let write = |at: usize| Write {
                    source_region: rank.region.0,
                    target_region: region.parse().unwrap(),
                    source_offset: (source + at) as u64,
                    // Backwards, so that no two of them are joined.
                    target_offset: (from * SLICE + SLICE - PIECE - at) as u64,
                    length: PIECE as u32,
                    target_generation: 1,
                };
                let writes: Vec<Write> = (0..SLICE).step_by(PIECE).map(write).collect();
                let text = [from as u8, to as u8];
                assert_eq!(rank.backend.submit(&submission(peer, to as u64, &text), &writes), 0);
            }
        }
    }

    /// Waits until everything was sent and received, and compares.
    fn settle(&self, other: &str) {
        for (to, rank) in self.ranks.iter().enumerate() {
            for _ in 0..RANKS {
                assert_eq!(rank.completion().status, 0);
                let seen = rank.notification();
                assert_eq!((seen.kind, seen.length), (NotificationKind::ARRIVED, 2));
                let from = usize::from(seen.payload[0]);
                assert_eq!(usize::from(seen.payload[1]), to);
                let name = &seen.peer_name[..seen.peer_name_length as usize];
                assert_eq!(name, format!("{other}.{from}").as_bytes());
                let slice = &rank.bytes()[from * SLICE..][..SLICE];
                assert!(slice.iter().all(|byte| *byte == value(other, from, to)), "{from} to {to}");
            }
        }
    }

    fn end(self) {
        for rank in &self.ranks {
            rank.backend.shutdown(10_000).unwrap();
        }
    }
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

#[test]
#[ignore = "the other process of the test below"]
fn child() {
    let Ok(what) = std::env::var("CHILD") else { return };
    let fields: Vec<&str> = what.splitn(5, '\n').collect();
    let side = Side::open(Path::new(fields[0]), fields[2], fields[4]);
    println!("@ {}", side.card());
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        match line.split_once(' ') {
            Some(("write", card)) => {
                side.write_all(card);
                println!("@ written");
            }
            Some(("settle", other)) => {
                side.settle(other);
                println!("@ settled");
            }
            _ => break,
        }
    }
    side.end();
    println!("@ ended");
}

#[test]
fn four_ranks_on_either_side_write_to_each_other_all_at_once_and_end_in_order() {
    let Some(config) = nixl::config() else { return };
    let directory = fixture::directory(&["nixl"]);
    for threads in ["none", "further", "all"] {
        let config = format!("{config}progress_threads = {threads:?}\n");
        let ours = Side::open(directory.path(), "prefill", &config);
        let mut theirs = Remote::start(directory.path(), "nixl", "decode", 0, &config);
        let card = theirs.answer();
        theirs.say(&format!("write {}", ours.card()));
        ours.write_all(&card);
        assert_eq!(theirs.answer(), "written");
        ours.settle("decode");
        assert_eq!(theirs.ask("settle prefill"), "settled");
        // The other side goes while ours is connected to it, and ours after it.
        assert_eq!(theirs.ask("end"), "ended");
        assert!(theirs.process.wait().unwrap().success());
        assert_eq!(ours.ranks[0].notification().kind, NotificationKind::PEER_LOST);
        ours.end();
    }
}

#[test]
fn memory_of_a_device_is_refused_with_what_is_missing() {
    let Some(config) = nixl::config() else { return };
    let directory = fixture::directory(&["nixl"]);
    let refused = |config: &str| {
        let worker = Worker::open(directory.path(), "nixl", "decode", SLICE, config);
        let device = Memory {
            address: worker.memory.address().as_ptr() as u64,
            length: SLICE as u64,
            kind: MemoryKind::VRAM,
            device: 3,
            fd: -1,
            generation: 1,
            fd_offset: 0,
        };
        let error = worker.backend.register(&device).unwrap_err();
        assert_eq!(error.code, ErrorCode::UNSUPPORTED, "{error}");
        error.message
    };
    // By default a peer on the same machine would write past this process.
    let said = refused(&config);
    assert!(said.contains("device 3") && said.contains("UCX_TLS=^sm,cuda_ipc"), "{said}");
    let said = refused(&format!("{config}transports = \"tcp\"\n"));
    assert!(said.contains("device 3") && said.contains("CUDA"), "{said}");
}
