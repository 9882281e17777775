//! Transfer backend for workers on one machine: one-sided writes through shared memory.
//!
//! Each instance listens on an abstract socket. Connecting hands the sender everything it needs, by descriptor: the
//! receiver's regions, its table of live regions, a control page for this connection, and the receiver's eventfd. From
//! then on the sender's copy threads write straight into the receiver's memory, and push the notification into a ring
//! on the control page when the data is there.
//!
//! Late writes are harmless. A copy thread marks itself busy on the control page before it looks whether the connection is
//! open and the region alive, and copies at most [`PIECE`](copier::PIECE) bytes before it looks again. A fence closes the
//! connection or clears the region. It then waits until every thread that was busy has moved on, or is proven dead.
//!
//! Regions on GPUs are handed over as handles of CUDA IPC, and a thread lets the GPU copy, see [`device_copier`]. A
//! batch of copies that a GPU has under way is marked like a copy thread. The batch outlives its process's threads and
//! socket, so a sender that ends in mid batch is lost only when its process is gone, see [`inbound`].
//!
//! Peers are processes of the same user. The token in the endpoint protects from accidents, not from attackers. Files
//! that are handed over are sealed as far as a peer's work allows: no page changes its size, and only its owner writes
//! the table of live regions. Regions belong to the host, which fixes their size, and peers must be able to write
//! them.

mod backend;
mod config;
mod control;
mod copier;
mod cuda;
mod device_copier;
#[doc(hidden)]
pub mod fuzzing;
mod handshake;
mod inbound;
mod live;
mod mapping;
mod notifications;
mod outbound;
mod pages;
mod progress;
mod ready;
mod regions;
mod service;
mod shared;
mod socket;
mod sync;
mod wire;

pub use backend::ShmBackend;

/// Opens an instance.
///
/// # Errors
/// `CONFIG` for a wrong configuration, `IO` when the system refuses sockets, memory or threads.
pub fn open(opening: &host_plugin_api::Opening) -> host_plugin_api::Result<ShmBackend> {
    backend::open(opening)
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    transfer: open,
    check_config: config::check,
}
