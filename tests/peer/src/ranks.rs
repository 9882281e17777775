//! Sides of several ranks, each rank an instance of a plugin. All ranks write to all ranks of the other side at once, and end in
//! order.

use host_plugin_api::RegionId;
use std::path::Path;

use host_plugin_api::*;

use crate::{Worker, hex, submission, unhex};

/// Ranks of each side.
pub const RANKS: usize = 4;
/// Bytes that a rank writes to another.
pub const SLICE: usize = 96 << 10;
/// Bytes of one write. A slice has many writes, so that the writers compete.
const PIECE: usize = 1 << 10;

/// One side: an instance for each rank. Its memory has a slice for each rank of the other side, and as many slices to send from.
pub struct Side {
    name: String,
    /// Its ranks.
    pub ranks: Vec<Worker>,
}

fn value(writer: &str, from: usize, to: usize) -> u8 {
    writer.as_bytes()[0] ^ (from * RANKS + to) as u8
}

impl Side {
    /// Opens an instance of the plugin for each rank.
    pub fn open(directory: &Path, plugin: &str, name: &str, config: &str) -> Self {
        let open =
            |rank| Worker::open(directory, plugin, &format!("{name}.{rank}"), 2 * RANKS * SLICE, config);
        Self { name: name.to_owned(), ranks: (0..RANKS).map(open).collect() }
    }

    /// Region and endpoint of each rank, as the other side needs them.
    pub fn endpoints(&self) -> String {
        let of = |rank: &Worker| format!("{}:{}", rank.region.0, hex(&rank.backend.endpoint().unwrap()));
        self.ranks.iter().map(of).collect::<Vec<_>>().join(" ")
    }

    /// Has every rank write its slice of every rank of the other side.
    pub fn write_all(&self, endpoints: &str) {
        for (from, rank) in self.ranks.iter().enumerate() {
            for (to, other) in endpoints.split(' ').enumerate() {
                let (region, endpoint) = other.split_once(':').unwrap();
                let peer = rank.backend.connect(&format!("other.{to}"), &unhex(endpoint)).unwrap();
                let source = (RANKS + to) * SLICE;
                rank.bytes_mut()[source..source + SLICE].fill(value(&self.name, from, to));
                let write = |at: usize| Write {
                    source_region: rank.region,
                    target_region: RegionId(region.parse().unwrap()),
                    source_offset: (source + at) as u64,
                    // Backwards, so that the plugin joins no two writes.
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
    pub fn settle(&self, other: &str) {
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

    /// Ends all ranks.
    pub fn end(self) {
        for rank in &self.ranks {
            rank.backend.shutdown(60_000).unwrap();
        }
    }
}

/// A side in the other process, driven by lines.
pub(crate) fn serve(directory: &Path, plugin: &str, name: &str, config: &str) {
    let side = Side::open(directory, plugin, name, config);
    println!("@ {}", side.endpoints());
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        match line.split_once(' ') {
            Some(("write", endpoints)) => {
                side.write_all(endpoints);
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
