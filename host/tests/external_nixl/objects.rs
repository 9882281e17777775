//! The NIXL plugin as a storage tier in a bucket, over the real NIXL and an S3 server. Damaged values are never returned. When the
//! server hangs or dies, every page ends, and no memory is touched afterwards.

use std::process::Command;

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::*;
use host_plugins::{Catalog, open_tier};
use host_tests::s3::{Bucket, PATIENT_MS, SECRET};
use host_tests::wait::{poll_until, until};
use host_tests::{nixl, plugin_files};

use super::place::{PAGE, PAGES, Place, Tier, key, name, place, value};

fn bucket() -> Option<(Bucket, Place)> {
    let mut place = place("")?;
    let bucket = Bucket::new()?;
    place.config = format!("{}[storage]\n{}", nixl::config()?, bucket.storage(PATIENT_MS));
    Some((bucket, place))
}

/// The same place with a deadline of two seconds for a page, which is shorter than NIXL's own. Opening stores a page, too, so it is
/// repeated until the server is fast enough once.
fn hasty(bucket: &Bucket, mut place: Place) -> (Place, Tier) {
    place.config = place.config.replace(&bucket.storage(PATIENT_MS), &bucket.storage(2000));
    let tier = until("the tier to open", || place.try_open());
    (place, tier)
}

fn object(page: usize) -> String {
    format!("some/where/{}", name(page))
}

fn exists(tier: &Tier, pages: std::ops::Range<usize>) -> Vec<i32> {
    let keys: Vec<Key> = pages.map(key).collect();
    tier.finish(tier.tier.exists(Tag(3), &keys), keys.len())
}

fn delete(tier: &Tier, pages: std::ops::Range<usize>) -> Vec<i32> {
    let keys: Vec<Key> = pages.map(key).collect();
    tier.finish(tier.tier.delete(Tag(4), &keys), keys.len())
}

#[test]
fn the_tier_cases_of_the_conformance_kit_pass_but_for_what_a_bucket_cannot_do() {
    let Some((_bucket, place)) = bucket() else { return };
    // Also with Amazon's newer client, for objects from this size on.
    for more in ["", ", crtMinLimit = \"10000\""] {
        let skipped = place.kit(&place.config.replace(" }\n", &format!("{more} }}\n")));
        assert_eq!(skipped.len(), 1, "{skipped:?}");
        assert!(skipped[0].contains("tier-scan") && skipped[0].contains("cannot list"), "{skipped:?}");
    }
}

#[test]
fn what_one_process_stored_the_next_one_finds_whole_under_names_of_its_keys() {
    let Some((bucket, place)) = bucket() else { return };
    let tier = place.open();
    tier.fill();
    assert!(tier.put(0..PAGES).iter().all(|status| *status == STORED));
    tier.tier.shutdown(60_000).unwrap();
    drop(tier);
    let mut names: Vec<String> = (0..PAGES).map(object).collect();
    names.sort();
    assert_eq!(bucket.names(), names);
    let tier = place.open();
    tier.bytes().fill(0);
    assert!(exists(&tier, 0..PAGES + 2) == [vec![FOUND; PAGES], vec![MISSING; 2]].concat());
    assert!(tier.get(0..PAGES).iter().all(|status| *status == FOUND));
    assert!((0..PAGES).all(|page| tier.is_right(page)));
    // An object that exists is not written again.
    bucket.edit(&object(3), |bytes| *bytes.last_mut().unwrap() ^= 1);
    let before = bucket.object(&object(3));
    tier.fill();
    assert_eq!(tier.put(0..5), [STORED; 5]);
    assert_eq!(bucket.object(&object(3)), before);
    let mut short = tier.pages(7..8);
    short[0].length -= 1;
    assert_eq!(tier.finish(tier.tier.get(Tag(1), &short), 1), [MISSING], "another length");
}

