//! Limits the bodies of requests that are being received: how many at once, and how many bytes.

use std::pin::pin;

use axum::body::{Body, Bytes, HttpBody};
use futures_util::future::poll_fn;
use host_wire::shares::{Client, NoShare, Share, Shares};

use super::error::ApiError;
use crate::audit::Refusal;

/// The limits of bodies that are being received.
#[derive(Clone, Debug)]
pub struct Uploads {
    requests: Shares,
    bytes: Shares,
}

impl Uploads {
    /// Allows this many bodies at once and this many bytes in all.
    #[must_use]
    pub fn new(at_once: usize, bytes: usize) -> Self {
        Self { requests: Shares::new(at_once), bytes: Shares::new(bytes) }
    }

    /// Bodies and bytes that are being received.
    pub(super) fn taken(&self) -> (usize, usize) {
        (self.requests.taken(), self.bytes.taken())
    }

    /// Receives a whole body of at most `most` bytes. Returns it with the client's share of the bytes.
    ///
    /// # Errors
    /// When the body is larger or breaks off, or when uploads exceed the client's share or the limit of all clients.
    pub(super) async fn receive(
        &self,
        client: &Client,
        body: Body,
        most: usize,
    ) -> Result<(Bytes, Share), ApiError> {
        let refused = |why| match why {
            NoShare::Full => {
                let message = "as much as this server takes is being sent to it".to_owned();
                ApiError::full(message, Refusal::AllUploads)
            }
            NoShare::Client => ApiError::over_share("requests that are being sent", Refusal::Uploads),
        };
        let _request = self.requests.take(client, 1).map_err(refused)?;
        let mut share = self.bytes.take(client, 0).map_err(refused)?;
        let mut body = pin!(body);
        let mut all = Vec::new();
        while let Some(frame) = poll_fn(|context| body.as_mut().poll_frame(context)).await {
            let frame = frame.map_err(|error| ApiError::unreadable(&error))?;
            // Trailers are ignored.
            let Ok(data) = frame.into_data() else { continue };
            if all.len() + data.len() > most {
                return Err(ApiError::too_large(most));
            }
            share.grow(data.len()).map_err(refused)?;
            all.extend_from_slice(&data);
        }
        Ok((Bytes::from(all), share))
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use axum::http::StatusCode;
    use futures_util::stream;

    use super::*;

    fn client(number: u8) -> Client {
        Client::at([10, 0, 0, number].into())
    }

    fn pieces(pieces: Vec<Vec<u8>>) -> Body {
        Body::from_stream(stream::iter(
            pieces.into_iter().map(|piece| Ok::<_, Infallible>(Bytes::from(piece))),
        ))
    }

    #[tokio::test]
    async fn a_body_in_pieces_is_whole_and_its_bytes_count_until_it_is_read() {
        let uploads = Uploads::new(8, 800);
        let (body, share) =
            uploads.receive(&client(1), pieces(vec![vec![1; 60], vec![2; 40]]), 100).await.unwrap();
        assert_eq!((body.len(), uploads.bytes.taken(), uploads.requests.taken()), (100, 100, 0));
        drop(share);
        assert_eq!(uploads.bytes.taken(), 0);
        let refused =
            uploads.receive(&client(1), pieces(vec![vec![1; 60], vec![2; 41]]), 100).await.unwrap_err();
        assert_eq!(refused.status, StatusCode::PAYLOAD_TOO_LARGE);
        assert_eq!(uploads.bytes.taken(), 0);
    }

    #[tokio::test]
    async fn a_client_with_more_than_its_share_on_the_way_is_refused_and_another_is_not() {
        let uploads = Uploads::new(8, 1000);
        let mut held = Vec::new();
        let refused = loop {
            match uploads.receive(&client(1), pieces(vec![vec![1; 100]]), 100).await {
                Ok(body) => held.push(body),
                Err(refused) => break refused,
            }
        };
        assert_eq!((held.len(), refused.status), (8, StatusCode::TOO_MANY_REQUESTS));
        uploads.receive(&client(2), pieces(vec![vec![1; 100]]), 100).await.unwrap();
        held.clear();
        uploads.receive(&client(1), pieces(vec![vec![1; 100]]), 100).await.unwrap();
    }
}
