//! What a plugin can do, as names in its manifest.
//!
//! A capability is a promise that the host relies on without checking it again. Features name the capabilities that they need.
//! The host refuses a configuration whose plugins lack one of them before any plugin runs. Declare only what always holds.

/// One-sided writes to any registered address of a peer, many per call. The peer's threads take no part.
pub const PAGE_WRITES: &str = "page_writes";

/// The peer sees a submission's notification only after all of the submission's data.
pub const ARRIVAL_NOTIFICATION: &str = "arrival_notification";

/// Of a transfer backend or a tier: `settled` ([here](crate::TransferBackend::settled) and
/// [here](crate::StorageTier::settled)) is exact. Once it says 1, nothing of the tag is in flight, also after failure
/// and cancellation, so that pages may outlive the request that moved them. Without this capability the host never
/// calls `settled`. It then treats transfers that did not end well as in flight until the peer is disconnected.
pub const SETTLED: &str = "settled";

/// Registers device memory ([`MemoryKind::VRAM`](crate::MemoryKind::VRAM)). On a machine without the device or its driver,
/// `register` answers `UNSUPPORTED` with a text that says what is missing, and what works instead.
pub const VRAM: &str = "vram";

/// Reaches peers on other machines.
pub const MULTI_HOST: &str = "multi_host";

/// A peer whose process restarted can be connected again. Writes that the earlier process had in flight land nowhere.
pub const PEER_RESTART: &str = "peer_restart";

/// Of a tier: values outlive the process, and the next process finds them again.
pub const PERSISTENT: &str = "persistent";

/// Of a tier: workers on other machines see what this one put.
pub const SHARED: &str = "shared";

/// Of a tier: [`scan`](crate::StorageTier::scan) lists the keys. A plugin with several kinds of store declares it if one of
/// them can be listed. For the others, `scan` answers `UNSUPPORTED` with a text that says what to use instead.
pub const SCAN: &str = "scan";

/// Of an allocator: groups of layers with a window ([`LayerKind::WINDOW`](crate::LayerKind::WINDOW)).
pub const WINDOW: &str = "window";

/// Of an allocator: groups of layers with a state ([`LayerKind::STATE`](crate::LayerKind::STATE)).
pub const STATE: &str = "state";

/// Every capability this version of the API knows. Hosts ignore others.
pub const ALL: &[&str] = &[
    PAGE_WRITES,
    ARRIVAL_NOTIFICATION,
    SETTLED,
    VRAM,
    MULTI_HOST,
    PEER_RESTART,
    PERSISTENT,
    SHARED,
    SCAN,
    WINDOW,
    STATE,
];
