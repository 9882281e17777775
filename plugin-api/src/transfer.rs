//! The transfer role: one-sided writes of KV pages into another worker's registered memory.
//!
//! The life of a transfer: both workers [`register`](TransferBackend::register) their memory and exchange
//! [`endpoint`](TransferBackend::endpoint) bytes through the host. The sender [`connect`](TransferBackend::connect)s,
//! then [`submit`](TransferBackend::submit)s batches of [`Write`]s under a tag. The sender sees one [`Completion`] per
//! accepted submission. The receiver sees the submission's [`Notification`], and only after all of its data.
//!
//! Memory is named by region, offset, length and generation, never by a peer's raw address. Bounds are checked where a
//! write is submitted *and* by the side that owns the memory.
//!
//! Threads: every method may be called from any thread. Methods marked **hot** neither block nor allocate.

use abi_stable::StableAbi;

use crate::error::Result;

/// A registered piece of memory, named by the backend that registered it. Valid until deregistered.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, StableAbi)]
pub struct RegionId(pub u32);

/// A connected peer, named by the backend that connected. Never reused within one instance.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, StableAbi)]
pub struct PeerId(pub u32);

/// The host's name for one submission. Once a submission with it was accepted, the host never uses it again within the instance. One
/// that was refused is tried again under its tag.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, StableAbi)]
pub struct Tag(pub u64);

/// Where memory lives. An open set.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, StableAbi)]
pub struct MemoryKind(pub u32);

impl MemoryKind {
    /// Ordinary host memory.
    pub const DRAM: MemoryKind = MemoryKind(0);
    /// Memory of an accelerator. `device` says which.
    pub const VRAM: MemoryKind = MemoryKind(1);
}

/// Where a piece of memory begins: an address of this process, or of a device. It never crosses to a peer.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, StableAbi)]
pub struct Address(pub u64);

impl Address {
    /// The address that a pointer holds.
    #[must_use]
    pub fn of<T: ?Sized>(first: *const T) -> Self {
        Self(first.cast::<u8>() as usize as u64)
    }

    /// The address as a pointer of this process. The pointer to memory on a device may not be read.
    #[must_use]
    pub const fn pointer(self) -> *mut u8 {
        self.0 as usize as *mut u8
    }

    /// The address so many bytes further, or `None` beyond the last.
    #[must_use]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(address) => Some(Self(address)),
            None => None,
        }
    }
}

impl std::fmt::LowerHex for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::LowerHex::fmt(&self.0, f)
    }
}

/// Memory offered for registration. The host keeps it mapped until the region is deregistered.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct Memory {
    /// First byte.
    pub address: Address,
    /// Bytes.
    pub length: u64,
    /// Where it lives.
    pub kind: MemoryKind,
    /// Device ordinal for [`MemoryKind::VRAM`], else 0.
    pub device: u32,
    /// A descriptor of a shareable file behind the memory, or -1. The host keeps it open. The plugin may duplicate it.
    pub fd: i32,
    /// Written into every [`Write`] that targets this region. A write with another generation lands nowhere.
    pub generation: u32,
    /// Offset of the first byte within that file.
    pub fd_offset: u64,
}

/// One write: `length` bytes from this worker's region into the peer's. Exactly 32 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, StableAbi)]
pub struct Write {
    /// Region of the submitting instance.
    pub source_region: RegionId,
    /// Region of the peer, by the id the peer was given.
    pub target_region: RegionId,
    /// Bytes from the start of the source region.
    pub source_offset: u64,
    /// Bytes from the start of the target region.
    pub target_offset: u64,
    /// Bytes, at least 1.
    pub length: u32,
    /// Generation of the target region that the host means.
    pub target_generation: u32,
}

const _: () = assert!(size_of::<Write>() == 32 && align_of::<Write>() == 8);

/// Most bytes that one notification carries.
pub const NOTIFICATION_BYTES: usize = 48;

/// What goes with a batch of writes.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct Submission {
    /// Whose memory is written.
    pub peer: PeerId,
    /// Bytes of `notification` that count. 0 sends none.
    pub notification_length: u32,
    /// The host's name for this submission.
    pub tag: Tag,
    /// Opaque to the plugin. Delivered to the peer after the data.
    pub notification: [u8; NOTIFICATION_BYTES],
}

/// How one accepted submission ended on the sending side.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct Completion {
    /// The submission.
    pub tag: Tag,
    /// Bytes written. Meaningful when `status` is 0: then all bytes of the submission.
    pub bytes: u64,
    /// 0 when all bytes of the submission are in the peer's memory, or an error code. After either, nothing of the submission is in
    /// flight any more when `settled` says so.
    pub status: i32,
    /// Zero.
    pub reserved: u32,
}

/// What a [`Notification`] says.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, StableAbi)]
pub struct NotificationKind(pub u32);

impl NotificationKind {
    /// All of a submission's data is in our memory. It is not said of a submission of which a write was refused.
    pub const ARRIVED: NotificationKind = NotificationKind(1);
    /// The peer is proven gone: none of its writes will land any more. May be said more than once of one peer.
    pub const PEER_LOST: NotificationKind = NotificationKind(2);
}