#[test]
fn damaged_objects_are_an_error_and_then_missing_and_can_be_stored_again() {
    let Some((bucket, mut place)) = bucket() else { return };
    let tier = place.open();
    tier.fill();
    assert_eq!(tier.put(0..12), [STORED; 12]);
    let edit = |page: usize, edit: &dyn Fn(&mut Vec<u8>)| bucket.edit(&object(page), edit);
    edit(0, &|bytes| bytes.truncate(PAGE / 2));
    edit(1, &|bytes| bytes.truncate(32));
    edit(2, &|bytes| bytes.truncate(7));
    edit(3, &|bytes| bytes.truncate(PAGE + 31));
    edit(4, &|bytes| bytes[PAGE / 3] ^= 1);
    edit(5, &|bytes| bytes[17] ^= 1);
    edit(6, &|bytes| drop(bytes.drain(..4096)));
    bucket.put(&object(7), &bucket.object(&object(8)).unwrap());
    // No range of an empty object can be read, so NIXL cannot report what is wrong with it.
    bucket.put(&object(11), b"");
    let config = place.config.clone();
    place.config.insert_str(0, "read_only = true\n");
    let reader = place.open();
    reader.bytes().fill(7);
    for _ in 0..2 {
        let ends = reader.get(0..12);
        assert_eq!(ends, [[ErrorCode::IO.0; 8].as_slice(), &[FOUND; 3], &[ErrorCode::IO.0]].concat());
    }
    assert_eq!(reader.put(20..22), [ErrorCode::UNSUPPORTED.0; 2]);
    assert_eq!(delete(&reader, 8..9), [ErrorCode::UNSUPPORTED.0]);
    assert!(reader.bytes()[..8 * PAGE].iter().all(|byte| *byte == 7), "what is damaged touches no memory");
    assert_eq!(bucket.object(&object(7)), bucket.object(&object(8)), "a reader changed an object");
    place.config = config;

    tier.bytes().fill(0);
    assert_eq!(tier.get(0..8), [ErrorCode::IO.0; 8]);
    assert!(tier.bytes().iter().all(|byte| *byte == 0));
    assert_eq!(tier.get(8..11), [FOUND; 3]);
    assert!((8..11).all(|page| tier.is_right(page)));
    assert_eq!(
        (tier.get(0..8), exists(&tier, 0..9)),
        (vec![MISSING; 8], [vec![MISSING; 8], vec![FOUND]].concat())
    );
    assert_eq!(tier.get(11..12), [ErrorCode::IO.0]);
    tier.fill();
    assert_eq!((tier.put(0..8), tier.put(11..12)), (vec![STORED; 8], vec![STORED]));
    tier.bytes().fill(0);
    assert_eq!(tier.get(0..12), [FOUND; 12]);
    assert!((0..12).all(|page| tier.is_right(page)));
}

#[test]
fn what_is_removed_leaves_a_tombstone_that_is_never_found_and_a_put_writes_over() {
    let Some((bucket, place)) = bucket() else { return };
    let tier = place.open();
    tier.fill();
    assert_eq!(tier.put(0..4), [STORED; 4]);
    assert_eq!(delete(&tier, 0..5), [FOUND, FOUND, FOUND, FOUND, MISSING]);
    assert_eq!(bucket.object(&object(2)).unwrap().len(), 32);
    assert!(bucket.object(&object(4)).is_none(), "what was not there has none");
    assert_eq!((delete(&tier, 0..4), exists(&tier, 0..4)), (vec![MISSING; 4], vec![MISSING; 4]));
    assert_eq!(tier.get(0..4), [MISSING; 4]);
    // An operator may remove tombstones.
    bucket.remove(&object(1));
    assert_eq!(tier.put(1..3), [STORED; 2]);
    assert_eq!(tier.get(0..4), [MISSING, FOUND, FOUND, MISSING]);
    assert!(tier.is_right(1) && tier.is_right(2));
}

