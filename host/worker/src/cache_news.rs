//! How a worker lets routers follow its radix cache.

use std::pin::Pin;
use std::sync::Arc;
use std::vec::IntoIter;

use futures_util::stream::{Stream, StreamExt as _, unfold};
use host_core::routing::{Replay, SnapshotPart};
use host_wire::cache_news::{write_batch, write_part};
use host_wire::proto;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tonic::Status;

use super::CacheLog;

/// The stream of cache events to a router, until the router hangs up or the worker closes.
///
/// It is written only as fast as the router reads, and a router that is too
/// slow for the log gets a snapshot in place of what it missed.
pub type NewsStream = Pin<Box<dyn Stream<Item = Result<proto::CacheNews, Status>> + Send>>;

struct Following {
    log: Arc<CacheLog>,
    grown: watch::Receiver<u64>,
    after: u64,
    parts: IntoIter<SnapshotPart>,
    #[expect(dead_code, reason = "held for its drop")]
    place: OwnedSemaphorePermit,
}

/// A stream of all events after event `after`, until `closing` becomes true.
pub fn follow(
    log: Arc<CacheLog>,
    after: u64,
    place: OwnedSemaphorePermit,
    mut closing: watch::Receiver<bool>,
) -> NewsStream {
    let grown = log.grown();
    let following = Following { log, grown, after, parts: Vec::new().into_iter(), place };
    let news = unfold(following, |mut following| async {
        let news = following.next().await?;
        Some((Ok(news), following))
    });
    // An error means that the server is gone.
    Box::pin(news.take_until(async move { drop(closing.wait_for(|closing| *closing).await) }))
}

impl Following {
    async fn next(&mut self) -> Option<proto::CacheNews> {
        loop {
            if let Some(part) = self.parts.next() {
                return Some(write_part(&part));
            }
            // Marked as seen before the log is read, so that events that are added meanwhile are noticed.
            self.grown.borrow_and_update();
            let replay = self.log.lock().after(self.after);
            match replay {
                Replay::Events(events) if events.is_empty() => self.grown.changed().await.ok()?,
                Replay::Events(events) => {
                    let first = self.after + 1;
                    self.after += events.len() as u64;
                    return Some(write_batch(first, &events));
                }
                Replay::Forgotten => {
                    let snapshot = self.log.lock().snapshot();
                    self.after = snapshot.number;
                    self.parts = snapshot.parts().into_iter();
                }
            }
        }
    }
}
