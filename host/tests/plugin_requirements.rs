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
    let lacking: Vec<_> = violations.iter().map(|v| v.capability).collect();
    assert_eq!(lacking, ["arrival_notification", "settled", "peer_restart"]);
    assert_eq!(
        violations[0].to_string(),
        "PdTransfer needs arrival_notification, because decode must not read a page before its data is there: \
         plugin \"null\" declares page_writes; use instead: shm"
    );

    let more = [&common[..], &[Feature::DeviceMemory, Feature::RemoteWorkers]].concat();
    let violations = check(&more, &[shm], &installed).unwrap_err();
    assert_eq!(violations.iter().map(|v| v.capability).collect::<Vec<_>>(), ["vram", "multi_host"]);
    assert!(violations[0].to_string().ends_with("; no installed plugin has it"));

    let violations = check(&[Feature::PdTransfer], &[], &installed).unwrap_err();
    assert_eq!(violations.len(), 2);
    assert!(violations[0].to_string().contains("no transfer plugin is loaded"));
}
