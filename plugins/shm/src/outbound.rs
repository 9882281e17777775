//! A connection on which this instance is the sender.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use host_plugin_api::{Error, ErrorCode, PeerId, Result, Submission, Write};
use host_transfer_kit::{Event, Peer, Random, locked};

use crate::control::Busy;
use crate::cuda::{Device, Devices, Opened, Pinned, Refused};
use crate::live::LiveTable;
use crate::mapping::{Mapping, SharedPage, cannot_shrink};
use crate::pages::Pages;
use crate::regions::{RegionDescriptor, RegionPlace, Spot, in_this_process};
use crate::wire::Version;

/// A connection to a receiver.
pub struct Outbound {
    pub id: PeerId,
    /// The host's name for the peer.
    pub name: String,
    /// The name under which the peer was opened.
    pub own_name: String,
    pub instance: Random,
    pub socket: OwnedFd,
    /// Set when the peer's end is closed, or this end is about to be.
    gone: AtomicBool,
    pages: Pages,
    live: SharedPage<LiveTable>,
    event: Event,
    /// Before the mappings, because it must be dropped first.
    pins: Mutex<Vec<Pinned>>,
    targets: Vec<(RegionDescriptor, Target)>,
    /// The ring takes one pusher at a time.
    pushing: Mutex<()>,
}

/// A region of the peer's.
enum Target {
    Host { mapping: Mapping, pinned: AtomicBool },
    Device(Opened),
}

/// A connection that a receiver welcomed.
pub struct Welcomed {
    pub version: Version,
    pub socket: OwnedFd,
    pub regions: Vec<RegionDescriptor>,
    /// See [`Version`].
    pub fds: Vec<OwnedFd>,
}

/// A welcomed connection, with the names and ids that the host and the endpoint give.
pub struct Handover {
    pub id: PeerId,
    pub name: String,
    pub own_name: String,
    pub instance: Random,
    pub welcomed: Welcomed,
}

impl Outbound {
    /// `devices` are those of the instance. The peer's devices are added to them.
    pub fn new(handover: Handover, devices: &Devices) -> Result<Self> {
        let Handover { id, name, own_name, instance, welcomed } = handover;
        let Welcomed { version, socket, regions, fds } = welcomed;
        let knows_devices = version == Version::Two;
        let files = regions.iter().filter(|region| matches!(region.place, RegionPlace::File { .. })).count();
        if fds.len() != files + 3 + usize::from(knows_devices) {
            let text = format!("{name} sent {} descriptors for {files} regions in files", fds.len());
            return Err(Error::new(ErrorCode::IO, text));
        }
        let io = |e| Error::new(ErrorCode::IO, format!("cannot map the memory of {name}: {e}"));
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or_else(|| io(rustix::io::Errno::BADF));
        let (control, live, event) = (next()?, next()?, next()?);
        let device = knows_devices.then(&mut next).transpose()?;
        if ![&control, &live].into_iter().chain(&device).all(cannot_shrink) {
            let text = format!(
                "{name} sent a page that it could shrink under us: its shm plugin is older than this one"
            );
            return Err(Error::new(ErrorCode::VERSION, text));
        }
        let device = device.map(|fd| SharedPage::open(fd, true)).transpose().map_err(io)?;
        let pages = Pages { control: SharedPage::open(control, true).map_err(io)?, device };
        let live = SharedPage::open(live, false).map_err(io)?;
        let mut targets = Vec::with_capacity(regions.len());
        for region in regions {
            let target = match &region.place {
                RegionPlace::File { offset } => {
                    let length = usize::try_from(region.length).ok();
                    let length = length.ok_or_else(|| io(rustix::io::Errno::OVERFLOW))?;
                    // One descriptor for each such region.
                    let mapping = Mapping::new(next()?, *offset, length, true).map_err(io)?;
                    Target::Host { mapping, pinned: AtomicBool::new(false) }
                }
                RegionPlace::Device(export) => {
                    let opened = devices.open(export, in_this_process(&instance, region.id));
                    Target::Device(opened.map_err(|why| {
                        let what = format!("shm cannot write to the GPU memory of {name}: {why}");
                        let instead = "pages can go through host memory (--staging always)";
                        Error::new(ErrorCode::UNSUPPORTED, format!("{what}; {instead}"))
                    })?)
                }
            };
            targets.push((region, target));
        }
        Ok(Self {
            id,
            name,
            own_name,
            instance,
            socket,
            gone: AtomicBool::new(false),
            pages,
            live,
            event: event.into(),
            pins: Mutex::default(),
            targets,
            pushing: Mutex::new(()),
        })
    }

