//! The conformance kit passes plugins that keep their contract. For each plugin that does not, the right case fails.

use std::path::Path;
use std::process::Command;

use host_tests::defect::with_defect;
use host_tests::plugin_files;
use serde_json::Value;

/// Flags for plugins that must pass, on a machine that may stand still for seconds.
const PATIENT: [&str; 2] = ["--patience", "30"];

/// The name, the status and the text of a case.
type Report = (String, String, String);

/// Runs the kit. Returns the exit code, and the report of every case.
fn test(file: &Path, more: &[&str]) -> (i32, Vec<Report>) {
    let output = Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["plugins", "test", "--json"])
        .args(more)
        .arg(file)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let reports: Value = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"));
    let text = |report: &Value, key: &str| report[key].as_str().unwrap().to_owned();
    let reports = reports.as_array().unwrap().iter();
    let reports = reports.map(|r| (text(r, "case"), text(r, "status"), text(r, "text"))).collect();
    (output.status.code().unwrap(), reports)
}

/// The reports that are neither passed nor skipped.
fn broken(reports: &[Report]) -> Vec<&Report> {
    reports.iter().filter(|(_, status, _)| status != "pass" && status != "skip").collect()
}

/// As [`test`], for a plugin with a defect. A case that finds it often uses up the kit's patience, so that is the usual short one.
///
/// A case that fails in another way than `expected` may have met a machine that stood still. It runs again with patience, and its
/// second report counts.
fn test_defect(file: &Path, more: &[&str], expected: impl Fn(&Report) -> bool) -> (i32, Vec<Report>) {
    let (code, mut reports) = test(file, more);
    let doubtful = broken(&reports).into_iter().filter(|report| !expected(report));
    let doubtful: Vec<String> = doubtful.map(|(case, ..)| case.clone()).collect();
    if doubtful.is_empty() {
        return (code, reports);
    }
    let mut flags = PATIENT.to_vec();
    flags.extend(doubtful.iter().flat_map(|case| ["--case", case.as_str()]));
    let (_, again) = test(file, &flags);
    // The flag takes the beginning of a name, so other cases may have run too.
    for report in again.into_iter().filter(|(case, ..)| doubtful.contains(case)) {
        if let Some(first) = reports.iter_mut().find(|(case, ..)| *case == report.0) {
            *first = report;
        }
    }
    (code, reports)
}

#[test]
fn plugins_that_keep_their_contract_pass() {
    for name in ["shm", "wire", "loopback", "memory", "plain", "swa"] {
        let (code, reports) = test(&plugin_files::plugin(name), &PATIENT);
        assert_eq!(broken(&reports), [] as [&Report; 0], "{name}");
        let skipped: Vec<_> = reports.iter().filter(|(_, status, _)| status == "skip").collect();
        // GPU memory has its own tests (`plugins/shm/tests/loaded/between_devices.rs`).
        let is_of_a_gpu = |(case, _, text): &Report| {
            case == "transfer-vram" && text.contains("the kit has no device memory")
        };
        let no_descriptor =
            |(case, _, text): &Report| case.ends_with("-event-fd") && text.contains("offers no descriptor");
        let in_one_process = |(case, _, text): &Report| {
            case == "transfer-processes" && text.contains("connect from another process answered PEER_LOST")
        };
        let as_it_should_be = skipped.iter().all(|skip| match name {
            "shm" => is_of_a_gpu(skip),
            "wire" => false,
            "loopback" => no_descriptor(skip) || in_one_process(skip),
            _ => no_descriptor(skip),
        });
        assert!(code == 0 && as_it_should_be, "{name}: {code} {skipped:?}");
        assert!(reports.len() > 12, "{name}: {reports:?}");
    }
}

