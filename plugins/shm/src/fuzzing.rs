//! Entry points for fuzzing: decode bytes as other instances send them.

use host_plugin_api::{Error, ErrorCode};

use crate::cuda::{Export, IpcHandle, Uuid};
use crate::regions::{RegionDescriptor, RegionPlace};
use crate::wire::{Endpoint, Hello, LetGo, Version, Welcome, decode_welcome, encode_refusal, encode_welcome};

const VERSIONS: [Version; 2] = [Version::One, Version::Two];

/// Decodes bytes as an endpoint, as a hello or a welcome of either version, and as the message to let a region go. True
/// when they are one of these. Encoding must then give the same bytes.
#[must_use]
pub fn wire(bytes: &[u8]) -> bool {
    let endpoint = Endpoint::decode(bytes).is_ok_and(|endpoint| {
        assert_eq!(endpoint.encode(), bytes);
        true
    });
    let hello = Hello::decode(bytes).is_ok_and(|hello| {
        assert_eq!(hello.encode(), bytes);
        true
    });
    let welcome = VERSIONS.map(|asked| {
        decode_welcome(bytes, asked).is_ok_and(|welcome| {
            match welcome {
                Welcome::Regions(regions) => {
                    assert_eq!(encode_welcome(asked, &regions).as_deref(), Some(bytes))
                }
                Welcome::Refused { version, .. } => assert_eq!(Version::of(bytes), Some(version)),
            }
            true
        })
    });
    let let_go = LetGo::decode(bytes).is_ok_and(|message| {
        assert_eq!(message.encode(), bytes);
        true
    });
    endpoint || hello || welcome.contains(&true) || let_go
}

/// One of each, in both versions where they differ.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let name = || "prefill-0".to_owned();
    let region =
        RegionDescriptor { id: 130, generation: 7, length: 9, place: RegionPlace::File { offset: 4096 } };
    let export = Export { uuid: Uuid([8; 16]), handle: IpcHandle([9; 64]), offset: 512 };
    let on_device = RegionDescriptor { place: RegionPlace::Device(export), ..region };
    let error = Error::new(ErrorCode::VERSION, "another version");
    let hello = |version| Hello { version, token: [4; 16], instance: [5; 16], name: name() }.encode();
    let mut seeds = vec![
        Endpoint { socket: [1; 16], token: [2; 16], instance: [3; 16], name: name() }.encode(),
        LetGo { region: 130 }.encode(),
    ];
    seeds.extend(VERSIONS.map(hello));
    seeds.extend(VERSIONS.map(|version| encode_refusal(version, &error)));
    seeds.extend(VERSIONS.map(|version| encode_welcome(version, &[region; 3])).into_iter().flatten());
    seeds.extend(encode_welcome(Version::Two, &[region, on_device, region]));
    seeds
}
