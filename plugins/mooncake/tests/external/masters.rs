//! Both roles of the Mooncake plugin in one process, over the real wheel and so behind one lock of Python's: a master that does
//! not answer stops no transfer.

use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;

use host_plugin_api::*;
use host_plugins::{Catalog, PluginError, open_tier};
use host_test_peer::*;
use host_tests::alone::in_a_process_of_its_own;
use host_tests::cluster::signal;
use host_tests::mooncake_pool::Pool;
use host_tests::plugin_files;

const BYTES: usize = 1 << 16;
/// Transfers have to go on, however slow the machine is.
const PATIENT: &str = "connect_timeout_ms = 60000\nfence_timeout_ms = 60000\n";

/// Two workers, and the peer through which one writes to the other.
struct Pair {
    sender: Worker,
    receiver: Worker,
    peer: PeerId,
}

impl Pair {
    fn open(directory: &Path, config: &str) -> Self {
        let open = |name| Worker::open(directory, "mooncake", name, BYTES, config);
        let (sender, receiver) = (open("prefill"), open("decode"));
        let peer = sender.backend.connect("decode", &receiver.backend.endpoint().unwrap()).unwrap();
        Self { sender, receiver, peer }
    }

    fn transfer(&self) {
        let write = Write {
            source_region: self.sender.region,
            target_region: self.receiver.region,
            length: 64,
            target_generation: 1,
            ..Write::default()
        };
        assert_eq!(self.sender.backend.submit(&submission(self.peer, 1, b"n"), &[write]), 0);
        assert_eq!(self.sender.completion().status, 0);
        assert_eq!(self.receiver.notification().kind, NotificationKind::ARRIVED);
    }
}

fn tier(directory: &Path, config: String) -> std::result::Result<Arc<dyn StorageTier>, PluginError> {
    open_tier(Catalog::scan([directory]).find("mooncake").unwrap(), &Opening { name: "tier".into(), config })
}

#[test]
fn a_master_that_never_answers_is_an_error_and_one_that_is_stopped_holds_no_call_up() {
    let Some(pool) = Pool::new() else { return };
    in_a_process_of_its_own(|| {
        let directory = plugin_files::directory(&["mooncake"]);
        let pair = Pair::open(directory.path(), &pool.config(PATIENT));
        // It takes connections, as a kernel does for a process that is stopped.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let config = |timeout: u32| {
            pool.config(&format!("global_segment_size = \"16mb\"\nmaster_timeout_ms = {timeout}\n"))
        };
        let to = |address: String| config(1000).replace(&pool.address.to_string(), &address);
        let refused = std::thread::scope(|scope| {
            let opening = scope.spawn(|| {
                tier(directory.path(), to(silent.local_addr().unwrap().to_string())).err().unwrap()
            });
            while !opening.is_finished() {
                pair.transfer();
            }
            opening.join().unwrap().to_string()
        });
        assert!(refused.contains("is it stopped"), "{refused}");

        let master = pool.master();
        let tier = tier(directory.path(), config(60_000)).unwrap();
        signal(master.pid(), "STOP");
        // The tier touches no memory any more, and its client stays until the master answers.
        tier.shutdown(500).unwrap();
        for _ in 0..20 {
            pair.transfer();
        }
        signal(master.pid(), "CONT");
        tier.shutdown(60_000).unwrap();
        pair.transfer();
    });
}