#[test]
fn the_file_tier_keeps_its_contract_with_each_of_its_ways_to_read_and_write() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("config.toml");
    for way in ["io = \"uring\"", "io = \"threads\"\nthreads = 4"] {
        let pages = directory.path().join("pages");
        let limits = "segment_mib = 4\nsize_limit_mib = 64\nfree_floor_mib = 0";
        std::fs::write(&config, format!("dir = {pages:?}\n{limits}\n{way}\n")).unwrap();
        let configured = ["--plugin-config", config.to_str().unwrap()];
        let (code, reports) =
            test(&plugin_files::plugin("hicache-file"), &[&configured[..], &PATIENT].concat());
        if reports.iter().any(|(_, _, text)| text.contains("no io_uring here")) {
            println!("SKIPPED {way}: this kernel has no io_uring");
            continue;
        }
        assert_eq!((code, broken(&reports)), (0, vec![]), "{way}");
        let skipped = reports.iter().filter(|(_, status, _)| status == "skip");
        let skipped: Vec<&str> = skipped.map(|(case, ..)| case.as_str()).collect();
        // The plugin's own tests check what one process cannot.
        assert_eq!(skipped, ["tier-shared"], "{way}");
        assert!(reports.len() > 12, "{reports:?}");
    }
}

#[test]
fn a_role_that_needs_a_configuration_is_skipped_without_one_and_that_is_said() {
    let file = plugin_files::plugin("hicache-file");
    let (code, reports) = test(&file, &PATIENT);
    // Most cases were not tested, so the test has not succeeded.
    assert_eq!((code, broken(&reports)), (2, vec![]));
    let passed: Vec<&str> =
        reports.iter().filter(|(_, status, _)| status == "pass").map(|(case, ..)| case.as_str()).collect();
    assert_eq!(passed, ["manifest", "load", "config-unknown-key", "config-garbage"]);
    let (_, _, text) = reports.iter().find(|(case, ..)| case == "tier-data").unwrap();
    assert!(
        text.starts_with("not tested without a configuration: role tier: ")
            && text.contains("dir is not set"),
        "{text}"
    );
    let output = Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["plugins", "test", "--case", "tier-"])
        .arg(&file)
        .output();
    let said = String::from_utf8(output.unwrap().stdout).unwrap();
    assert!(said.contains("\nNOT TESTED: ") && said.contains("--plugin-config FILE"), "{said}");
    // A given configuration must work.
    let config = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(config.path(), "threads = 2").unwrap();
    let arguments = ["--case", "tier-data", "--plugin-config", config.path().to_str().unwrap()];
    let (code, reports) = test(&file, &arguments);
    assert!(code == 2 && reports[0].1 == "fail" && reports[0].2.contains("dir is not set"), "{reports:?}");
}

#[test]
fn what_cannot_be_checked_is_skipped_with_the_reason() {
    let (code, reports) = test(&plugin_files::plugin("null"), &PATIENT);
    assert_eq!(code, 0, "{reports:?}");
    let data = reports.iter().find(|(case, ..)| case == "transfer-data").unwrap();
    assert_eq!(data.1, "skip");
    assert!(data.2.contains("declares no page_writes"), "{}", data.2);
    assert!(!reports.iter().any(|(case, ..)| case.starts_with("tier-")), "{reports:?}");
}

/// Calls `wrong` for all of these, two at a time, and collects its results. A run of the kit mostly waits for things that a defect
/// keeps from happening.
fn wrongs<T: Sync>(all: &[T], wrong: impl Fn(&T) -> Option<String> + Sync) -> Vec<String> {
    let half = |first| all.iter().skip(first).step_by(2).filter_map(&wrong).collect::<Vec<_>>();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| half(1));
        let mut wrongs = half(0);
        wrongs.extend(other.join().unwrap());
        wrongs
    })
}

