//! Two instances in this process. One writes into the memory of the other.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use host_memory::SharedMemory;
use host_plugin_api::{
    Address, Completion, ErrorCode, Memory, MemoryKind, NOTIFICATION_BYTES, Notification, NotificationKind,
    PeerId, RegionId, Submission, Tag, TransferBackend, Write, capability,
};

use super::bytes::read_at;
use super::observe::wait_for;
use super::{Outcome, Stop, Subject};

/// Bytes of each side's region, unless a case gives another size.
pub const BYTES: usize = 1 << 20;
/// Generation under which the target's region is registered.
pub const GENERATION: u32 = 7;

/// A side that sends and a side that receives.
pub struct Pair {
    pub sender: Arc<dyn TransferBackend>,
    pub receiver: Arc<dyn TransferBackend>,
    pub source: SharedMemory,
    pub target: SharedMemory,
    pub from: RegionId,
    pub to: RegionId,
    pub peer: PeerId,
}

pub const NO_COMPLETION: Completion = Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 };

pub fn no_notification() -> Notification {
    Notification {
        kind: NotificationKind(0),
        length: 0,
        peer_name_length: 0,
        reserved: 0,
        payload: [0; NOTIFICATION_BYTES],
        peer_name: [0; 64],
    }
}

impl Pair {
    /// Opens both sides and connects the sender to the receiver.
    pub fn open(subject: &Subject) -> Result<Self, Stop> {
        Self::open_with(subject, BYTES)
    }

    /// As [`open`](Self::open), with regions of `bytes` bytes.
    pub fn open_with(subject: &Subject, bytes: usize) -> Result<Self, Stop> {
        let declares = |c| subject.declares("transfer", c);
        if !declares(capability::PAGE_WRITES) {
            return Err(Stop::Skip(
                "the manifest declares no page_writes, so there is nothing to write with".into(),
            ));
        }
        let memory = |name| SharedMemory::new(name, bytes).map_err(|e| Stop::Skip(format!("no memory: {e}")));
        let (source, target) = (memory("source")?, memory("target")?);
        let (sender, receiver) = (subject.transfer("sender")?, subject.transfer("receiver")?);
        let from = register(&*sender, &source, 1)?;
        let to = register(&*receiver, &target, GENERATION)?;
        let endpoint = receiver.endpoint().map_err(|e| format!("endpoint answered {e}"))?;
        let peer = sender.connect("receiver", &endpoint);
        let peer = peer.map_err(|e| format!("connect to another instance's endpoint answered {e}"))?;
        Ok(Self { sender, receiver, source, target, from, to, peer })
    }

    /// Connects the sender to the receiver again.
    pub fn connect(&mut self) -> Outcome {
        let endpoint = self.receiver.endpoint().map_err(|e| format!("endpoint answered {e}"))?;
        let peer = self.sender.connect("receiver", &endpoint);
        self.peer = peer.map_err(|e| format!("connect after a disconnect answered {e}"))?;
        Ok(())
    }

    /// A write from the source's region to the target's.
    pub fn write(&self, source_offset: u64, target_offset: u64, length: u32) -> Write {
        Write {
            source_region: self.from,
            target_region: self.to,
            source_offset,
            target_offset,
            length,
            target_generation: GENERATION,
        }
    }

    /// A submission without a notification.
    pub fn submission(&self, tag: u64) -> Submission {
        Submission {
            peer: self.peer,
            notification_length: 0,
            tag: Tag(tag),
            notification: [0; NOTIFICATION_BYTES],
        }
    }

    /// A submission with its tag as notification.
    pub fn notifying(&self, tag: u64) -> Submission {
        let mut submission = self.submission(tag);
        submission.notification[..8].copy_from_slice(&tag.to_le_bytes());
        submission.notification_length = 8;
        submission
    }

    /// Submits. Repeats the call while the backend answers `WOULD_BLOCK`.
    pub fn submit(&self, submission: &Submission, writes: &[Write]) -> Result<(), String> {
        let code = wait_for(|| {
            let code = self.sender.submit(submission, writes);
            (code != ErrorCode::WOULD_BLOCK.0).then_some(code)
        });
        match code {
            Some(0) => Ok(()),
            Some(code) => Err(format!("submit of {} writes answered {:?}", writes.len(), ErrorCode(code))),
            None => Err("submit answered WOULD_BLOCK for ever, with nothing in flight".to_owned()),
        }
    }

    /// Waits for the next completion, `None` if patience ends.
    pub fn completion(&self) -> Result<Option<Completion>, String> {
        let mut one = [NO_COMPLETION];
        let answer = wait_for(|| match self.sender.poll(&mut one) {
            0 => None,
            code => Some(code),
        });
        match answer {
            None => Ok(None),
            Some(1) => Ok(Some(one[0])),
            Some(code) => Err(format!("poll with room for one answered {:?}", ErrorCode(code))),
        }
    }

    /// Submits without a notification, and waits for the completion.
    pub fn transfer(&self, tag: u64, writes: &[Write]) -> Result<(), String> {
        self.complete(&self.submission(tag), writes)
    }

    /// Submits, and waits for the completion.
    pub fn complete(&self, submission: &Submission, writes: &[Write]) -> Result<(), String> {
        self.submit(submission, writes)?;
        let tag = submission.tag.0;
        let done = self.completion()?.ok_or_else(|| format!("submission {tag} never completed"))?;
        let bytes: u64 = writes.iter().map(|w| u64::from(w.length)).sum();
        match done {
            Completion { tag: Tag(found), .. } if found != tag => {
                Err(format!("submission {tag} alone is in flight, but {found} completed"))
            }
            Completion { status: 0, bytes: found, .. } if found == bytes => Ok(()),
            Completion { status: 0, bytes: found, .. } => {
                Err(format!("submission {tag} of {bytes} bytes completed with {found} bytes"))
            }
            Completion { status, .. } => {
                Err(format!("submission {tag} completed with {:?}", ErrorCode(status)))
            }
        }
    }

    /// Waits for the next notification, `None` if patience ends.
    pub fn notification(&self) -> Result<Option<Notification>, String> {
        let mut one = [no_notification()];
        let answer = wait_for(|| match self.receiver.notifications(&mut one) {
            0 => None,
            code => Some(code),
        });
        match answer {
            None => Ok(None),
            Some(1) => Ok(Some(one[0])),
            Some(code) => Err(format!("notifications with room for one answered {:?}", ErrorCode(code))),
        }
    }
}

/// Registers all of a piece of memory.
pub fn register(
    backend: &dyn TransferBackend,
    memory: &SharedMemory,
    generation: u32,
) -> Result<RegionId, String> {
    let offered = Memory {
        address: Address::of(memory.address().as_ptr()),
        length: memory.bytes() as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: memory.fd().as_raw_fd(),
        generation,
        fd_offset: 0,
    };
    backend.register(&offered).map_err(|e| format!("register of shared host memory answered {e}"))
}

/// A copy of the memory's bytes.
pub fn read(memory: &SharedMemory) -> Vec<u8> {
    let mut bytes = vec![0; memory.bytes()];
    read_at(memory, 0, &mut bytes);
    bytes
}
