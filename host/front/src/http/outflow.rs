//! Between a generation and its client: as many bytes as a client may be behind.
//!
//! A generation that has ended gives its place and its pages back at once, whether or not its client has read the answer. One
//! that is under way waits for its client when so much is unread, and is cancelled when its client takes nothing for too long.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures_util::stream;
use host_wire::clock;
use tokio::sync::{Semaphore, mpsc};

/// Most bytes of one answer that wait for its client: about a thousand events.
const UNREAD: usize = 256 << 10;

/// The generation's end.
#[derive(Debug)]
pub(super) struct Outflow {
    events: mpsc::UnboundedSender<Sent>,
    room: Arc<Semaphore>,
    patience: Duration,
}

/// Why nothing more can be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoOutflow {
    /// The client has hung up.
    Gone,
    /// The client has taken nothing for too long.
    Stalled,
}

/// What ends the body of a client that takes nothing.
#[derive(Debug, thiserror::Error)]
#[error("the client did not read the answer for {0:?}")]
struct Stalled(Duration);

/// What is sent, with the room that it takes.
type Sent = Result<(Bytes, usize), Stalled>;

/// Both ends. A client that is behind has `patience` to take something.
pub(super) fn outflow(patience: Duration) -> (Outflow, Body) {
    let (events, received) = mpsc::unbounded_channel();
    let room = Arc::new(Semaphore::new(UNREAD));
    let unread = Unread { received, room: Arc::clone(&room), stalled: None };
    let body = stream::unfold(unread, |mut unread| async move { Some((unread.next().await?, unread)) });
    (Outflow { events, room, patience }, Body::from_stream(body))
}

impl Outflow {
    /// Sends bytes when there is room for them. More than all room are sent when all of it is free.
    pub(super) async fn send(&self, bytes: Bytes) -> Result<(), NoOutflow> {
        let wanted = bytes.len().min(UNREAD);
        // UNREAD fits.
        let room = self.room.acquire_many(u32::try_from(wanted).unwrap_or(u32::MAX));
        let room = tokio::select! {
            room = clock::timeout(self.patience, room) => room,
            () = self.gone() => return Err(NoOutflow::Gone),
        };
        match room {
            Ok(Ok(room)) => room.forget(),
            // It is never closed.
            Ok(Err(_closed)) => return Err(NoOutflow::Gone),
            Err(_elapsed) => {
                drop(self.events.send(Err(Stalled(self.patience))));
                return Err(NoOutflow::Stalled);
            }
        }
        self.events.send(Ok((bytes, wanted))).map_err(|_unsent| NoOutflow::Gone)
    }

    /// Resolves when the client has hung up.
    pub(super) async fn gone(&self) {
        self.events.closed().await;
    }
}

/// The client's end.
struct Unread {
    received: mpsc::UnboundedReceiver<Sent>,
    room: Arc<Semaphore>,
    stalled: Option<Stalled>,
}

impl Unread {
    /// Waits until something is there, and gives all of it as one piece.
    async fn next(&mut self) -> Option<Result<Bytes, Stalled>> {
        let mut all = match self.stalled.take() {
            Some(stalled) => return Some(Err(stalled)),
            None => match self.received.recv().await? {
                Ok((bytes, room)) => {
                    self.room.add_permits(room);
                    bytes
                }
                Err(stalled) => return Some(Err(stalled)),
            },
        };
        let mut more = Vec::new();
        while let Ok(next) = self.received.try_recv() {
            match next {
                Ok((bytes, room)) => {
                    self.room.add_permits(room);
                    more.push(bytes);
                }
                Err(stalled) => {
                    self.stalled = Some(stalled);
                    break;
                }
            }
        }
        if !more.is_empty() {
            more.insert(0, all);
            all = Bytes::from(more.concat());
        }
        Some(Ok(all))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(300);

    #[tokio::test]
    async fn what_was_sent_arrives_in_order_and_then_the_end() {
        let (outflow, body) = outflow(PATIENCE);
        for text in ["a", "b", "c"] {
            outflow.send(text.into()).await.unwrap();
        }
        drop(outflow);
        assert_eq!(axum::body::to_bytes(body, 100).await.unwrap(), "abc");
    }

    #[tokio::test]
    async fn one_that_is_behind_is_waited_for_and_goes_on_when_the_client_has_read() {
        let (outflow, body) = outflow(PATIENCE);
        outflow.send(vec![1; UNREAD - 1].into()).await.unwrap();
        let more = tokio::spawn(async move {
            // More than all room.
            outflow.send(vec![2; UNREAD + 5].into()).await
        });
        let mut body = body.into_data_stream();
        assert_eq!(body.next().await.unwrap().unwrap().len(), UNREAD - 1);
        assert_eq!(body.next().await.unwrap().unwrap().len(), UNREAD + 5);
        assert_eq!(more.await.unwrap(), Ok(()));
        assert!(body.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_nothing_is_given_up_and_its_body_ends_with_an_error() {
        let (outflow, body) = outflow(PATIENCE);
        outflow.send(vec![1; UNREAD].into()).await.unwrap();
        let before = clock::now();
        assert_eq!(outflow.send("more".into()).await, Err(NoOutflow::Stalled));
        assert_eq!(clock::now() - before, PATIENCE);
        drop(outflow);
        let mut body = body.into_data_stream();
        assert_eq!(body.next().await.unwrap().unwrap().len(), UNREAD);
        let error = body.next().await.unwrap().unwrap_err();
        assert!(error.to_string().contains("did not read the answer for 300s"), "{error}");
    }

    #[tokio::test]
    async fn a_client_that_hangs_up_is_not_waited_for() {
        let (outflow, body) = outflow(PATIENCE);
        outflow.send(vec![1; UNREAD].into()).await.unwrap();
        let waiting = tokio::spawn(async move {
            let sent = outflow.send("more".into()).await;
            outflow.gone().await;
            sent
        });
        // One thread: the sender waits now.
        tokio::task::yield_now().await;
        drop(body);
        assert_eq!(waiting.await.unwrap(), Err(NoOutflow::Gone));
    }
}