#[test]
fn a_server_that_hangs_ends_every_page_in_time_and_no_memory_changes_when_it_goes_on() {
    let Some((bucket, place)) = bucket() else { return };
    let tier = place.open();
    tier.fill();
    assert_eq!(tier.put(0..60), [STORED; 60]);
    drop(tier);
    let (_place, tier) = hasty(&bucket, place);
    tier.bytes().fill(0xEE);
    bucket.hang(true);
    // More pages than may run at once, with all kinds of calls.
    let started = [
        tier.tier.get(Tag(10), &tier.pages(0..60)),
        tier.tier.exists(Tag(11), &[key(0), key(1)]),
        tier.tier.put(Tag(12), &tier.pages(60..62)),
        tier.tier.delete(Tag(13), &[key(59)]),
    ];
    assert_eq!(started, [0; 4]);
    let mut ended = std::collections::BTreeMap::new();
    poll_until("all 65 pages to end", || {
        let mut done = [TierCompletion::default(); 16];
        let count = tier.tier.poll(&mut done) as usize;
        for end in &done[..count] {
            // The deadline ends it before NIXL reports anything.
            let late = end.status == ErrorCode::TIMEOUT.0;
            assert!(late && ended.insert((end.tag, end.page), end.status).is_none(), "{end:?}");
        }
        if ended.len() == 65 { Ok(()) } else { Err(format!("{} of them", ended.len())) }
    });
    assert!((10..14).all(|tag| tier.tier.settled(Tag(tag)) == 1));
    bucket.hang(false);
    // Reads into the other half of the memory as soon as the tier is used again, until all calls that were given up must have
    // ended.
    let pages = tier.pages(0..60);
    let far = |page: &TierPage| TierPage { offset: page.offset + (PAGE * PAGES / 2) as u64, ..*page };
    let far: Vec<TierPage> = pages.iter().map(far).collect();
    let mut good = 0;
    until("three good reads in a row", || {
        // A few at a time, so that two seconds are enough on a busy machine.
        let read = |few: &[TierPage]| tier.finish(tier.tier.get(Tag(20), few), few.len());
        let ends: Vec<i32> = far.chunks(6).flat_map(read).collect();
        good = if ends == [FOUND; 60] { good + 1 } else { 0 };
        if good == 3 { Ok(()) } else { Err(format!("{ends:?}")) }
    });
    assert!(
        tier.bytes()[..60 * PAGE].iter().all(|byte| *byte == 0xEE),
        "memory changed after its batch had settled"
    );
    let half = &tier.bytes()[PAGE * PAGES / 2..];
    assert!(half[..60 * PAGE].chunks(PAGE).enumerate().all(|(page, found)| found == value(page)));
}

#[test]
fn a_server_that_dies_is_an_error_of_every_page_and_no_miss_and_a_shutdown_ends() {
    let Some((mut bucket, place)) = bucket() else { return };
    let tier = place.open();
    tier.fill();
    assert_eq!(tier.put(0..20), [STORED; 20]);
    drop(tier);
    let (place, tier) = hasty(&bucket, place);
    bucket.kill();
    let failed =
        |ends: Vec<i32>| ends.iter().all(|end| [ErrorCode::TIMEOUT.0, ErrorCode::IO.0].contains(end));
    assert!(failed(exists(&tier, 0..20)) && failed(tier.get(0..40)) && failed(tier.put(0..40)));
    assert!(failed(delete(&tier, 0..2)));
    tier.tier.shutdown(30_000).unwrap();
    assert_eq!(tier.tier.exists(Tag(9), &[key(0)]), ErrorCode::CLOSED.0);
    drop(tier);
    let opening = Opening { name: "t".into(), config: place.config.clone() };
    let catalog = Catalog::scan([place.plugins.path()]);
    let error = open_tier(catalog.find("nixl").unwrap(), &opening).err().unwrap().to_string();
    assert!(error.contains("bucket \"pages\" at http://127.0.0.1") && !error.contains(SECRET), "{error}");
}

#[test]
fn a_process_ends_well_while_nixl_still_waits_for_a_server() {
    let Some((bucket, place)) = bucket() else { return };
    let file = place.plugins.path().join("inside.toml");
    std::fs::write(&file, &place.config).unwrap();
    // Several times, because the exit races with threads.
    for way in ["return", "exit", "shutdown", "exit", "return", "exit", "exit", "exit"] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["objects::inside", "--exact", "--nocapture"]).env("NIXL_BUCKET_CONFIG", &file);
        let child = child.env("NIXL_BUCKET_PID", bucket.pid().to_string()).env("NIXL_BUCKET_WAY", way);
        let output = child.output().unwrap();
        bucket.hang(false);
        let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
        assert!(
            output.status.success() && said[0].contains("INSIDE DONE"),
            "{way}: {:?} {said:?}",
            output.status
        );
        assert!(!said.concat().contains(SECRET), "{said:?}");
    }
}