/// Checks defects of a plugin. For each defect exactly these cases must fail, and the first one's text must have the given words.
fn each_is_found(plugin: &str, defects: &[(&str, &[&str], &str)]) {
    let original = std::fs::read(plugin_files::plugin(plugin)).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let wrong = wrongs(defects, |(defect, expected, says)| {
        let file = with_defect(&original, defect, directory.path());
        let is_expected = |(case, _, text): &Report| {
            expected.contains(&case.as_str()) && (expected[0] != case || text.contains(says))
        };
        let (code, reports) = match expected.is_empty() {
            true => test(&file, &PATIENT),
            false => test_defect(&file, &[], is_expected),
        };
        let found = broken(&reports);
        let cases: Vec<_> = found.iter().map(|(case, ..)| case.as_str()).collect();
        let right = cases == *expected
            && code == if expected.is_empty() { 0 } else { 2 }
            && found.first().is_none_or(|(_, _, text)| text.contains(says));
        (!right).then(|| format!("{defect}: {found:?}, it should be {expected:?} with {says:?}"))
    });
    assert!(wrong.is_empty(), "{plugin}:\n{}", wrong.join("\n"));
}

#[test]
fn each_defect_of_a_transfer_backend_fails_the_case_that_is_about_it_and_no_other() {
    each_is_found(
        "broken",
        &[
            ("none", &[], ""),
            (
                "wrong-capabilities",
                &["transfer-order", "transfer-words", "transfer-closed-all", "transfer-capabilities"],
                "no notification came",
            ),
            ("leaks-thread", &["lifecycle", "lifecycle-drop"], "left 20 threads and 0 descriptors behind"),
            ("fills-pool", &[], ""),
            ("needs-shutdown", &["lifecycle-drop"], "dropped without a shutdown left 20 threads"),
            (
                "loses-completion",
                &[
                    "transfer-completions",
                    "transfer-cancel",
                    "transfer-order",
                    "transfer-limits",
                    "transfer-landed",
                    "transfer-descriptors",
                    "transfer-disconnect",
                    "transfer-deregister",
                    "transfer-settled",
                ],
                "1 never completed, the first is number 40",
            ),
            ("repeats-completion", &["transfer-repeats"], "submission 40 completed 2 times"),
            ("allocates-on-submit", &["transfer-hot-allocations"], "200 calls of submit allocated 200 times"),
            ("blocks-in-poll", &["transfer-hot-blocking"], "in 200 rounds poll gave up the processor"),
            ("panics", &["transfer-panics", "transfer-refusals"], "submit of nothing made the plugin panic"),
            (
                "needs-writes",
                &["transfer-words", "transfer-refusals"],
                "a notification alone: submit of 0 writes answered",
            ),
            (
                "corrupts-byte",
                &["transfer-data", "transfer-bounds", "transfer-order", "transfer-landed"],
                "inside a write, is ",
            ),
        ],
    );
}

/// Checks defects of a plugin. For each defect its case must fail with the given words. Only that case runs, because a defect may
/// break others too. For the defect "none" all cases run.
fn each_fails(plugin: &str, defects: &[(&str, &str, &str)]) {
    let original = std::fs::read(plugin_files::plugin(plugin)).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let wrong = wrongs(defects, |(defect, case, says)| {
        let file = with_defect(&original, defect, directory.path());
        // The other cases whose names begin so may fail in any way.
        let is_expected = |(name, _, text): &Report| name != case || text.contains(says);
        let (code, reports) = match *defect {
            "none" => test(&file, &PATIENT),
            _ => test_defect(&file, &["--case", case], is_expected),
        };
        let found = broken(&reports);
        let right = match *defect {
            "none" => code == 0 && found.is_empty() && reports.len() > 12,
            _ => code == 2 && found.iter().any(|(name, _, text)| name == case && text.contains(says)),
        };
        (!right).then(|| format!("{defect}: {found:?}, it should be {case} with {says:?}"))
    });
    assert!(wrong.is_empty(), "{plugin}:\n{}", wrong.join("\n"));
}

