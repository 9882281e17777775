//! Fuzzes the messages between workers, one message at a time.

use host_core::aux_row::{AUX_ROW_BYTES, AuxRow};
use host_core::notice::{LaneNotice, PieceNotice};
use host_core::staging::message::Message;
use host_wire::convert::{read_message, read_request, write_message};
use host_wire::proto::{ControlMessage, GenerateRequest};
use prost::Message as _;

/// A notice that travels with a transfer.
#[must_use]
pub fn notice(bytes: &[u8]) -> bool {
    let lane = LaneNotice::decode(bytes);
    if let Some(lane) = lane {
        assert_eq!(LaneNotice::decode(&lane.encode()), Some(lane));
        assert!(lane.fragment < lane.fragments);
    }
    let piece = PieceNotice::decode(bytes);
    if let Some(piece) = piece {
        assert_eq!(PieceNotice::decode(&piece.encode()), Some(piece));
    }
    assert!(lane.is_none() || piece.is_none(), "two kinds at once");
    lane.is_some() || piece.is_some()
}

/// A message about staging memory.
#[must_use]
pub fn staging_message(bytes: &[u8]) -> bool {
    let Some(message) = Message::decode(bytes) else { return false };
    assert_eq!(Message::decode(&message.encode()), Some(message));
    true
}

/// An aux row. A fuzzer cannot guess the checksum, so a row whose last byte is odd gets the right one.
#[must_use]
pub fn aux_row(bytes: &[u8]) -> bool {
    let Some(row) = bytes.first_chunk::<AUX_ROW_BYTES>() else { return false };
    let mut row = *row;
    if row[AUX_ROW_BYTES - 1] % 2 == 1 {
        let (content, sum) = row.split_at_mut(AUX_ROW_BYTES - 8);
        // FNV-1a, the checksum of aux rows.
        let right = content.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        sum.copy_from_slice(&right.to_le_bytes());
    }
    let Ok(read) = AuxRow::decode(&row) else { return false };
    let again = AuxRow::decode(&read.encode()).expect("what is encoded is decoded");
    // Floats are not compared, because NaN is not equal to itself.
    assert_eq!((again.room, again.pages, again.first.token), (read.room, read.pages, read.first.token));
    assert_eq!(again.first.top.len(), read.first.top.len());
    true
}

/// A message of the control plane, or a request, as protobuf.
#[must_use]
pub fn control_message(bytes: &[u8]) -> bool {
    let message = ControlMessage::decode(bytes).ok().and_then(|message| read_message(message).ok());
    if let Some(message) = &message {
        assert_eq!(read_message(write_message(message)).as_ref(), Ok(message));
    }
    let request = GenerateRequest::decode(bytes).ok().and_then(|request| read_request(request).ok());
    message.is_some() || request.is_some()
}
