//! Entrances for fuzzing: what other instances send, as functions of bytes.

use host_plugin_api::{Error, ErrorCode};

use crate::cuda::{Export, IpcHandle, Uuid};
use crate::regions::{Place, RegionDescriptor};
use crate::wire::{Endpoint, Hello, LetGo, decode_welcome, encode_welcome};

/// An endpoint, a hello, a welcome, or the message to let a region go. True when it is one of them, and then it comes back as it was.
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
    let welcome = decode_welcome(bytes).is_ok_and(|welcome| {
        if let Ok(regions) = &welcome {
            assert_eq!(encode_welcome(Ok(regions)), bytes);
        }
        true
    });
    let let_go = LetGo::decode(bytes).is_ok_and(|message| {
        assert_eq!(message.encode(), bytes);
        true
    });
    endpoint || hello || welcome || let_go
}

/// One of each.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let name = || "prefill-0".to_owned();
    let region = RegionDescriptor { id: 130, generation: 7, length: 9, place: Place::File { offset: 4096 } };
    let export = Export { uuid: Uuid([8; 16]), handle: IpcHandle([9; 64]), offset: 512 };
    let on_device = RegionDescriptor { place: Place::Device(export), ..region };
    vec![
        Endpoint { socket: [1; 16], token: [2; 16], instance: [3; 16], name: name() }.encode(),
        Hello { token: [4; 16], instance: [5; 16], name: name() }.encode(),
        encode_welcome(Ok(&[region; 3])),
        encode_welcome(Ok(&[region, on_device, region])),
        encode_welcome(Err(&Error::new(ErrorCode::VERSION, "another version"))),
        LetGo { region: 130 }.encode(),
    ]
}