#[test]
fn a_defect_of_a_transfer_backend_that_shows_while_bytes_are_on_their_way_is_found() {
    each_fails(
        "broken-wire",
        &[
            ("none", "", ""),
            ("disconnect-nothing", "transfer-disconnect", "was written after the receiver's disconnect"),
            ("disconnect-late", "transfer-disconnect", "was written after the receiver's disconnect"),
            ("disconnect-unproven", "transfer-disconnect", "none was proven"),
            ("deregister-nothing", "transfer-deregister", "was written after a deregister"),
            ("deregister-late", "transfer-deregister", "was written after a deregister"),
            (
                "disconnect-nothing",
                "transfer-processes",
                "after a disconnect, by a sender that had been stopped",
            ),
            (
                "deregister-nothing",
                "transfer-processes",
                "after a deregister, by a sender that had been stopped",
            ),
            ("settled-always", "transfer-settled", "of the target changed after that"),
            ("settled-never", "transfer-settled", "not all were ever settled"),
            ("same-region", "transfer-regions", "two regions of one instance have the same id"),
            ("same-peer", "transfer-regions", "two peers have the same id"),
            (
                "same-source",
                "transfer-regions",
                "of two regions on each side: byte 30000 of target region 1 is 1",
            ),
            ("lands-partly", "transfer-bounds", "changed the target"),
            ("limits-writes", "transfer-limits", "limits allows 2048 writes"),
            ("limits-submissions", "transfer-limits", "after 64 submit answered WOULD_BLOCK"),
            ("notifies-early", "transfer-order", "was there before all of its data"),
            ("kind", "transfer-order", "has kind 3, it should be ARRIVED"),
            ("names-none", "transfer-order", "does not name its sender"),
            ("counts-wrong", "transfer-data", "of 46360 bytes completed with 46359 bytes"),
            ("forgets-cancelled", "transfer-cancel", "was cancelled and never completed"),
            ("registers-anything", "transfer-refusals", "register of memory of an unknown kind answers 0"),
            ("deregisters-anything", "transfer-refusals", "deregister of an unknown region answers 0"),
            ("connects-anywhere", "transfer-refusals", "connect to an endpoint of no bytes answers 0"),
            ("disconnects-anything", "transfer-refusals", "disconnect of an unknown peer answers 0"),
            ("cancels-anything", "transfer-cancel", "cancel of a tag that is not in flight answers 0"),
            ("settled-when-closed", "transfer-closed-all", "settled after shutdown answers 1"),
            ("limits-change", "transfer-constant", "max_submissions: 63"),
            ("notifies-refused", "transfer-bounds", "with a write beyond the target was delivered"),
            ("cancelled-works", "transfer-cancel", "completed with status 0 and 0 of its"),
            ("cancelled-is-whole", "transfer-cancel", "of it is not in the target"),
            ("misplaces-long", "transfer-large", "byte 196608 of a write of 196609 bytes is"),
            ("completes-early", "transfer-landed", "completed before all of its data was there"),
            ("keeps-peer", "transfer-reconnect", "which a connection had before"),
            (
                "leaks-with-connections",
                "transfer-descriptors",
                "connections that were ended left 50 descriptors",
            ),
            (
                "leaks-with-submissions",
                "transfer-descriptors",
                "submissions that completed left 50 descriptors",
            ),
        ],
    );
}

#[test]
fn a_defect_of_a_tier_that_shows_beside_its_pages_or_late_is_found() {
    each_fails(
        "broken-tier",
        &[
            ("writes-past-page", "tier-guards", "beside the pages"),
            ("found-short", "tier-lengths", "of a value that has 16384 ended as if it had worked"),
            ("fills-missing", "tier-missing", "a get that found nothing changed memory"),
            ("counts-wrong", "tier-lengths", "of 16384 bytes says 16383 bytes"),
            ("usage-nothing", "tier-lengths", "usage says 1 values of 0 bytes"),
            ("registers-anything", "tier-refusals", "register of memory of an unknown kind answers 0"),
            ("deregisters-anything", "tier-refusals", "deregister of an unknown region answers 0"),
            ("cancels-anything", "tier-cancel", "cancel of a tag that is not in flight answers 0"),
            ("settled-when-closed", "tier-closed-all", "settled after shutdown answers 1"),
            ("limits-pages", "tier-limits", "exists answered INVALID_ARGUMENT"),
            ("limits-value", "tier-limits", "a put of 131072 ended with INVALID_ARGUMENT(-2)"),
            ("limits-change", "tier-constant", "max_batches: 64"),
            ("settled-always", "tier-settled", "of its memory changed after that"),
            ("settled-never", "tier-settled", "not all were ever settled"),
            ("deregister-nothing", "tier-deregister", "was written after a deregister"),
        ],
    );
    let (code, reports) = test(&plugin_files::plugin("forgetful"), &PATIENT);
    let found: Vec<_> = broken(&reports).iter().map(|(case, ..)| case.as_str()).collect();
    assert_eq!((code, found), (2, vec!["tier-persistent"]), "{reports:?}");
}

