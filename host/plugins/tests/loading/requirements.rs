//! A combination that cannot work is refused with all violations and with alternatives that would work.

use host_plugins::Catalog;
use host_plugins::requirements::{Feature, check};
use host_tests::plugin_files;

#[test]
fn all_violations_are_listed_with_what_has_the_capability() {
    let directory = plugin_files::directory(&["null", "shm"]);
    let installed = Catalog::scan([directory.path()]);
    let manifest = |name: &str| &installed.find(name).unwrap().manifest;
    let (shm, null) = (manifest("shm"), manifest("null"));
    let common = [Feature::PdTransfer, Feature::CachedPagesSent, Feature::SupervisedRestart];
    assert_eq!(check(&common, &[shm], &installed), Ok(()));
    assert_eq!(check(&[], &[null], &installed), Ok(()));

    let violations = check(&common, &[null], &installed).unwrap_err();
    let lacking: Vec<_> = violations.iter().map(|v| v.need.to_string()).collect();
    assert_eq!(lacking, ["page_writes", "arrival_notification", "settled", "peer_restart"]);
    assert_eq!(
        violations[0].to_string(),
        "PdTransfer needs page_writes, because prefill writes pages into the decode worker's pool: \
         plugin \"null\" declares nothing; use instead: shm"
    );

    let more = [&common[..], &[Feature::RemoteWorkers]].concat();
    let violations = check(&more, &[shm], &installed).unwrap_err();
    let lacking: Vec<_> = violations.iter().map(|v| v.need.to_string()).collect();
    assert_eq!(lacking, ["multi_host"]);
    assert!(violations[0].to_string().ends_with("; no installed plugin has it"));

    let violations = check(&[Feature::PdTransfer], &[], &installed).unwrap_err();
    assert_eq!(violations.len(), 2);
    assert!(violations[0].to_string().contains("no transfer plugin is loaded"));
}

#[test]
fn needs_of_other_roles_and_features_against_each_other_are_checked_in_the_same_pass() {
    let directory = plugin_files::directory(&["null", "shm", "memory", "plain"]);
    let installed = Catalog::scan([directory.path()]);
    let manifest = |name: &str| &installed.find(name).unwrap().manifest;
    let all = [Feature::DecodeRadixCache, Feature::HierarchicalCache, Feature::StorageCache];
    assert_eq!(check(&all, &[manifest("shm"), manifest("memory")], &installed), Ok(()));
    assert_eq!(check(&[Feature::SlidingWindow], &[manifest("plain")], &installed), Ok(()));

    let wrong =
        [Feature::Aggregated, Feature::DecodeRadixCache, Feature::StorageCache, Feature::SlidingWindow];
    let violations = check(&wrong, &[manifest("shm")], &installed).unwrap_err();
    let said: Vec<_> = violations.iter().map(ToString::to_string).collect();
    assert_eq!(
        said,
        [
            "StorageCache needs HierarchicalCache, because pages reach storage through host memory: give \
             --hierarchical-cache, or leave --hicache-storage out",
            "StorageCache needs settled, because a failed restore's pages are reused only when the tier touches them no \
             more: no tier plugin is loaded; use instead: memory; or leave --hicache-storage out",
            "SlidingWindow needs window, because layers with a window have pages of their own, given back behind it: no \
             allocator plugin is loaded; use instead: --allocator plain",
            "Aggregated needs the absence of DecodeRadixCache, because there is no decode worker; --prefill-radix-cache is \
             the cache of an aggregated one: give --no-decode-radix-cache, or leave --role aggregated out",
        ]
    );
}

#[test]
fn a_model_with_windows_needs_an_allocator_for_them_and_the_refusal_says_which_flag_names_one() {
    let directory = plugin_files::directory(&["shm", "plain", "swa"]);
    let installed = Catalog::scan([directory.path()]);
    let manifest = |name: &str| &installed.find(name).unwrap().manifest;
    let window = [Feature::SlidingWindow];
    assert_eq!(check(&window, &[manifest("swa")], &installed), Ok(()));
    let said = |features: &[Feature], loaded: &[&str], installed: &Catalog| -> Vec<String> {
        let loaded: Vec<_> = loaded.iter().map(|name| manifest(name)).collect();
        check(features, &loaded, installed).unwrap_err().iter().map(ToString::to_string).collect()
    };
    assert_eq!(
        said(&[Feature::LayerState], &["swa"], &installed),
        [
            "LayerState needs state, because layers with a state have pages of their own, which each sequence has a fixed number \
          of: plugin \"swa\" declares window; use instead: --allocator plain"
        ]
    );
    assert_eq!(
        said(&window, &["shm"], &installed),
        [
            "SlidingWindow needs window, because layers with a window have pages of their own, given back behind it: no \
          allocator plugin is loaded; use instead: --allocator plain, swa"
        ]
    );
    let without = plugin_files::directory(&["shm"]);
    assert_eq!(
        said(&window, &["shm"], &Catalog::scan([without.path()])),
        [
            "SlidingWindow needs window, because layers with a window have pages of their own, given back behind it: no \
          allocator plugin is loaded; no installed plugin has it: put one that does into a directory of --plugins-dir"
        ]
    );
    assert_eq!(
        said(&[Feature::WindowRatio], &["shm"], &installed),
        [
            "WindowRatio needs SlidingWindow, because --swa-full-tokens-ratio divides the pool between full and sliding \
          layers, and is left out for a model without any: leave --swa-full-tokens-ratio out"
        ]
    );
}

#[test]
fn a_feature_that_is_excluded_is_said_to_be_and_asks_nothing_of_plugins() {
    let violations =
        check(&[Feature::Aggregated, Feature::DecodeRadixCache], &[], &Catalog::default()).unwrap_err();
    let said: Vec<_> = violations.iter().map(ToString::to_string).collect();
    assert_eq!(
        said,
        [
            "Aggregated needs the absence of DecodeRadixCache, because there is no decode worker; --prefill-radix-cache is \
          the cache of an aggregated one: give --no-decode-radix-cache, or leave --role aggregated out"
        ]
    );
}

/// The table has every rule that is kept of another system's list, under the name on the page, and the page has every row of the
/// table.
#[test]
fn the_page_about_rules_and_the_table_name_the_same() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/plugins/rules.md");
    let page = std::fs::read_to_string(page).unwrap();
    let rules = host_plugins::requirements::RULES;
    let mut names: Vec<&str> = rules.iter().map(|rule| rule.name).collect();
    for name in &names {
        assert!(page.contains(&format!("`{name}`")), "the rule {name} is not on the page");
    }
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), rules.len(), "names are unique");
    let mut numbers = std::collections::BTreeSet::new();
    for line in page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| ---")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        if let [number, "rule", what, _] = cells[..] {
            for name in what.split(", ").map(|name| name.trim_matches('`')) {
                assert!(names.contains(&name), "row {number} keeps {name}, which is not in the table");
            }
        }
        for number in cells[0].split(", ").flat_map(range) {
            assert!(numbers.insert(number), "{number} is answered twice");
        }
    }
    assert_eq!(numbers.into_iter().collect::<Vec<_>>(), (1..=73).collect::<Vec<_>>(), "each of the 73 once");
}

/// The numbers of a cell such as `7` or `7-9`. Empty for cells without numbers.
fn range(text: &str) -> Vec<u32> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) => (first..=last).collect(),
        _ => Vec::new(),
    }
}
