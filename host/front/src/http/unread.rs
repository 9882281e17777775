//! Limits the bytes of answers that wait to be read: of all clients, and of each client.
//!
//! A complete answer is in memory until its client has taken it, which may never happen. So it takes a part of the client's share
//! from the time when it is made until all of it is sent or dropped. The memory itself holds the share, because HTTP may keep a
//! piece of an answer after its stream has ended. While an answer is collected from parts, its parts count.
//!
//! A streamed answer counts piece by piece and is not refused: its generation waits (`outflow`).

use axum::body::{Body, Bytes, HttpBody, to_bytes};
use axum::response::{IntoResponse, Response};
use host_wire::shares::{Client, NoShare, Share, Shares};

use super::error::ApiError;
use crate::audit::Refusal;

/// Answers of up to this many bytes do not count: the stream that carries one takes more, and streams have a limit. Errors and the
/// answers to load balancers are that small.
const SMALL: usize = 1 << 10;

/// The limit of answers that are made and not yet sent.
#[derive(Clone, Debug)]
pub struct Unread(Shares);

impl Unread {
    /// Allows this many bytes in all.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self(Shares::new(bytes))
    }

    /// Bytes of answers that wait.
    pub(super) fn taken(&self) -> usize {
        self.0.taken()
    }

    /// Whether a client may have another answer.
    ///
    /// # Errors
    /// When the client, or the whole server, is at its limit.
    pub(super) fn check(&self, client: &Client) -> Result<(), ApiError> {
        self.collect(client).grow(SMALL)
    }

    /// An empty part of the client's share, for an answer that is about to be made.
    pub(super) fn collect(&self, client: &Client) -> Collected {
        Collected { share: self.0.take_nothing(client), most: self.0.total() }
    }

    /// Counts the bytes of an answer, if they are known, until they are sent or dropped. An answer that exceeds the client's
    /// share is dropped, and the client gets the refusal instead.
    pub(super) async fn count(&self, client: &Client, answer: Response) -> Response {
        let (head, body) = answer.into_parts();
        let known = body.size_hint().exact().and_then(|bytes| usize::try_from(bytes).ok());
        let Some(bytes) = known.filter(|bytes| *bytes > SMALL) else {
            return Response::from_parts(head, body);
        };
        let mut collected = self.collect(client);
        if let Err(refused) = collected.grow(bytes) {
            return refused.into_response();
        }
        // The body is complete and in one piece, so this does not wait.
        match to_bytes(body, bytes).await {
            Ok(bytes) => {
                let owner = Owner { bytes, _collected: collected };
                Response::from_parts(head, Body::from(Bytes::from_owner(owner)))
            }
            Err(error) => ApiError::internal(format!("an answer broke off: {error}")).into_response(),
        }
    }
}

/// The part of the client's share that an answer takes, as far as the answer is made.
#[derive(Debug)]
pub(super) struct Collected {
    share: Share,
    /// Most bytes of all answers.
    most: usize,
}

impl Collected {
    /// Changes it to so many bytes, which are kept of an answer under way.
    ///
    /// # Errors
    /// When the client, or everything, is at its limit. It stays as it was.
    pub(super) fn keep(&mut self, bytes: usize) -> Result<(), ApiError> {
        let more = bytes.saturating_sub(self.share.amount());
        self.share.shrink_to(bytes);
        self.share.grow_under_way(more).map_err(|why| match why {
            NoShare::Full => {
                let message = "as many bytes of answers under way are kept as this server keeps".to_owned();
                ApiError::full(message, Refusal::AllAnswers)
            }
            NoShare::Client => ApiError::over_share("bytes of answers under way", Refusal::Answers),
        })
    }

    /// Bytes so far.
    pub(super) fn bytes(&self) -> usize {
        self.share.amount()
    }

    /// A long piece of it is made, of an answer that is under way.
    ///
    /// # Errors
    /// As [`Collected::keep`].
    pub(super) fn grow_under_way(&mut self, bytes: usize) -> Result<(), NoShare> {
        self.share.grow_under_way(bytes)
    }

    /// More of it is made.
    ///
    /// # Errors
    /// As [`Unread::check`].
    pub(super) fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        let all = self.share.amount().saturating_add(bytes);
        self.share.grow(bytes).map_err(|why| match why {
            _ if all > self.most => ApiError::too_long_an_answer(self.most),
            NoShare::Full => {
                let message = "as many bytes of answers as this server keeps wait to be read".to_owned();
                ApiError::full(message, Refusal::AllAnswers)
            }
            NoShare::Client => ApiError::unread(Refusal::Answers),
        })
    }
}

/// The memory of an answer.
struct Owner {
    bytes: Bytes,
    _collected: Collected,
}

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;
    use futures_util::StreamExt;

    use super::*;

    fn client(number: u8) -> Client {
        Client::at([10, 0, 0, number].into())
    }

    fn answer(bytes: usize) -> Response {
        vec![b'x'; bytes].into_response()
    }

    #[tokio::test]
    async fn an_answer_counts_until_the_last_piece_of_it_is_dropped() {
        let unread = Unread::new(1_000_000);
        let mut body = unread.count(&client(1), answer(100_000)).await.into_body().into_data_stream();
        assert_eq!(unread.taken(), 100_000);
        let bytes = body.next().await.unwrap().unwrap();
        drop(body);
        let piece = bytes.slice(99_999..);
        drop(bytes);
        assert_eq!((piece.len(), unread.taken()), (1, 100_000));
        drop(piece);
        assert_eq!(unread.taken(), 0);
    }

    #[tokio::test]
    async fn small_answers_do_not_count_and_what_is_streamed_passes() {
        let unread = Unread::new(1_000_000);
        let small = unread.count(&client(1), answer(SMALL)).await;
        let stream = Body::from_stream(futures_util::stream::iter([Ok::<_, std::io::Error>(vec![0; 5000])]));
        let streamed = unread.count(&client(1), stream.into_response()).await;
        assert_eq!(unread.taken(), 0);
        assert_eq!(to_bytes(small.into_body(), SMALL).await.unwrap().len(), SMALL);
        assert_eq!(to_bytes(streamed.into_body(), 5000).await.unwrap().len(), 5000);
    }

    #[tokio::test]
    async fn a_client_beyond_its_share_is_refused_another_is_not_and_one_answer_may_be_too_long() {
        let unread = Unread::new(1_000_000);
        let mut held = Vec::new();
        let refused = loop {
            let counted = unread.count(&client(1), answer(100_000)).await;
            match counted.status() {
                StatusCode::OK => held.push(counted),
                _ => break counted,
            }
        };
        assert_eq!((held.len(), refused.status()), (8, StatusCode::TOO_MANY_REQUESTS));
        assert_eq!(unread.count(&client(2), answer(100_000)).await.status(), StatusCode::OK);
        let too_long = unread.count(&client(2), answer(1_000_001)).await;
        assert_eq!(too_long.status(), StatusCode::BAD_REQUEST);
        held.clear();
        let mut collected = unread.collect(&client(1));
        collected.grow(700_000).unwrap();
        assert_eq!(collected.grow(300_001).unwrap_err().status, StatusCode::BAD_REQUEST);
        assert_eq!(collected.grow(200_000).unwrap_err().status, StatusCode::TOO_MANY_REQUESTS);
        drop(collected);
        assert_eq!(unread.taken(), 0);
    }
}
