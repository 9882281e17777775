//! The host's services for plugins, through a loaded file: log lines, metrics, wake-ups. And a plugin's check of its configuration.

use std::sync::{Arc, Mutex};

use host_plugin_api::{
    Completion, ErrorCode, NOTIFICATION_BYTES, Opening, PeerId, Submission, Tag, TransferBackend, Write,
};
use host_plugins::{Catalog, Kind, PluginError, Services, load_root, open_transfer};
use host_test_peer as peer;
use host_tests::alone::in_a_process_of_its_own;
use host_tests::plugin_files;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::BorrowedFd;

fn open(config: &str) -> Result<Arc<dyn TransferBackend>, PluginError> {
    let directory = plugin_files::directory(&["calling"]);
    let catalog = Catalog::scan([directory.path()]);
    let opening = Opening { name: "test".into(), config: config.to_owned() };
    open_transfer(catalog.find("calling").unwrap(), &opening)
}

fn metric(name: &str) -> Option<(Kind, u64)> {
    let (_, services) = Services::all().into_iter().find(|(id, _)| id == "host.test.calling")?;
    services.metrics().iter().find(|metric| metric.name == name).map(|metric| (metric.kind, metric.value()))
}

#[test]
fn counters_and_gauges_belong_to_the_host_and_outlive_the_instance() {
    drop(open("counters = [\"a\", \"b\"]\ngauges = [\"level\"]").unwrap());
    drop(open("counters = [\"b\"]").unwrap());
    assert_eq!(metric("a"), Some((Kind::Counter, 1)));
    assert_eq!(metric("b"), Some((Kind::Counter, 2)));
    assert_eq!(metric("level"), Some((Kind::Gauge, 7)));
    let error = open("counters = [\"No Good\"]").err().unwrap().to_string();
    assert!(error.contains("INVALID_ARGUMENT: \"No Good\" cannot name a number"), "{error}");
    let error = open("gauges = [\"a\"]").err().unwrap().to_string();
    assert!(error.contains("a is a counter already"), "{error}");
}

#[test]
fn a_plugin_without_a_descriptor_wakes_the_host_through_one_of_the_hosts() {
    let (backend, other) = (open("").unwrap(), open("").unwrap());
    let fd = backend.event_fd();
    assert!(fd >= 0 && fd != other.event_fd(), "each instance has its own");
    let readable = |seconds| {
        // SAFETY: the instance keeps the descriptor open, and it lives until the test ends.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let wait = Timespec { tv_sec: seconds, tv_nsec: 0 };
        poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&wait)).unwrap() == 1
    };
    assert!(!readable(0));
    let nothing = Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 };
    for round in 0..1000 {
        let submission = Submission {
            peer: PeerId(1),
            notification_length: 0,
            tag: Tag(round),
            notification: [0; NOTIFICATION_BYTES],
        };
        assert_eq!(backend.submit(&submission, &[Write::default()]), 0);
        let mut done = [nothing; 4];
        // A wake-up can be one too many: the poll before may have taken its completion already.
        while backend.poll(&mut done) == 0 {
            assert!(readable(60), "no wake-up for submission {round}");
        }
        assert_eq!(done[0].tag, Tag(round));
    }
    let mut polls = 0;
    while readable(0) {
        assert_eq!(backend.poll(&mut [nothing; 4]), 0);
        polls += 1;
        assert!(polls < 10, "a poll does not clear the descriptor");
    }
    backend.shutdown(60_000).unwrap();
}