#[test]
fn a_value_that_is_torn_when_its_process_is_killed_is_found_and_a_run_leaves_no_value_behind() {
    let (files, directory) = (plugin_files::plugin("files"), tempfile::tempdir().unwrap());
    let (config, values) = (directory.path().join("config.toml"), directory.path().join("values"));
    std::fs::create_dir(&values).unwrap();
    let run = |defect: &str, more: &[&str]| {
        std::fs::write(&config, format!("dir = {values:?}\ndefect = {defect:?}\n")).unwrap();
        test(&files, &[&["--plugin-config", config.to_str().unwrap()], more].concat())
    };
    let (code, reports) = run("", &PATIENT);
    assert_eq!((code, broken(&reports)), (0, vec![]));
    let named = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let left: Vec<String> = std::fs::read_dir(&values).unwrap().map(named).collect();
    // A value that a killed process was writing still has a temporary name.
    let left: Vec<&String> = left.iter().filter(|name| !name.starts_with('.')).collect();
    assert!(left.is_empty(), "{left:?}");
    let (code, reports) = run("in-place", &[&PATIENT[..], &["--case", "tier-"]].concat());
    let found: Vec<_> = broken(&reports).iter().map(|(case, ..)| case.as_str()).collect();
    assert_eq!((code, found), (2, vec!["tier-crash"]), "{reports:?}");
    let (_, _, text) = broken(&reports)[0];
    assert!(text.contains("after its process was killed") && text.contains("and other bytes"), "{text}");
}

#[test]
fn a_store_that_is_slow_passes_with_patience_and_a_call_that_does_not_return_is_named() {
    let (slow, directory) = (plugin_files::plugin("faulty-tier"), tempfile::tempdir().unwrap());
    let config = directory.path().join("config.toml");
    let delay = |milliseconds: u32| std::fs::write(&config, format!("delay_ms = {milliseconds}")).unwrap();
    let run = |file: &Path, more: &[&str]| {
        let common = ["--plugin-config", config.to_str().unwrap()];
        let (_, mut reports) = test(file, &[&common, more].concat());
        assert_eq!(reports.len(), 1, "{reports:?}");
        reports.remove(0)
    };
    let data = ["--case", "tier-data", "--patience"];
    delay(20_000);
    let (_, status, text) = run(&slow, &[&data[..], &["1"]].concat());
    assert!(status == "fail" && text.contains("completed"), "{status}: {text}");
    delay(1500);
    assert_eq!(run(&slow, &[&data[..], &["60"]].concat()).1, "pass");
    std::fs::write(&config, "").unwrap();
    let original = std::fs::read(plugin_files::plugin("broken-wire")).unwrap();
    let hangs = with_defect(&original, "hangs-in-submit", directory.path());
    let (_, status, text) = run(&hangs, &["--case", "transfer-data", "--time-limit", "30"]);
    assert_eq!((status.as_str(), text.contains("in submit of broken-wire")), ("timeout", true), "{text}");
}