    /// Whether the receiver has closed the connection. Submissions fail from then on. The end of the socket, which tells the
    /// service thread of it, comes later.
    pub fn is_closed(&self) -> bool {
        !self.pages.control.is_open()
    }

    /// Notes that nothing more may be sent. True the first time.
    pub fn set_gone(&self) -> bool {
        !self.gone.swap(true, Ordering::SeqCst)
    }

    /// Where the write's target is. The generation is checked later, while busy.
    pub fn target(&self, write: &Write) -> Option<Spot> {
        let (spot, length) = self.whole(write)?;
        let end = write.target_offset.checked_add(write.length.into())?;
        (end <= length).then(|| spot.after(write.target_offset))
    }

    /// Where the region of the write's target begins, and how long it is.
    pub fn whole(&self, write: &Write) -> Option<(Spot, u64)> {
        let (region, target) = self.targets.iter().find(|(region, _)| region.id == write.target_region.0)?;
        let (address, device, pinned) = match target {
            Target::Host { mapping, pinned } => {
                (mapping.base() as usize as u64, None, pinned.load(Ordering::Acquire))
            }
            Target::Device(opened) => (opened.address(), Some(opened.device()), false),
        };
        Some((Spot { address, device, pinned }, region.length))
    }

    /// The devices that the peer has memory on.
    pub fn devices(&self) -> impl Iterator<Item = u32> {
        self.targets.iter().filter_map(|(_, target)| match target {
            Target::Device(opened) => Some(opened.device()),
            Target::Host { .. } => None,
        })
    }

    /// Pins the peer's host memory, as it is mapped here, for this device. Returns the first error of a region that
    /// could not be pinned.
    pub fn pin(&self, device: &Arc<Device>) -> std::result::Result<(), Refused> {
        let mut first = Ok(());
        for (_, target) in &self.targets {
            let Target::Host { mapping, pinned } = target else { continue };
            // One thread at a time.
            let mut pins = locked(&self.pins);
            if pinned.load(Ordering::Relaxed) {
                continue;
            }
            match device.pin(mapping.base() as usize as u64, mapping.length() as u64) {
                Ok(pin) => {
                    pins.extend(pin);
                    pinned.store(true, Ordering::Release);
                }
                Err(refused) => first = first.and(Err(refused)),
            }
        }
        first
    }

    /// Closes the peer's memory on devices: the regions that `which` picks. No copy of this instance is behind their
    /// gates any more.
    pub fn close_devices(&self, which: impl Fn(&RegionDescriptor) -> bool) {
        for (region, target) in &self.targets {
            if let Target::Device(opened) = target
                && which(region)
            {
                opened.close();
            }
        }
    }

    /// Whether a region of the peer's lives.
    pub fn region_lives(&self, region: &RegionDescriptor) -> bool {
        self.live.lives(region.id, region.generation)
    }

    /// Whether devices may copy to the peer.
    pub fn knows_devices(&self) -> bool {
        self.pages.device.is_some()
    }

    /// Tells the peer that a region was closed on its request.
    pub fn say_let_go(&self) {
        if let Some(page) = &self.pages.device {
            page.let_go();
        }
    }

    /// Ends the busy time that [`enter`](Self::enter) began, when the mark was forgotten.
    pub fn leave(&self, line: usize) {
        self.pages.leave(line);
    }

    /// Marks a line busy on the receiver's pages, see [`Pages::enter`].
    pub fn enter(&self, line: usize) -> std::result::Result<Busy<'_>, ErrorCode> {
        self.pages.enter(line)
    }

    /// While busy: whether the target's region lives and has the generation that the write names.
    pub fn lives(&self, write: &Write) -> bool {
        self.live.lives(write.target_region.0, write.target_generation)
    }

    /// Delivers the notification of data that is there. False when the ring is full.
    pub fn notify(&self, submission: &Submission) -> bool {
        let pushing = locked(&self.pushing);
        let pushed = self.pages.control.push(&submission.notification, submission.notification_length);
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
