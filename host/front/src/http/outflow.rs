//! The buffer between a generation and its client. It limits how many bytes of an answer may be unread.
//!
//! A generation that has ended frees its place and its pages at once, whether or not its client has read the answer. A generation
//! under way waits for its client when too many bytes are unread. It is cancelled when its client takes nothing for too long.
//!
//! Unread bytes count in the client's share of unread answers (`unread`) until they are sent. A client that has used up its share
//! may be behind by one piece: its generations go on as it reads. A stream of which the client takes nothing ends
//! (`connections::activity`), whether or not its generation goes on.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures_util::stream;
use host_wire::clock;
use host_wire::shares::Client;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::unread::{Collected, Unread};

/// Most bytes of one answer that wait for its client: about a thousand events.
const UNREAD: usize = 256 << 10;
/// How often a long piece asks for a part of the client's share.
const RETRY: Duration = Duration::from_millis(100);

/// The end that the generation writes to.
pub(super) struct Outflow {
    events: mpsc::UnboundedSender<Sent>,
    room: Arc<Semaphore>,
    patience: Duration,
    unread: Unread,
    client: Client,
}

/// The reason why nothing more can be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoOutflow {
    /// The client has hung up.
    Gone,
    /// The client has taken nothing for too long.
    Stalled,
    /// The piece is longer than an answer may be behind, and the client already has its share of unread bytes.
    OverShare,
}

/// The error that ends the body of an answer.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("the client did not read the answer for {0:?}")]
    Stalled(Duration),
    #[error("the client has its share of answers that are not read")]
    OverShare,
}

type Sent = Result<UnsentPiece, Broken>;

/// A piece of an answer, with the room that it takes.
struct UnsentPiece {
    bytes: Bytes,
    takes: Takes,
}

/// The room and the share that a piece holds until it is dropped.
struct Takes {
    _room: OwnedSemaphorePermit,
    /// Part of the client's share, if any was left.
    _share: Option<Collected>,
}

/// The memory of joined pieces. HTTP may keep it for a while.
struct Owner {
    bytes: Bytes,
    _takes: Vec<Takes>,
}

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Makes both ends. A client that is behind has `patience` to take something.
pub(super) fn outflow(patience: Duration, unread: Unread, client: Client) -> (Outflow, Body) {
    let (events, received) = mpsc::unbounded_channel();
    let room = Arc::new(Semaphore::new(UNREAD));
    let inflow = Inflow { received, broken: None };
    let body = stream::unfold(inflow, |mut inflow| async move { Some((inflow.next().await?, inflow)) });
    (Outflow { events, room, patience, unread, client }, Body::from_stream(body))
}

impl Outflow {
    /// Sends bytes when there is room for them. Bytes that exceed the whole room are sent when all of it is free.
    pub(super) async fn send(&self, bytes: Bytes) -> Result<(), NoOutflow> {
        let share = if bytes.len() > UNREAD {
            Some(self.share_of(bytes.len()).await?)
        } else {
            self.try_share(bytes.len())
        };
        // A piece without a share waits until all pieces before it are sent, and later pieces wait for it.
        let wanted = if share.is_some() { bytes.len().min(UNREAD) } else { UNREAD };
        // UNREAD fits into `u32`.
        let room = Arc::clone(&self.room).acquire_many_owned(u32::try_from(wanted).unwrap_or(u32::MAX));
        let room = tokio::select! {
            room = clock::timeout(self.patience, room) => room,
            () = self.gone() => return Err(NoOutflow::Gone),
        };
        let room = match room {
            Ok(Ok(room)) => room,
            // The semaphore is never closed.
            Ok(Err(_closed)) => return Err(NoOutflow::Gone),
            Err(_elapsed) => {
                drop(self.events.send(Err(Broken::Stalled(self.patience))));
                return Err(NoOutflow::Stalled);
            }
        };
        let takes = Takes { _room: room, _share: share };
        self.events.send(Ok(UnsentPiece { bytes, takes })).map_err(|_unsent| NoOutflow::Gone)
    }

    /// A part of the client's share, if there is room for it now.
    fn try_share(&self, bytes: usize) -> Option<Collected> {
        let mut share = self.unread.collect(&self.client);
        share.grow_under_way(bytes).is_ok().then_some(share)
    }

    /// A part of the client's share for a long piece. Waits for other answers of the client to be read.
    async fn share_of(&self, bytes: usize) -> Result<Collected, NoOutflow> {
        let until = clock::now() + self.patience;
        loop {
            if let Some(share) = self.try_share(bytes) {
                return Ok(share);
            }
            if clock::now() >= until {
                drop(self.events.send(Err(Broken::OverShare)));
                return Err(NoOutflow::OverShare);
            }
            tokio::select! {
                () = clock::sleep(RETRY) => {}
                () = self.gone() => return Err(NoOutflow::Gone),
            }
        }
    }

