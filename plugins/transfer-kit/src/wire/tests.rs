use super::*;
use crate::regions::RegionDescriptor;
use host_plugin_api::RegionId;

const FORMAT: Format = Format {
    magic: Magic { bytes: *b"testkit\x03", plugin: "test" },
    address_bytes: 300,
    check_address: |address| address.is_empty().then_some("its address is empty"),
    devices: true,
    kinds: [1, 2, 3, 5, 6, 7, 8],
};

fn decoded(bytes: &[u8]) -> Result<Option<Message>> {
    let mut at = Reader::new(bytes, &FORMAT.magic, "a message")?;
    let [kind] = at.array()?;
    let message = Message::decode(kind, &FORMAT, &mut at)?;
    at.end()?;
    Ok(message)
}

fn encoded(message: &Message) -> Vec<u8> {
    let mut bytes = FORMAT.magic.bytes.to_vec();
    message.encode(&FORMAT, &mut bytes);
    bytes
}

#[test]
fn what_is_encoded_is_decoded_and_every_cut_is_an_error() {
    let endpoint =
        Endpoint { token: [1; 16], instance: [2; 16], name: "prefill-0".into(), address: vec![3; 170] };
    let bytes = endpoint.encode(&FORMAT);
    assert_eq!(Endpoint::decode(&bytes, &FORMAT).unwrap(), endpoint);
    assert!((0..bytes.len()).all(|cut| Endpoint::decode(&bytes[..cut], &FORMAT).is_err()));
    let region =
        RegionDescriptor { id: RegionId(1), generation: 2, address: 4096, length: 8192, device: Some(3) };
    let host = RegionDescriptor { device: None, ..region };
    for message in [
        Message::Hello { token: [4; 16], name: "n".repeat(64) },
        Message::Welcome { address: vec![5; 300], regions: vec![region, host, region] },
        Message::Refused { code: -10, reason: "full".into() },
        Message::Cut,
        Message::CutDone,
        Message::Closed,
        Message::Bye,
    ] {
        let bytes = encoded(&message);
        assert_eq!(decoded(&bytes).unwrap(), Some(message.clone()));
        assert!((0..bytes.len()).all(|cut| decoded(&bytes[..cut]).is_err()), "{message:?}");
    }
    let own = [&FORMAT.magic.bytes[..], &[4]].concat();
    assert_eq!(decoded(&own).unwrap(), None, "a kind of the backend's own");
}

#[test]
fn damage_and_other_versions_are_named() {
    let region =
        RegionDescriptor { id: RegionId(1), generation: 2, address: u64::MAX, length: 1, device: None };
    let bytes = encoded(&Message::Welcome { address: vec![1], regions: vec![region] });
    assert!(decoded(&bytes).unwrap_err().message.contains("past the end"));
    let bytes = encoded(&Message::Welcome { address: Vec::new(), regions: Vec::new() });
    assert!(decoded(&bytes).unwrap_err().message.contains("its address is empty"));
    let bytes = encoded(&Message::Refused { code: -1, reason: "ü".repeat(400) });
    assert_eq!(decoded(&bytes).unwrap(), Some(Message::Refused { code: -1, reason: "ü".repeat(256) }));
    let mut bytes = encoded(&Message::Bye);
    bytes[7] = 9;
    let error = decoded(&bytes).unwrap_err();
    assert!(error.code == ErrorCode::VERSION && error.message.contains("version 9"), "{error}");
    let error = decoded(b"another plugin's").unwrap_err();
    assert!(error.code == ErrorCode::VERSION && error.message.contains("both sides need test"), "{error}");
}
