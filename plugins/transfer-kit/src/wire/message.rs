//! Messages of two instances about their connections.

use host_plugin_api::Result;

use super::reader::HOST_MEMORY;
use super::{Format, REASON_BYTES, Reader, put};
use crate::regions::RegionDescriptor;
use crate::system::Random;

/// A message from one instance to another about a connection, which the side that connected has numbered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// I want to write into your memory.
    Hello {
        /// From your endpoint.
        token: Random,
        /// The name under which I was opened.
        name: String,
    },
    /// Here is an inbound endpoint for you alone, and the memory behind it.
    Welcome {
        /// Where it is.
        address: Vec<u8>,
        /// What you may write.
        regions: Vec<RegionDescriptor>,
    },
    /// Your hello is refused.
    Refused {
        /// An error code.
        code: i32,
        /// What happened. No more than [`REASON_BYTES`] of it are sent.
        reason: String,
    },
    /// Close the inbound endpoint of my connection.
    Cut,
    /// It is closed: nothing that was sent through it lands any more.
    CutDone,
    /// I have closed the inbound endpoint of your connection.
    Closed,
    /// All my inbound endpoints are closed, and I say nothing more.
    Bye,
}

impl Message {
    /// Appends the kind of the message, and its fields.
    pub fn encode(&self, format: &Format, to: &mut Vec<u8>) {
        let [hello, welcome, refused, cut, cut_done, closed, bye] = format.kinds;
        match self {
            Self::Hello { token, name } => {
                to.push(hello);
                to.extend(token);
                put(to, name.as_bytes());
            }
            Self::Welcome { address, regions } => {
                to.push(welcome);
                put(to, address);
                to.extend((regions.len() as u32).to_le_bytes());
                for region in regions {
                    to.extend(region.id.0.to_le_bytes());
                    to.extend(region.generation.to_le_bytes());
                    to.extend(region.address.to_le_bytes());
                    to.extend(region.length.to_le_bytes());
                    if format.devices {
                        to.extend(region.device.unwrap_or(HOST_MEMORY).to_le_bytes());
                    }
                }
            }
            Self::Refused { code, reason } => {
                to.push(refused);
                to.extend(code.to_le_bytes());
                let end = (0..=reason.len().min(REASON_BYTES)).rev().find(|at| reason.is_char_boundary(*at));
                put(to, &reason.as_bytes()[..end.unwrap_or(0)]);
            }
            Self::Cut => to.push(cut),
            Self::CutDone => to.push(cut_done),
            Self::Closed => to.push(closed),
            Self::Bye => to.push(bye),
        }
    }

    /// Reads the fields of a kind that was read. `None` when the kind is the backend's own.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for damaged bytes.
    pub fn decode(kind: u8, format: &Format, at: &mut Reader<'_>) -> Result<Option<Self>> {
        let Some(which) = format.kinds.iter().position(|known| *known == kind) else { return Ok(None) };
        Ok(Some(match which {
            0 => Self::Hello { token: at.array()?, name: at.name()? },
            1 => Self::Welcome { address: at.address(format)?, regions: at.regions(format)? },
            2 => {
                let code = i32::from_le_bytes(at.array()?);
                let reason = String::from_utf8_lossy(at.piece(REASON_BYTES)?).into_owned();
                Self::Refused { code, reason }
            }
            3 => Self::Cut,
            4 => Self::CutDone,
            5 => Self::Closed,
            _ => Self::Bye,
        }))
    }
}