/// Not a test of its own: another test runs it in a process that ends while its server hangs.
#[test]
fn inside() {
    let Some(file) = std::env::var_os("NIXL_BUCKET_CONFIG") else { return };
    let mut place = place("").unwrap();
    place.config = std::fs::read_to_string(file).unwrap();
    let tier = place.open();
    tier.fill();
    assert_eq!(tier.put(0..3), [STORED; 3]);
    host_tests::cluster::signal(std::env::var("NIXL_BUCKET_PID").unwrap().parse().unwrap(), "STOP");
    let (pages, keys) = (tier.pages(0..30), [key(0)]);
    assert_eq!([tier.tier.get(Tag(1), &pages), tier.tier.exists(Tag(2), &keys)], [0, 0]);
    println!("INSIDE DONE");
    match std::env::var("NIXL_BUCKET_WAY").unwrap().as_str() {
        "return" => std::mem::forget(tier),
        "exit" => std::process::exit(0),
        _ => {
            // The shutdown reports that calls still run, or that none do.
            let ended = tier.tier.shutdown(1500);
            assert!(ended.is_ok_and(|()| true) || tier.tier.poll(&mut []) == ErrorCode::CLOSED.0);
            // The host also leaks an instance that did not end.
            std::mem::forget(tier);
        }
    }
}

#[test]
fn check_says_what_is_wrong_with_a_bucket_s_table_and_no_secret() {
    let Some(library) = nixl::library() else { return };
    let plugins = plugin_files::directory(&["nixl"]);
    let check = |storage: &str, environment: Option<(&str, &str)>| {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("host.toml");
        let text = format!("[plugin.nixl]\nlibrary = {:?}\n{storage}", library.display().to_string());
        std::fs::write(&file, text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
        command.args(["plugins", "check", "--executor", "synthetic", "--plugins", "nixl", "--plugins-dir"]);
        command.arg(plugins.path()).args(["--hierarchical-cache", "--decode-radix-cache"]);
        command.args(["--hicache-storage", "nixl"]).arg("--config").arg(file);
        command.env_remove("NIXL_PLUGIN_DIR").env_remove("AWS_DEFAULT_BUCKET").envs(environment);
        let output = command.output().unwrap();
        let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
        (output.status.code().unwrap(), said.concat())
    };
    let table = "[plugin.nixl.storage]\nbackend = \"OBJ\"\n";
    let keys = format!("access_key = \"me\", secret_key = {SECRET:?}");
    for (more, says) in [
        (String::new(), "AWS_DEFAULT_BUCKET"),
        ("directory = \"/tmp\"\n".to_owned(), "storage.directory"),
        (format!("parameters = {{ bukcet = \"pages\", {keys} }}\n"), "bukcet"),
        (format!("parameters = {{ bucket = \"pages\", secret_key = {SECRET:?} }}\n"), "access_key"),
        (format!("parameters = {{ bucket = 5, {keys} }}\n"), "expected a string"),
        (
            format!(
                "parameters = {{ bucket = \"pages\", access_key = \"me\", secret_key = [{SECRET:?}] }}\n"
            ),
            "not shown",
        ),
        (format!("prefix = \"a//b\"\nparameters = {{ bucket = \"pages\", {keys} }}\n"), "prefix"),
    ] {
        let (code, said) = check(&format!("{table}{more}"), None);
        assert!(code == 2 && said.contains(says) && !said.contains(SECRET), "{more}: {code} {said}");
    }
    // A right table is tried out by opening, and nothing listens at the endpoint. NIXL tries for a minute, so both cases run at
    // once.
    let endpoint = format!("endpoint_override = \"http://{}\"", host_tests::ports::unused());
    let is_tried = |bucket: &str, environment: Option<(&str, &str)>| {
        let parameters = format!("parameters = {{ {bucket}{endpoint}, {keys} }}\n");
        let (code, said) = check(&format!("{table}{parameters}"), environment);
        assert!(code == 2 && said.contains("did not open: IO") && !said.contains(SECRET), "{code} {said}");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| is_tried("bucket = \"pages\", ", None));
        scope.spawn(|| is_tried("", Some(("AWS_DEFAULT_BUCKET", "pages"))));
    });
}

#[test]
fn commands_that_list_say_why_they_cannot_and_no_secret() {
    let Some((_bucket, place)) = bucket() else { return };
    for command in [&["ls"][..], &["stat"], &["verify"], &["prune", "--all", "--yes"]] {
        let (code, said, error) = place.host(command);
        let told = format!("{said}{error}");
        assert!(code != 0 && told.contains("cannot list what is in bucket \"pages\""), "{command:?}: {told}");
        assert!(!told.contains(SECRET), "{told}");
    }
}
