//! Transfer backend over NIXL, through the C API of its own library (`libnixl_capi.so`), which is found and loaded when
//! an instance opens. Building needs nothing of NIXL.
//!
//! NIXL can say that a write failed, but not that nothing of it is in flight any more: a released request may still be in a
//! network adapter's queue or in a socket's buffer. But NIXL can end an agent, with its connections, its queues and its
//! keys. So each connection gets a pair of agents of its own: one at the sender, its link, and an *inbound endpoint* at the
//! receiver, through which that sender alone writes. Closing the inbound endpoint is a fence, which needs no help of the
//! other side. The transfer kit decides when a connection begins and ends, and [`agents`] carries that out.
//!
//! - An instance's *front* agent registers no memory. Its metadata is the endpoint, and instances exchange their few
//!   messages through it ([`wire`]): hello, welcome, cut, bye.
//! - One thread, the driver, makes all calls into NIXL and also drives progress. So NIXL needs no lock and has no
//!   thread of its own here, unless `progress_threads` asks for some. The hot calls of the trait only touch queues.
//! - A sender's success means that the data is in the peer's memory: NIXL flushes the connection before it reports
//!   success, and sends the notification after that. When a submission fails, the pair of agents ends. The submission
//!   has settled once the peer says that its end is closed, or the peer is gone.
//! - With some transports (CMA and the like) a peer writes this process's memory past its agent. Such writes would
//!   outlive a closed endpoint, so a configuration that allows these transports is refused.
//!
//! The second role, a storage tier, moves pages between memory and files through NIXL's POSIX plugin, or objects in a bucket
//! through its OBJ plugin. See [`tier`].
//!
//! A peer is gone when it says so, or when its machine says that its process is gone ([`presence`]). When UCX reports the
//! connection to it as broken, all connections to and from it end. Whether bytes of this instance land there is unproven
//! until one of these, or until it can be reached again and has closed its end.

mod agents;
mod backend;
mod capi;
mod config;
mod driver;
mod environment;
#[doc(hidden)]
pub mod fuzzing;
mod library;
mod link;
mod pieces;
mod presence;
mod search;
mod shared;
mod tier;
mod wire;

pub use backend::NixlBackend;
pub use tier::NixlTier;

/// Opens an instance: finds and loads NIXL, and starts the driver.
///
/// # Errors
/// `CONFIG` for a wrong configuration, `UNSUPPORTED` without a NIXL that fits, `IO` when NIXL refuses.
pub fn open(opening: &host_plugin_api::Opening) -> host_plugin_api::Result<NixlBackend> {
    backend::open(opening)
}

/// Says whether [`open`] would accept this configuration here: NIXL is there and fits. Starts nothing of it.
///
/// # Errors
/// As [`open`], without `IO`.
pub fn check(role: &str, config: &str) -> host_plugin_api::Result<()> {
    if role == "tier" { tier::check(config) } else { library::check(config) }
}

/// Opens an instance of the tier: finds and loads NIXL, and starts its thread.
///
/// # Errors
/// `CONFIG` for a wrong configuration, `UNSUPPORTED` without a NIXL that fits, `IO` when NIXL, the directory or the bucket
/// refuses.
pub fn open_storage(opening: &host_plugin_api::Opening) -> host_plugin_api::Result<NixlTier> {
    NixlTier::open(opening)
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    transfer: open,
    tier: open_storage,
    check_config: check,
}
