//! A connection on which we are the sender.

use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use host_plugin_api::{Error, ErrorCode, PeerId, Result, Submission, Write};
use host_transfer_kit::{Event, Peer, Random, locked};

use crate::control::{Busy, ControlPage};
use crate::live::LiveTable;
use crate::mapping::{Mapping, SharedPage, cannot_shrink};
use crate::regions::RegionDescriptor;

/// See the module.
pub struct Outbound {
    pub id: PeerId,
    /// What the host called the peer.
    pub name: String,
    /// The name it was opened under.
    pub own_name: String,
    pub instance: Random,
    pub socket: OwnedFd,
    /// Set when the peer's end is closed, or ours is about to be.
    gone: AtomicBool,
    control: SharedPage<ControlPage>,
    live: SharedPage<LiveTable>,
    event: Event,
    targets: Vec<(RegionDescriptor, Mapping)>,
    /// The ring takes one pusher at a time.
    pushing: Mutex<()>,
}

/// What a receiver hands over, and what we know of it.
pub struct Handover {
    pub id: PeerId,
    pub name: String,
    pub own_name: String,
    pub instance: Random,
    pub socket: OwnedFd,
    pub regions: Vec<RegionDescriptor>,
    /// Control page, table of live regions, eventfd, then one per region.
    pub fds: Vec<OwnedFd>,
}

impl Outbound {
    pub fn new(handover: Handover) -> Result<Self> {
        let Handover { id, name, own_name, instance, socket, regions, fds } = handover;
        if fds.len() != regions.len() + 3 {
            let text = format!("{name} sent {} descriptors for {} regions", fds.len(), regions.len());
            return Err(Error::new(ErrorCode::IO, text));
        }
        let io = |e| Error::new(ErrorCode::IO, format!("cannot map the memory of {name}: {e}"));
        let mut fds = fds.into_iter();
        let (Some(control), Some(live), Some(event)) = (fds.next(), fds.next(), fds.next()) else {
            return Err(Error::new(ErrorCode::IO, format!("{name} sent no control page")));
        };
        if ![&control, &live].into_iter().all(cannot_shrink) {
            let text = format!(
                "{name} sent a page that it could shrink under us: its shm plugin is older than this one"
            );
            return Err(Error::new(ErrorCode::VERSION, text));
        }
        let control = SharedPage::open(control, true).map_err(io)?;
        let live = SharedPage::open(live, false).map_err(io)?;
        let mut targets = Vec::with_capacity(regions.len());
        for (region, fd) in regions.into_iter().zip(fds) {
            let length =
                usize::try_from(region.length).ok().ok_or_else(|| io(rustix::io::Errno::OVERFLOW))?;
            targets.push((region, Mapping::new(fd, region.fd_offset, length, true).map_err(io)?));
        }
        Ok(Self {
            id,
            name,
            own_name,
            instance,
            socket,
            gone: AtomicBool::new(false),
            control,
            live,
            event: event.into(),
            targets,
            pushing: Mutex::new(()),
        })
    }

    /// Says that nothing more may be sent. True the first time.
    pub fn set_gone(&self) -> bool {
        !self.gone.swap(true, Ordering::SeqCst)
    }

    /// Whether the write lies inside a region we were told of.
    pub fn contains(&self, write: &Write) -> bool {
        self.target(write).is_some()
    }

    /// Address of the write's target. The generation is looked at later, while busy.
    pub fn target(&self, write: &Write) -> Option<*mut u8> {
        let (_, mapping) = self.targets.iter().find(|(region, _)| region.id == write.target_region.0)?;
        let end = write.target_offset.checked_add(write.length.into())?;
        // The offset is less than the mapping's length, which is a `usize`.
        (end <= mapping.length() as u64).then(|| mapping.base().wrapping_add(write.target_offset as usize))
    }

    /// Marks a copy thread busy on the receiver's page. `None` when the receiver closed.
    pub fn enter(&self, thread: usize) -> Option<Busy<'_>> {
        let busy = self.control.enter(thread);
        self.control.is_open().then_some(busy)
    }

    /// While busy: whether the target still is what the write means.
    pub fn lives(&self, write: &Write) -> bool {
        self.live.lives(write.target_region.0, write.target_generation)
    }

    /// Delivers the notification of data that is there. False when the ring is full.
    pub fn notify(&self, submission: &Submission) -> bool {
        let pushing = locked(&self.pushing);
        let pushed = self.control.push(&submission.notification, submission.notification_length);
        drop(pushing);
        if pushed {
            self.event.signal();
        }
        pushed
    }
}

impl Peer for Outbound {
    fn id(&self) -> PeerId {
        self.id
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }
}