/// A backend that wakes its host must do so for a cancelled submission, too. Its receiver stops reading when 1024 notifications
/// wait, which holds up every later submission.
#[test]
fn a_cancelled_submission_wakes_the_host() {
    const INBOX: u64 = 1024;
    let directory = plugin_files::directory(&["wire"]);
    let worker = |name| peer::Worker::open(directory.path(), "wire", name, 4096, "");
    let (sender, receiver) = (worker("sender"), worker("receiver"));
    let connected = sender.backend.connect("receiver", &receiver.backend.endpoint().unwrap()).unwrap();
    let submit = |tag| {
        let write = Write {
            source_region: sender.region,
            target_region: receiver.region,
            length: 8,
            target_generation: receiver.generation,
            ..Write::default()
        };
        assert_eq!(
            sender.backend.submit(&peer::submission(connected, tag, b"arrived"), &[write]),
            0,
            "{tag}"
        );
    };
    for tag in 0..INBOX {
        submit(tag);
        assert_eq!(sender.completion().tag, Tag(tag));
    }
    submit(INBOX);
    submit(INBOX + 1);
    let fd = sender.backend.event_fd();
    let readable = || {
        // SAFETY: the instance keeps the descriptor open, and it lives until the test ends.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&Timespec::default())).unwrap() == 1
    };
    // The last wake-up may come after the poll that took its completion.
    peer::wait("a quiet descriptor", || {
        let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }];
        assert_eq!(sender.backend.poll(&mut done), 0, "{done:?} ended, and the receiver has no room for it");
        (!readable()).then_some(())
    });
    assert_eq!(sender.backend.cancel(Tag(INBOX + 1)), 0);
    assert!(readable(), "a completion waits, and the host sleeps");
    let done = sender.completion();
    assert_eq!((done.tag, done.status), (Tag(INBOX + 1), ErrorCode::CANCELLED.0));
    for _ in 0..=INBOX {
        receiver.notification();
    }
    assert_eq!(sender.completion().tag, Tag(INBOX));
    sender.backend.shutdown(60_000).unwrap();
    receiver.backend.shutdown(60_000).unwrap();
}

#[test]
fn a_configuration_that_only_the_plugin_can_judge_is_refused_before_anything_opens() {
    let error = open("text = \"refuse me\"").err().unwrap();
    assert_eq!(error.reason(), "config_refused");
    assert_eq!(
        error.to_string(),
        "plugin \"calling\" refuses its configuration: CONFIG: the transfer role refuses the text \"refuse me\": give \
         another"
    );
    // A plugin without the check, for instance an older one, accepts every configuration here.
    let directory = plugin_files::directory(&["null"]);
    let catalog = Catalog::scan([directory.path()]);
    let root = load_root(catalog.find("null").unwrap()).unwrap();
    assert_eq!(root.check_config("transfer", "text = \"refuse me\""), Ok(()));
}

#[derive(Clone, Default)]
struct Buffer(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs in a process of its own, because a process has one log.
#[test]
fn log_lines_carry_the_plugins_id_are_filtered_and_do_not_flood() {
    in_a_process_of_its_own(|| {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        tracing_subscriber::fmt()
            .with_env_filter("warn,plugin=debug")
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .init();
        let said = |config: &str| {
            buffer.0.lock().unwrap().clear();
            let outcome = open(config).map(drop).map_err(|error| error.to_string());
            (outcome, String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap())
        };
        let (_, text) = said("text = \"two\\nlines\"");
        for (level, number) in [("ERROR", 1), ("WARN", 2), ("INFO", 3), ("DEBUG", 4)] {
            let line = text
                .lines()
                .find(|line| line.contains(level))
                .unwrap_or_else(|| panic!("no {level} in {text}"));
            assert!(line.contains(&format!("plugin host.test.calling: {number} \"two\\nlines\"")), "{line}");
            assert!(line.contains("host_plugin_calling"), "the module: {line}");
        }
        assert_eq!(text.lines().count(), 4, "the filter leaves trace out:\n{text}");

        let (outcome, text) = said("panic = true");
        assert!(outcome.unwrap_err().contains("told to panic while opening"));
        assert!(
            text.contains("plugin host.test.calling: panicked at ") && text.contains("lib.rs:"),
            "{text}"
        );

        let (_, text) = said("lines = 100000");
        let written = text.lines().filter(|line| line.contains("of many")).count();
        let (_, services) = Services::all().into_iter().find(|(id, _)| id == "host.test.calling").unwrap();
        assert_eq!(written as u64 + services.lines_left_out(), 100_000);
        assert!(written >= 100, "{written}");
    });
}
