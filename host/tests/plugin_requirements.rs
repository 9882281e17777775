//! A combination that cannot work is refused with everything that is wrong, and with what would work.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "plugin_support/fixture.rs"]
mod fixture;

use host::plugins::Catalog;
use host::plugins::requirements::{Feature, check};

#[test]
fn all_violations_are_listed_with_what_has_the_capability() {
    let directory = fixture::directory(&["null", "shm"]);
    let installed = Catalog::scan([directory.path()]);
    let manifest = |name: &str| &installed.find(name).unwrap().manifest;
    let (shm, null) = (manifest("shm"), manifest("null"));
    let common = [Feature::PdTransfer, Feature::PagesOutliveRequests, Feature::SupervisedRestart];
    assert_eq!(check(&common, &[shm], &installed), Ok(()));
    assert_eq!(check(&[], &[null], &installed), Ok(()));

    let violations = check(&common, &[null], &installed).unwrap_err();
    let lacking: Vec<_> = violations.iter().map(|v| v.need.to_string()).collect();
    assert_eq!(lacking, ["page_writes", "arrival_notification", "settled", "settled", "peer_restart"]);
    assert_eq!(
        violations[0].to_string(),
        "PdTransfer needs page_writes, because prefill writes pages into the decode worker's pool: \
         plugin \"null\" declares nothing; use instead: shm"
    );

    let more = [&common[..], &[Feature::DeviceMemory, Feature::RemoteWorkers]].concat();
    let violations = check(&more, &[shm], &installed).unwrap_err();
    let lacking: Vec<_> = violations.iter().map(|v| v.need.to_string()).collect();
    assert_eq!(lacking, ["vram", "multi_host"]);
    assert!(violations[0].to_string().ends_with("; no installed plugin has it"));

    let violations = check(&[Feature::PdTransfer], &[], &installed).unwrap_err();
    assert_eq!(violations.len(), 3);
    assert!(violations[0].to_string().contains("no transfer plugin is loaded"));
}

#[test]
fn needs_of_other_roles_and_features_against_each_other_are_checked_in_the_same_pass() {
    let directory = fixture::directory(&["null", "shm", "memory", "plain"]);
    let installed = Catalog::scan([directory.path()]);
    let manifest = |name: &str| &installed.find(name).unwrap().manifest;
    let all = [
        Feature::DecodeRadixCache,
        Feature::HierarchicalCache,
        Feature::StorageCache,
        Feature::WindowTail,
        Feature::SlidingWindow,
    ];
    assert_eq!(check(&all, &[manifest("shm"), manifest("memory"), manifest("plain")], &installed), Ok(()));

    let wrong =
        [Feature::DecodeRadixCache, Feature::NoPrefixCache, Feature::SharedStorage, Feature::WindowTail];
    let violations = check(&wrong, &[manifest("shm"), manifest("memory")], &installed).unwrap_err();
    let said: Vec<_> = violations.iter().map(ToString::to_string).collect();
    assert_eq!(
        said,
        [
            "DecodeRadixCache needs the absence of NoPrefixCache, because the tree is the prefix cache that is \
             switched off: turn one of them off",
            "SharedStorage needs StorageCache, because there must be a storage tier to share: turn it on, too",
            "SharedStorage needs shared, because workers look for pages that another machine stored: plugin \
             \"memory\" declares settled, scan; no installed plugin has it",
            "WindowTail needs SlidingWindow, because only a window has a tail: turn it on, too",
            "WindowTail needs tail_extend, because decode takes pages for the window's tail alone, not for the whole \
             prompt: no allocator plugin is loaded; use instead: plain",
        ]
    );
}
