//! The guard catches a panic in any method of a storage tier: the call answers `PANICKED`, and so does every later one.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use host_plugin_api::abi::{RSlice, RSliceMut, open_guarded_tier};
use host_plugin_api::{Address, ErrorCode, Key, Memory, MemoryKind, RegionId, Tag, TierCompletion, TierPage};

const METHODS: [&str; 13] = [
    "limits",
    "register",
    "deregister",
    "exists",
    "get",
    "put",
    "delete",
    "poll",
    "cancel",
    "settled",
    "scan",
    "usage",
    "shutdown",
];

#[test]
fn a_panic_in_any_method_is_a_code_and_the_first_text_is_kept() {
    for method in METHODS {
        let config = format!("in = \"tier.{method}\"");
        let opened =
            open_guarded_tier(host_plugin_panicking_roles::open_store, "test".into(), config.as_str().into());
        let tier = opened.into_result().map_err(|error| error.message).unwrap();
        let (keys, mut room) = ([Key([1; 32])], [Key([0; 32])]);
        let page = TierPage { key: keys[0], region: RegionId(1), length: 1, offset: 0 };
        let memory = Memory {
            address: Address(0),
            length: 0,
            kind: MemoryKind::DRAM,
            device: 0,
            fd: -1,
            generation: 0,
            fd_offset: 0,
        };
        let mut done = [TierCompletion::default()];
        let text = |error: host_plugin_api::abi::AbiError| error.message.to_string();
        let said = match method {
            "limits" => Ok(i32::from(tier.limits().max_pages == 0) * ErrorCode::PANICKED.0),
            "register" => Err(tier.register(&memory).into_result().map_err(text).unwrap_err()),
            "deregister" => Err(tier.deregister(RegionId(1)).into_result().map_err(text).unwrap_err()),
            "exists" => Ok(tier.exists(Tag(1), RSlice::from_slice(&keys))),
            "get" => Ok(tier.get(Tag(1), RSlice::from_slice(&[page]))),
            "put" => Ok(tier.put(Tag(1), RSlice::from_slice(&[page]))),
            "delete" => Ok(tier.delete(Tag(1), RSlice::from_slice(&keys))),
            "poll" => Ok(tier.poll(RSliceMut::from_mut_slice(&mut done))),
            "cancel" => Ok(tier.cancel(Tag(1))),
            "settled" => Ok(tier.settled(Tag(1))),
            "scan" => {
                let scanned = tier.scan(0, RSliceMut::from_mut_slice(&mut room)).into_result();
                Err(scanned.map(drop).map_err(text).unwrap_err())
            }
            "usage" => Err(tier.usage().into_result().map(drop).map_err(text).unwrap_err()),
            _ => Err(tier.shutdown(1).into_result().map_err(text).unwrap_err()),
        };
        let names = format!("told to panic in tier.{method}");
        match said {
            Ok(code) => assert_eq!(code, ErrorCode::PANICKED.0, "{method}"),
            Err(text) => assert!(text.contains(&names), "{method}: {text}"),
        }
        let later = tier.usage().into_result().map(drop).map_err(text).unwrap_err();
        assert!(later.contains(&names), "{method}: {later}");
    }
}
