//! Bounds what watchers of a process leave unread of its answers.
//!
//! HTTP/2 lets a client ask, and allow no byte of the answer to be sent. Each answer then waits in memory until its connection
//! ends. So an answer takes its bytes from what its connection may leave unread, and gives them back when they are sent.

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse as _, Response};

use crate::shares::{Client, NoShare, Share, Shares};

/// Most bytes that a connection leaves unread, where connections pass.
pub(super) const OF_ONE: usize = 256 << 10;
/// Most bytes that all connections of a listener leave unread, where they last. A client has its share of them.
pub(super) const OF_ALL: usize = 32 << 20;
/// Answers of so many bytes do not count: those of probes, which are answered whatever else is unread.
const SMALL: usize = 1 << 10;

/// What the client of a connection may leave unread. Among the extensions of each of its requests.
#[derive(Clone, Debug)]
pub(super) struct Unread {
    bytes: Shares,
    client: Client,
}

/// The bytes of an answer, until HTTP has sent them or given them up.
struct Held {
    bytes: Bytes,
    _share: Share,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Unread {
    /// A part of these bytes.
    pub fn new(bytes: Shares, client: Client) -> Self {
        Self { bytes, client }
    }

    /// A text that is larger than all there is takes all of it.
    fn take(&self, bytes: usize) -> Result<Share, NoShare> {
        self.bytes.take(&self.client, bytes.min(self.bytes.total()))
    }
}

/// Routes whose answers are in memory, refused with 503 while their client leaves too many bytes unread.
pub(super) fn bounded(routes: Router) -> Router {
    routes.layer(from_fn(bound))
}

async fn bound(request: Request, next: Next) -> Response {
    let Some(unread) = request.extensions().get::<Unread>().cloned() else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let (head, body) = next.run(request).await.into_parts();
    let Ok(bytes) = to_bytes(body, usize::MAX).await else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    if bytes.len() <= SMALL {
        return Response::from_parts(head, Body::from(bytes));
    }
    match unread.take(bytes.len()) {
        Ok(share) => {
            let held = Bytes::from_owner(Held { bytes, _share: share });
            Response::from_parts(head, Body::from(held))
        }
        Err(_unread) => {
            let why = "read the answers that were sent before, or connect again\n";
            (StatusCode::SERVICE_UNAVAILABLE, why).into_response()
        }
    }
}