/// Something a peer did to us. 128 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct Notification {
    /// What happened.
    pub kind: NotificationKind,
    /// Bytes of `payload` that count.
    pub length: u32,
    /// Name under which the peer opened its backend (see [`Opening::name`]), in bytes. At most 64.
    pub peer_name_length: u32,
    /// Zero.
    pub reserved: u32,
    /// The submission's notification.
    pub payload: [u8; NOTIFICATION_BYTES],
    /// The peer's name, as far as `peer_name_length` says.
    pub peer_name: [u8; 64],
}

const _: () = assert!(size_of::<Notification>() == 128);

/// What an instance can carry at once.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct TransferLimits {
    /// Most writes in one submission. So many are accepted.
    pub max_writes: u32,
    /// Most submissions accepted and not yet polled as completed. An instance with none of them accepts so many.
    pub max_submissions: u32,
    /// Writes of fewer bytes are so slow that collecting them into longer ones first, by a copy on both sides, takes
    /// less time. 0 when the backend does not say.
    pub short_writes: u64,
    /// Zero.
    pub reserved: [u64; 5],
}

impl TransferLimits {
    /// So many writes in one submission, and so many submissions at once.
    #[must_use]
    pub const fn new(max_writes: u32, max_submissions: u32) -> Self {
        Self { max_writes, max_submissions, short_writes: 0, reserved: [0; 5] }
    }
}

/// What the host gives an instance when it opens it.
#[derive(Clone, Debug)]
pub struct Opening {
    /// This worker's name among all peers, at most 64 bytes, different at every process start.
    pub name: String,
    /// The plugin's own table of the configuration, as TOML text. Empty when there is none.
    pub config: String,
}

/// A transfer backend.
pub trait TransferBackend: Send + Sync + 'static {
    /// What this instance can carry.
    fn limits(&self) -> TransferLimits;

    /// Makes memory readable for our own writes and writable for connected peers.
    ///
    /// # Errors
    /// `UNSUPPORTED` for memory of a kind, or without the descriptor, that the backend needs.
    fn register(&self, memory: &Memory) -> Result<RegionId>;

    /// Takes a region back. When it returns, no peer's write lands in it any more.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for an unknown region.
    fn deregister(&self, region: RegionId) -> Result<()>;

    /// What a peer needs to connect to this instance: opaque bytes that the host carries. They cover the regions
    /// registered so far.
    ///
    /// # Errors
    /// When no endpoint can be offered.
    fn endpoint(&self) -> Result<Vec<u8>>;

    /// Connects to a peer. Connecting again under the same name replaces a connection that was lost: the answer is a new id,
    /// and the old one is then unknown.
    ///
    /// # Errors
    /// `PEER_LOST` when the peer does not answer, `VERSION` when the endpoint is of another kind.
    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId>;

    /// Ends the connection in both directions. This is a fence: when it returns, nothing from or to this peer is in
    /// flight, and its late writes land nowhere. Submissions to it complete with `PEER_LOST`.
    ///
    /// It covers the connections that the peer made to us, which have no id of their own: a receiver that wants to
    /// fence a sender connects to it, too. A connection that the peer makes afterwards is a new one, with a new id on its
    /// side: nothing submitted on the old one can come through it.
    ///
    /// # Errors
    /// `TIMEOUT` when the fence could not be proven. Pages that the peer may write must then stay quarantined.
    fn disconnect(&self, peer: PeerId) -> Result<()>;

    /// **Hot.** Starts a batch of writes. Returns 0, or a code: `WOULD_BLOCK` when full, and then nothing was started.
    /// Without writes it is the notification alone that travels, for hosts that have something to say to each other.
    /// Without either it completes and does nothing.
    ///
    /// An accepted submission ends in exactly one [`Completion`], a refused one in none.
    fn submit(&self, submission: &Submission, writes: &[Write]) -> i32;

    /// **Hot.** Moves finished submissions into `completions`. Returns how many, or a code. Drives progress.
    fn poll(&self, completions: &mut [Completion]) -> i32;

    /// **Hot.** Moves what peers did into `notifications`. Returns how many, or a code.
    fn notifications(&self, notifications: &mut [Notification]) -> i32;

    /// Asks that what has not started of a submission never starts. It still ends in one completion, whose status is 0 only
    /// when all of the submission was written all the same. Returns 0, or `INVALID_ARGUMENT` for a tag that is not in flight.
    fn cancel(&self, tag: Tag) -> i32;

    /// **Hot.** Whether nothing of this tag is in flight any more, also after failure or cancellation: 1 settled,
    /// 0 not yet, or a code. A tag never seen is settled.
    fn settled(&self, tag: Tag) -> i32;

    /// How the host learns that completions or notifications wait. Always the same answer of one instance.
    ///
    /// - A descriptor that is readable while they wait. The plugin owns it.
    /// - [`WAKES`](crate::WAKES) when the plugin calls [`Host::wake`](crate::Host::wake) for every new one instead.
    /// - `-1`: the host then polls on a timer.
    fn event_fd(&self) -> i32;

    /// Stops all threads of the instance, after which every call answers `CLOSED`.
    ///
    /// # Errors
    /// `TIMEOUT` when something still ran at the deadline.
    fn shutdown(&self, deadline_ms: u64) -> Result<()>;
}
