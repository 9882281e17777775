//! Entry points for fuzzing: decode bytes as other instances send them.

use host_plugin_api::RegionId;
use host_transfer_kit::RegionDescriptor;
use host_transfer_kit::wire::{Endpoint, Message};

use crate::wire::{Body, FORMAT, Frame};

/// Decodes bytes as a frame and as an endpoint. True when they are one of these. Encoding must then preserve it.
#[must_use]
pub fn wire(bytes: &[u8]) -> bool {
    let frame = Frame::decode(bytes).is_ok_and(|frame| {
        assert_eq!(Frame::decode(&frame.encode()).ok(), Some(frame));
        true
    });
    let endpoint = Endpoint::decode(bytes, &FORMAT).is_ok_and(|endpoint| {
        assert_eq!(endpoint.encode(&FORMAT), bytes);
        true
    });
    frame || endpoint
}

/// Seeds: some of each kind.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let region =
        RegionDescriptor { id: RegionId(3), generation: 1, address: 1 << 20, length: 4096, device: None };
    let bodies = [
        (Message::Hello { token: [4; 16], name: "prefill-0".into() }, vec![1, 2, 3]),
        (Message::Welcome { address: vec![5; 9], regions: vec![region; 2] }, Vec::new()),
        (Message::Cut, Vec::new()),
    ];
    let frame = |body| Frame { instance: [9; 16], connection: 77, body }.encode();
    let mut seeds: Vec<Vec<u8>> =
        bodies.into_iter().map(|(message, front)| frame(Body::Connection { message, front })).collect();
    seeds.push(frame(Body::Ping));
    let addresses = vec![([127, 0, 0, 1], 4000).into()];
    seeds.push(frame(Body::Introduction { front: vec![1, 2, 3], addresses }));
    let endpoint =
        Endpoint { token: [1; 16], instance: [2; 16], name: "decode-0".into(), address: vec![7; 12] };
    seeds.push(endpoint.encode(&FORMAT));
    seeds
}
