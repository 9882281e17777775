//! Entry points for fuzzing: decode bytes as other instances send them.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use host_plugin_api::RegionId;
use host_transfer_kit::RegionDescriptor;
use host_transfer_kit::wire::{Endpoint, Message};

use crate::transfer::wire::{Body, FORMAT, Frame};

/// Decodes bytes as a frame's text, as a frame before it becomes text, and as an endpoint. True when they are one of these.
#[must_use]
pub fn wire(bytes: &[u8]) -> bool {
    let read = |text: &str| {
        Frame::decode(text).is_ok_and(|frame| {
            assert_eq!(Frame::decode(&frame.encode()).ok(), Some(frame));
            true
        })
    };
    let text = read(&String::from_utf8_lossy(bytes));
    let frame = read(&BASE64_STANDARD.encode(bytes));
    let endpoint = Endpoint::decode(bytes, &FORMAT).is_ok_and(|endpoint| {
        assert_eq!(endpoint.encode(&FORMAT), bytes);
        true
    });
    text || frame || endpoint
}

/// Seeds: some of each kind.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let region =
        RegionDescriptor { id: RegionId(3), generation: 1, address: 1 << 20, length: 4096, device: None };
    let bodies = [
        Body::Connection(Message::Hello { token: [4; 16], name: "prefill-0".into() }),
        Body::Connection(Message::Welcome { address: b"127.0.0.1:9".to_vec(), regions: vec![region; 2] }),
        Body::Arrived { payload: vec![0; 48] },
        Body::Heard,
    ];
    let frame = |body| Frame {
        from: [9; 16],
        to: [8; 16],
        session: "127.0.0.1:15001".to_owned(),
        stream: 3,
        number: 4,
        heard: (5, 6),
        connection: 7,
        body,
    };
    let texts: Vec<String> = bodies.into_iter().map(|body| frame(body).encode()).collect();
    let mut seeds: Vec<Vec<u8>> = texts.iter().filter_map(|text| BASE64_STANDARD.decode(text).ok()).collect();
    seeds.extend(texts.into_iter().next().map(String::into_bytes));
    let address = b"127.0.0.1:15001".to_vec();
    let endpoint = Endpoint { token: [1; 16], instance: [2; 16], name: "decode-0".into(), address };
    seeds.push(endpoint.encode(&FORMAT));
    seeds
}
