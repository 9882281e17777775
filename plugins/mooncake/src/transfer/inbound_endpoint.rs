//! Where one peer's writes come in: an engine that one sender knows, with our memory behind it.
//!
//! Ending the engine is the fence. It takes Mooncake's sockets and threads down with it, so that whatever the sender still
//! sends, or the kernel still holds, lands nowhere. Unregistering the memory would not stop a write that has begun.

use std::sync::Arc;

use host_plugin_api::Result;
use host_transfer_kit::RegionDescriptor;
use host_transfer_kit::connections::Connection;

use super::shared::{Event, Shared};
use crate::engine::{Engine, Range};

/// Starts an engine with these regions, on a thread of its own. The service is told when that is done.
///
/// # Errors
/// When there is no thread to be had.
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

/// Ends an engine, on a thread of its own, because that takes up to a second. The service is told when that is done. True when
/// there was no thread to be had, and it has ended.
pub fn close(shared: &Arc<Shared>, connection: Connection, engine: Box<dyn Engine>) -> bool {
    let own = shared.clone();
    // The closure is dropped, and the engine with it, here, if there is no thread to be had.
    let ending = shared.spawn("mooncake-close", move || {
        drop(engine);
        own.tell(Event::InboundClosed { connection });
    });
    ending.is_err()
}
