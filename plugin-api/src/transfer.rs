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

/// The host's name for one submission. After a submission was accepted, the host never uses its tag again within the
/// instance. The host tries a refused submission again under the same tag.
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

    /// The address `bytes` further on, or `None` beyond the last address.
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
    /// The host writes it into every [`Write`] that targets this region. A write with another generation lands nowhere.
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
    /// Region of the peer: the id that the peer got when it registered the region.
    pub target_region: RegionId,
    /// Bytes from the start of the source region.
    pub source_offset: u64,
    /// Bytes from the start of the target region.
    pub target_offset: u64,
    /// Bytes, at least 1.
    pub length: u32,
    /// Generation that the host expects of the target region.
    pub target_generation: u32,
}

const _: () = assert!(size_of::<Write>() == 32 && align_of::<Write>() == 8);

/// Most bytes that one notification carries.
pub const NOTIFICATION_BYTES: usize = 48;

/// The peer, the tag and the notification of a batch of writes.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct Submission {
    /// The peer whose memory is written.
    pub peer: PeerId,
    /// Bytes of `notification` that are sent. 0 sends no notification.
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
    /// Bytes written. Meaningful only when `status` is 0. It is then the total of the submission.
    pub bytes: u64,
    /// 0 when all bytes of the submission are in the peer's memory, else an error code. In both cases, nothing of the
    /// submission is in flight any more once `settled` says so.
    pub status: i32,
    /// Zero.
    pub reserved: u32,
}

/// What a [`Notification`] says.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, StableAbi)]
pub struct NotificationKind(pub u32);

impl NotificationKind {
    /// All data of a submission is in this instance's memory. Never reported for a submission of which a write was refused.
    pub const ARRIVED: NotificationKind = NotificationKind(1);
    /// None of the peer's writes will land in this instance's memory any more: the peer is gone, or its way in is closed. May be
    /// reported more than once for one peer.
    pub const PEER_LOST: NotificationKind = NotificationKind(2);
}

/// An event that concerns a peer, for the host to fetch. 128 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct Notification {
    /// What happened.
    pub kind: NotificationKind,
    /// Bytes of `payload` that are valid.
    pub length: u32,
    /// Length in bytes of the name under which the peer opened its backend (see [`Opening::name`]). At most 64.
    pub peer_name_length: u32,
    /// Zero.
    pub reserved: u32,
    /// The submission's notification.
    pub payload: [u8; NOTIFICATION_BYTES],
    /// The peer's name, in the first `peer_name_length` bytes.
    pub peer_name: [u8; 64],
}

const _: () = assert!(size_of::<Notification>() == 128);

/// What an instance can carry at once.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct TransferLimits {
    /// The most writes in one submission. The instance accepts a submission of this many.
    pub max_writes: u32,
    /// The most submissions that are accepted and not yet polled as completed. An instance without such submissions
    /// accepts this many.
    pub max_submissions: u32,
    /// Writes of fewer bytes than this are slow: it takes less time to collect them into longer writes first, by a copy
    /// on both sides. 0 when the backend does not say.
    pub short_writes: u64,
    /// Zero.
    pub reserved: [u64; 5],
}

impl TransferLimits {
    /// Limits with these numbers of writes in one submission and of submissions at once. `short_writes` stays 0.
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

    /// Registers memory: writes of this instance may read it, and connected peers may write it.
    ///
    /// # Errors
    /// `UNSUPPORTED` when the backend cannot use this kind of memory, or needs a descriptor that the memory lacks.
    fn register(&self, memory: &Memory) -> Result<RegionId>;

    /// Ends the registration of a region. When it returns, no peer's write lands in the region any more.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for an unknown region. `TIMEOUT` when it is not proven in time that no write lands: then the region is still
    /// registered, and the host may call again.
    fn deregister(&self, region: RegionId) -> Result<()>;

    /// Returns what a peer needs to connect to this instance: opaque bytes that the host carries to the peer. They
    /// cover the regions registered so far.
    ///
    /// # Errors
    /// When no endpoint can be offered.
    fn endpoint(&self) -> Result<Vec<u8>>;

    /// Connects to a peer. Connecting again under the same name replaces a lost connection: this returns a new id, and
    /// the old id is then unknown.
    ///
    /// # Errors
    /// `PEER_LOST` when the peer does not answer, `VERSION` when the endpoint is of another kind.
    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId>;

    /// Ends the connection in both directions. This is a fence: when it returns, nothing from or to this peer is in
    /// flight, and late writes of the peer land nowhere. Submissions to the peer complete with `PEER_LOST`.
    ///
    /// The fence also covers the connections that the peer made to this instance. They have no id of their own, so a receiver
    /// that wants to fence a sender connects to the sender, too. A connection that the peer makes afterwards is new, with a new
    /// id on the peer's side. Nothing that was submitted on the old connection can come through the new one.
    ///
    /// # Errors
    /// `TIMEOUT` when the fence could not be proven. Pages that the peer may write must then stay quarantined.
    fn disconnect(&self, peer: PeerId) -> Result<()>;

    /// **Hot.** Starts a batch of writes. Returns 0, or a code. `WOULD_BLOCK` says that the instance is full and
    /// nothing was started. A submission without writes sends the notification alone, as a message from host to host. A
    /// submission without writes and without a notification completes and does nothing.
    ///
    /// An accepted submission ends in exactly one [`Completion`], a refused submission in none.
    fn submit(&self, submission: &Submission, writes: &[Write]) -> i32;

    /// **Hot.** Moves finished submissions into `completions`. Returns how many, or a code. Drives progress.
    fn poll(&self, completions: &mut [Completion]) -> i32;

    /// **Hot.** Moves waiting notifications into `notifications`. Returns how many, or a code.
    fn notifications(&self, notifications: &mut [Notification]) -> i32;

    /// Asks the instance to leave out the writes of a submission that have not started. The submission still ends in
    /// one completion. Its status is 0 only when the whole submission was written in spite of the cancellation. Returns
    /// 0, or `INVALID_ARGUMENT` for a tag that is not in flight.
    fn cancel(&self, tag: Tag) -> i32;

    /// **Hot.** Whether a tag is settled, which means that nothing of it is in flight any more, also after failure or
    /// cancellation. Returns 1 when settled, 0 when not yet, or a code. A tag never seen is settled.
    fn settled(&self, tag: Tag) -> i32;

    /// Says how the host learns of waiting completions and notifications. An instance always returns the same answer.
    ///
    /// - A descriptor that is readable while completions or notifications wait. The plugin owns it.
    /// - [`WAKES`](crate::WAKES) when the plugin instead calls [`Host::wake`](crate::Host::wake) for every new entry.
    /// - `-1`: the host then polls on a timer.
    fn event_fd(&self) -> i32;

    /// Stops all threads of the instance, after which every call answers `CLOSED`.
    ///
    /// # Errors
    /// `TIMEOUT` when something still ran at the deadline.
    fn shutdown(&self, deadline_ms: u64) -> Result<()>;
}
