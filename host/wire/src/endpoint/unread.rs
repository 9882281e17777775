//! Limits the answers that watchers of a process leave unread.
//!
//! In HTTP/2 a client can send a request and allow no byte of the answer to be sent. Each answer then waits in memory until its
//! connection ends. So the bytes of an answer count against a limit until they are sent.

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse as _, Response};

use crate::shares::{Client, NoShare, Share, Shares};

/// Most unread bytes of one connection, where connections are passing.
pub(super) const OF_ONE: usize = 256 << 10;
/// Most unread bytes of all connections of a listener, where connections last. Each client has its share of them.
pub(super) const OF_ALL: usize = 32 << 20;
/// Answers of up to this many bytes do not count. So probes are answered whatever else is unread.
const SMALL: usize = 1 << 10;

/// The limit of unread bytes for the client of a connection. It is an extension of each request of the connection.
#[derive(Clone, Debug)]
pub(super) struct Unread {
    bytes: Shares,
    client: Client,
}

/// The bytes of an answer, until HTTP has sent or dropped them.
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
    /// A client's part of these bytes.
    pub fn new(bytes: Shares, client: Client) -> Self {
        Self { bytes, client }
    }

    /// Takes a share for an answer. An answer that is larger than the whole limit takes all of it.
    fn take(&self, bytes: usize) -> Result<Share, NoShare> {
        self.bytes.take(&self.client, bytes.min(self.bytes.total()))
    }
}

/// Answers of these routes are held in memory. They are refused with 503 while their client leaves too many bytes unread.
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
