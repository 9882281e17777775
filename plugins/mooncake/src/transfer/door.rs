//! Where one peer's writes come in: an engine that one sender knows, with our memory behind it.
//!
//! Ending the engine is the fence. It takes Mooncake's sockets and threads down with it, so that whatever the sender still
//! sends, or the kernel still holds, lands nowhere; unregistering the memory would not stop a write that has begun.

use std::sync::Arc;

use super::regions::Card;
use super::shared::{Connection, Event, Shared};
use crate::engine::{Engine, Range};

/// How a door stands.
pub enum Stage {
    /// Its engine is being started.
    Opening,
    Open(Box<dyn Engine>),
    /// Its engine is being ended, or will be as soon as it is there.
    Closing,
}

/// See the module.
pub struct Door {
    pub connection: Connection,
    /// The name that the sender was opened under.
    pub peer_name: String,
    /// What lies behind it.
    pub regions: Vec<Card>,
    pub stage: Stage,
    /// The sender has asked for the end, and is told in other words.
    pub cut: bool,
    /// The host hears of the end, because it is the peer's doing.
    pub report: bool,
}

impl Door {
    /// Starts to open a door; the service is told when that is done.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn open(
        shared: &Arc<Shared>,
        connection: Connection,
        peer_name: String,
        regions: Vec<Card>,
    ) -> host_plugin_api::Result<Self> {
        let ranges: Vec<Range> = regions.iter().map(Card::memory).collect();
        let own = shared.clone();
        shared.spawn("mooncake-door", move || {
            let made = own.driver.engine().and_then(|engine| {
                engine.register(&ranges)?;
                Ok(engine)
            });
            own.tell(Event::DoorOpened { connection, opened: made });
        })?;
        Ok(Self { connection, peer_name, regions, stage: Stage::Opening, cut: false, report: false })
    }

    /// Starts to close it; the service is told when that is done. One that is being opened is closed after that.
    pub fn close(&mut self, shared: &Arc<Shared>) {
        if let Stage::Open(engine) = std::mem::replace(&mut self.stage, Stage::Closing) {
            end(shared, self.connection, engine);
        }
    }
}

/// Ends an engine on a thread of its own, because that takes up to a second.
pub fn end(shared: &Arc<Shared>, connection: Connection, engine: Box<dyn Engine>) {
    let own = shared.clone();
    // The closure is dropped, and the engine with it, here, if there is no thread to be had.
    let ended = shared.spawn("mooncake-door", move || {
        drop(engine);
        own.tell(Event::DoorClosed { connection });
    });
    if ended.is_err() {
        shared.tell(Event::DoorClosed { connection });
    }
}
