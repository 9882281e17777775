//! The inbound endpoint of one peer's writes: an engine that one sender knows, with this instance's memory registered.
//!
//! Ending the engine is the fence. It ends Mooncake's sockets and threads, too, so that bytes that the sender still
//! sends, or that the kernel still holds, land nowhere. Unregistering the memory would not stop a write that has begun.

use std::sync::Arc;

use host_plugin_api::Result;
use host_transfer_kit::RegionDescriptor;
use host_transfer_kit::connections::Connection;

use super::shared::{Event, Shared};
use crate::engine::{Engine, Range};

/// Starts an engine with these regions, on a thread of its own. The service is told when that is done.
///
/// # Errors
/// When no thread can be started.
pub fn open(shared: &Arc<Shared>, connection: Connection, regions: &[RegionDescriptor]) -> Result<()> {
    let ranges: Vec<Range> = regions.iter().map(Range::of).collect();
    let own = shared.clone();
    shared.spawn("mooncake-open", move || {
        let opened = own.driver.engine().and_then(|engine| {
            engine.register(&ranges)?;
            Ok(engine)
        });
        own.tell(Event::InboundOpened { connection, opened });
    })
}

/// Ends an engine, on a thread of its own, because that takes up to a second. The service is told when that is done.
/// True when no thread could be started and the engine has ended here.
pub fn close(shared: &Arc<Shared>, connection: Connection, engine: Box<dyn Engine>) -> bool {
    let own = shared.clone();
    // If no thread can be started, the closure is dropped here, and the engine with it.
    let ending = shared.spawn("mooncake-close", move || {
        drop(engine);
        own.tell(Event::InboundClosed { connection });
    });
    ending.is_err()
}