    /// Resolves when the client has hung up.
    pub(super) async fn gone(&self) {
        self.events.closed().await;
    }
}

/// The end that the client's body reads from.
struct Inflow {
    received: mpsc::UnboundedReceiver<Sent>,
    broken: Option<Broken>,
}

impl Inflow {
    /// Waits for pieces and returns all that are there as one. This piece holds the room and the shares of its parts until it is
    /// dropped.
    async fn next(&mut self) -> Option<Result<Bytes, Broken>> {
        let first = match self.broken.take() {
            Some(broken) => return Some(Err(broken)),
            None => match self.received.recv().await? {
                Ok(piece) => piece,
                Err(broken) => return Some(Err(broken)),
            },
        };
        let (mut all, mut takes) = (vec![first.bytes], vec![first.takes]);
        while let Ok(next) = self.received.try_recv() {
            match next {
                Ok(piece) => {
                    all.push(piece.bytes);
                    takes.push(piece.takes);
                }
                Err(broken) => {
                    self.broken = Some(broken);
                    break;
                }
            }
        }
        let bytes = match all.pop() {
            Some(only) if all.is_empty() => only,
            last => Bytes::from(all.into_iter().chain(last).collect::<Vec<_>>().concat()),
        };
        Some(Ok(Bytes::from_owner(Owner { bytes, _takes: takes })))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(300);

    fn client() -> Client {
        Client::at([10, 0, 0, 1].into())
    }

    fn outflow(patience: Duration) -> (Outflow, Body) {
        super::outflow(patience, Unread::new(8 * UNREAD), client())
    }

    #[tokio::test]
    async fn what_is_unread_counts_until_it_is_sent_and_beyond_the_share_one_piece_at_a_time_goes_on() {
        let unread = Unread::new(1000);
        let (outflow, body) = super::outflow(PATIENCE, unread.clone(), client());
        for _ in 0..8 {
            outflow.send(vec![1; 100].into()).await.unwrap();
        }
        assert_eq!(unread.taken(), 800);
        let sending = tokio::spawn(async move {
            for _ in 0..20 {
                outflow.send(vec![2; 100].into()).await.unwrap();
            }
        });
        // The runtime has one thread, so the sender waits after this.
        tokio::task::yield_now().await;
        assert_eq!(unread.taken(), 800);
        let mut body = body.into_data_stream();
        let first = body.next().await.unwrap().unwrap();
        tokio::task::yield_now().await;
        assert_eq!((first.len(), unread.taken(), sending.is_finished()), (800, 800, false));
        drop(first);
        let mut rest = 0;
        while let Some(piece) = body.next().await {
            rest += piece.unwrap().len();
        }
        sending.await.unwrap();
        assert_eq!((rest, unread.taken()), (2000, 0));
    }

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
            // More bytes than the whole room.
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

    #[tokio::test(start_paused = true)]
    async fn a_long_piece_waits_for_a_share_and_one_that_gets_none_ends_the_answer() {
        let unread = Unread::new(4 * UNREAD);
        let (outflow, body) = super::outflow(PATIENCE, unread.clone(), client());
        outflow.send(vec![1; 3 * UNREAD].into()).await.unwrap();
        let mut body = body.into_data_stream();
        {
            let mut long = std::pin::pin!(outflow.send(vec![1; UNREAD + 1].into()));
            assert!(clock::timeout(PATIENCE / 2, &mut long).await.is_err(), "there is no share for it");
            assert_eq!(body.next().await.unwrap().unwrap().len(), 3 * UNREAD);
            assert_eq!(long.await, Ok(()), "what was read is free");
        }
        assert_eq!(body.next().await.unwrap().unwrap().len(), UNREAD + 1);
        let mut other = unread.collect(&client());
        other.grow(3 * UNREAD).unwrap();
        let before = clock::now();
        assert_eq!(outflow.send(vec![1; UNREAD + 1].into()).await, Err(NoOutflow::OverShare));
        assert_eq!(clock::now() - before, PATIENCE);
        let error = body.next().await.unwrap().unwrap_err();
        assert!(error.to_string().contains("its share of answers"), "{error}");
        drop((outflow, body, other));
        assert_eq!(unread.taken(), 0);
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
        // The runtime has one thread, so the sender waits after this.
        tokio::task::yield_now().await;
        drop(body);
        assert_eq!(waiting.await.unwrap(), Err(NoOutflow::Gone));
    }
}