#[test]
fn each_defect_of_a_tier_fails_the_case_that_is_about_it_and_no_other() {
    each_is_found(
        "broken-tier",
        &[
            ("none", &[], ""),
            ("corrupts-value", &["tier-data", "tier-guards"], "of what was put came back changed"),
            ("loses-completion", &["tier-completions"], ""),
            ("repeats-completion", &["tier-completions"], ""),
            (
                "finds-what-is-not-there",
                &["tier-data", "tier-missing", "tier-keys", "tier-whole", "tier-limits"],
                "ended with 1, it should be 0",
            ),
            ("scan-repeats", &["tier-scan"], "a scan lists a key twice"),
            ("scan-never-ends", &["tier-scan"], "a scan does not come to its end"),
            (
                "accepts-out-of-bounds",
                &["tier-bounds", "tier-deregister", "tier-lengths"],
                "ended as if it had worked",
            ),
            ("never-recovers", &["tier-flow-control"], "still answers WOULD_BLOCK"),
            ("loses-batches-of-threads", &["tier-threads"], "4 threads asked for"),
            ("allocates-on-get", &["tier-hot-allocations"], "200 calls of get allocated 200 times"),
            ("blocks-in-poll", &["tier-hot-blocking"], "in 200 rounds poll gave up the processor"),
            ("panics", &["tier-panics"], "put of nothing made the plugin panic"),
            ("forgets-cancelled", &["tier-cancel"], "pages of a cancelled put only 0 completed"),
            ("answers-when-closed", &["tier-closed"], "exists after shutdown answers 0 instead of CLOSED"),
            ("event-fd-silent", &["tier-event-fd"], "batch 1 ended, and the descriptor stays quiet"),
            ("event-fd-stuck", &["tier-event-fd"], "the descriptor stays readable"),
        ],
    );
}

#[test]
fn each_defect_of_an_allocator_fails_the_case_that_is_about_it() {
    let keeps = "does not retain what its layers keep";
    each_fails(
        "broken-allocator",
        &[
            ("none", "", ""),
            ("components-count", "allocator-components", "groups of layers answered"),
            ("components-change", "allocator-components", "first and"),
            ("components-without-room", "allocator-components", "components without room"),
            ("group-twice", "allocator-components", "has the group or the name of"),
            ("name-twice", "allocator-components", "has the group or the name of"),
            ("window-too-short", "allocator-window", "of layers that see 1 tokens"),
            ("window-as-all", "allocator-components", keeps),
            ("budget-too-large", "allocator-components", "pool pages in a pool of 256"),
            ("budget-of-none", "allocator-components", "has a budget of 0 pool pages"),
            ("reserved-is-used", "allocator-components", "reserved fields that are not zero"),
            ("takes-unknown-layers", "allocator-unknown-layers", "were taken, and components answered 1"),
            ("hands-out-twice", "allocator-books", "was handed out twice"),
            ("hands-out-shared-twice", "allocator-books", "was handed out twice"),
            ("loses-pages", "allocator-books", "it should be 0"),
            ("takes-parts", "allocator-limits", "alloc of a part of a page answered 0"),
            ("keeps-what-fits", "allocator-limits", "alloc of the whole budget"),
            ("invalid-when-full", "allocator-limits", "not WOULD_BLOCK"),
            ("accepts-double-free", "allocator-free", "free of a page named twice answered 0"),
            ("frees-for-others", "allocator-free", "free of a page that was taken failed"),
            ("fails-other-threads", "allocator-threads", "in 4 of 4 threads"),
            ("allocates-on-alloc", "allocator-hot-allocations", "200 calls of alloc allocated 200 times"),
            ("panics", "allocator-panics", "alloc of an unknown component made the plugin panic"),
        ],
    );
}

#[test]
fn a_promise_that_cannot_be_checked_here_is_in_the_report() {
    let cases = ["--case", "tier-shared", "--case", "tier-persistent"];
    let (code, reports) = test(&plugin_files::plugin("broken-tier"), &[&cases[..], &PATIENT].concat());
    // Only declared capabilities are reported.
    assert_eq!((code, reports.len()), (0, 1), "{reports:?}");
    let (case, status, text) = &reports[0];
    assert_eq!((case.as_str(), status.as_str()), ("tier-shared", "skip"));
    assert!(text.contains("declared, and not checked: the kit has one machine"), "{text}");
}

