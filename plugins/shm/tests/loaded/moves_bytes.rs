//! Two processes move bytes through the loaded shared-memory plugin.

use host_plugin_api::RegionId;
use host_plugin_api::*;
use host_test_peer::*;
use host_tests::plugin_files;

const BYTES: usize = 8 << 20;

/// A seeded generator (splitmix64), the seed printed.
struct Random(u64);

impl Random {
    fn new() -> Self {
        let seed = std::env::var("SEED")
            .ok()
            .and_then(|s| s.parse().ok())
            .unwrap_or_else(|| std::time::UNIX_EPOCH.elapsed().map_or(1, |t| t.as_nanos() as u64));
        println!("seed {seed}, set SEED to repeat");
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

#[test]
fn random_writes_arrive_whole_and_before_their_notification() {
    random_writes_arrive(Place::Host, Place::Host, 1);
}

#[test]
fn random_writes_between_devices_arrive_whole_and_before_their_notification() {
    crate::between_devices::load_stand_in();
    for (from, to) in crate::between_devices::PLACES {
        // A kernel copies writes of whole words, the driver copies the others.
        for unit in [1, 16] {
            random_writes_arrive(from, to, unit);
        }
    }
}

/// Offsets and lengths are multiples of `unit`.
fn random_writes_arrive(from: Place, to: Place, unit: usize) {
    println!("{from:?} to {to:?}, units of {unit}");
    let mut random = Random::new();
    let directory = plugin_files::directory(&["shm"]);
    let config = format!("{}copy_threads = 2", crate::PATIENT);
    let sender = Worker::open_on(from, directory.path(), "shm", "prefill", BYTES, &config);
    let mut receiver = Remote::start_on(to, directory.path(), "shm", "decode", BYTES, (crate::PATIENT, &[]));
    let target: u32 = receiver.ask("region").parse().unwrap();
    let peer = sender.backend.connect("decode", &receiver.endpoint()).unwrap();
    let mut expected = vec![0u8; BYTES];
    for round in 1..=20u64 {
        sender.bytes_mut().iter_mut().for_each(|byte| *byte = random.next() as u8);
        // Writes of one round do not overlap in the target: each has its own stripe.
        let count = 1 + random.below(16);
        let stripe = BYTES / count;
        let mut writes = Vec::new();
        for i in 0..count {
            let below = |random: &mut Random, bound: usize| random.below(bound / unit) * unit;
            let stripe = stripe / unit * unit;
            let length = unit + below(&mut random, stripe);
            let from = below(&mut random, BYTES - length + unit);
            let to = i * stripe + below(&mut random, stripe - length + unit);
            expected[to..to + length].copy_from_slice(&sender.bytes()[from..from + length]);
            writes.push(Write {
                source_region: sender.region,
                target_region: RegionId(target),
                source_offset: from as u64,
                target_offset: to as u64,
                length: length as u32,
                target_generation: 1,
            });
        }
        assert_eq!(sender.backend.submit(&submission(peer, round, &round.to_le_bytes()), &writes), 0);
        // The receiver tells this before the sender looks at its own completion.
        assert_eq!(receiver.ask("notification"), format!("arrived prefill {}", hex(&round.to_le_bytes())));
        assert_eq!(receiver.ask(&format!("hash 0 {BYTES}")), hash(&expected).to_string(), "round {round}");
        let completion = sender.completion();
        let bytes = writes.iter().map(|w| u64::from(w.length)).sum();
        assert_eq!(completion, Completion { tag: Tag(round), bytes, status: 0, reserved: 0 });
        assert_eq!(sender.backend.settled(Tag(round)), 1);
    }
    sender.backend.shutdown(60_000).unwrap();
    assert_eq!(sender.backend.poll(&mut []), ErrorCode::CLOSED.0);
    assert_eq!(receiver.ask("notification"), "lost prefill");
}