#[test]
fn a_case_that_runs_wild_is_stopped_by_its_limits() {
    let (panicking, directory) = (plugin_files::plugin("panicking"), tempfile::tempdir().unwrap());
    let config = directory.path().join("config.toml");
    let run = |what: &str, limit: &[&str]| {
        std::fs::write(&config, format!("in = \"{what}\"")).unwrap();
        let common = ["--plugin-config", config.to_str().unwrap(), "--case", "lifecycle-drop"];
        let (_, mut reports) = test(&panicking, &[&common, limit].concat());
        assert_eq!(reports.len(), 1);
        reports.remove(0)
    };
    let (_, status, text) = run("exhaust", &["--memory-limit", "2"]);
    assert!(
        status == "crash" && text.contains("memory allocation of 3221225472 bytes failed"),
        "{status}: {text}"
    );
    assert_eq!(
        run("exhaust", &["--memory-limit", "8", "--patience", "30"]).1,
        "pass",
        "the limit is what stopped it"
    );
    // With enough processors, four threads that spin use up twice the time limit of processor time before the time is over.
    let (_, status, text) = run("spin", &["--time-limit", "3"]);
    assert!((status == "crash" && text.contains("signal: 24")) || status == "timeout", "{status}: {text}");
}

#[test]
fn a_process_that_a_plugin_leaves_behind_holds_nothing_up() {
    let directory = tempfile::tempdir().unwrap();
    let (config, left) = (directory.path().join("config.toml"), directory.path().join("left"));
    std::fs::write(&config, "in = \"daemon\"").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["plugins", "test", "--patience", "30", "--case", "manifest-matches", "--plugin-config"])
        .args([&config, &plugin_files::plugin("panicking")])
        .env("DAEMON", &left)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let left = std::fs::read_to_string(left).unwrap();
    let ended = left.lines().filter(|pid| !Path::new(&format!("/proc/{pid}")).exists()).count();
    assert!(
        Command::new("kill").args(left.lines()).status().unwrap().success() && ended == 0,
        "waited for it"
    );
    assert!(said.starts_with("pass     manifest-matches"), "{said}");
}

#[test]
fn a_panic_is_said_with_its_place_where_no_log_is() {
    let output = Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["plugins", "run-case", "--case", "lifecycle", "--config-text", "in = \"open\""])
        .arg(plugin_files::plugin("panicking"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("panicking/src/lib.rs:") && said.contains("told to panic while opening"), "{said}");
}

#[test]
fn crashes_and_hangs_end_one_case_only() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("text.so");
    std::fs::write(&file, "not a plugin").unwrap();
    let (code, reports) = test(&file, &["--case", "load"]);
    assert_eq!(code, 2);
    assert_eq!(reports.len(), 1);
    assert!(reports[0].2.contains("is not an ELF shared object"), "{reports:?}");

    let panicking = plugin_files::plugin("panicking");
    let config = directory.path().join("config.toml");
    std::fs::write(&config, "in = \"abort\"").unwrap();
    let config = config.to_str().unwrap();
    let (code, reports) =
        test(&panicking, &["--plugin-config", config, "--case", "load", "--case", "config-d"]);
    assert_eq!(code, 2);
    let statuses: Vec<_> = reports.iter().map(|(case, status, _)| (case.as_str(), status.as_str())).collect();
    assert_eq!(statuses, [("load", "pass"), ("config-defaults", "crash")], "{reports:?}");
    assert!(reports[1].2.contains("signal: 6"), "{reports:?}");

    std::fs::write(config, "in = \"hang\"").unwrap();
    let arguments = ["--plugin-config", config, "--time-limit", "1", "--case", "config-defaults"];
    let (_, reports) = test(&panicking, &arguments);
    assert_eq!(reports[0].1, "timeout", "{reports:?}");
}

#[test]
fn cases_are_named_on_the_command_line_and_unknown_names_are_refused() {
    let (_, reports) = test(&plugin_files::plugin("memory"), &["--case", "tier-data"]);
    assert_eq!(reports.iter().map(|(case, ..)| case.as_str()).collect::<Vec<_>>(), ["tier-data"]);
    let output = Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["plugins", "test", "--case", "nonsense", "x.so"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("no case starts with \"nonsense\""), "{said}");
}
