//! The beginning of a connection: the TLS handshake where the listener has a certificate, and an error in plain text for clients
//! that do not speak TLS.

use std::io;
use std::time::Duration;

use host_wire::clock;
use host_wire::endpoint::{AcceptedTls, ApiTls};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;

use super::stopped;

/// Longest time that a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Longest time for a handshake to finish after the server begins to end.
const HANDSHAKE_AT_END: Duration = Duration::from_secs(1);
/// The first byte of a TLS connection: the type of a handshake's record.
const RECORD: u8 = 0x16;
/// Longest time to send the plain-text error.
const FAREWELL: Duration = Duration::from_secs(1);
/// Most bytes of a request that are read after the plain-text error, so that the client gets the error and not a reset.
const UNREAD: u64 = 64 << 10;

/// Makes the TLS handshake, within the shorter of [`HANDSHAKE`] and `head`.
///
/// # Errors
/// When the client does not shake hands in time, or does not speak TLS, or the server ends.
pub(super) async fn shake_hands(
    tls: &ApiTls,
    connection: TcpStream,
    head: Duration,
    mut stop: watch::Receiver<bool>,
) -> io::Result<Box<AcceptedTls>> {
    let begun = async {
        let mut first = [0];
        if connection.peek(&mut first).await? == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed before the first byte"));
        }
        if first[0] != RECORD {
            if first[0].is_ascii_uppercase() {
                drop(clock::timeout(FAREWELL, say_https(connection)).await);
            }
            return Err(io::Error::other("it does not speak TLS"));
        }
        tls.accept(connection).await
    };
    let ends = async {
        stopped(&mut stop).await;
        clock::sleep(HANDSHAKE_AT_END).await;
    };
    let limit = HANDSHAKE.min(head);
    tokio::select! {
        begun = clock::timeout(limit, begun) => begun
            .unwrap_or_else(|_elapsed| Err(io::Error::other(format!("no TLS handshake within {limit:?}"))))
            .map(Box::new),
        () = ends => Err(io::Error::other("the server ends")),
    }
}

/// Answers a plain-text request with an error that says that this port speaks TLS, as other servers do.
async fn say_https(mut connection: TcpStream) -> io::Result<()> {
    let body = r#"{"error":{"message":"this port speaks TLS: use https://","type":"invalid_request_error","param":null,"code":null}}"#;
    let length = body.len();
    let answer = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    );
    connection.write_all(answer.as_bytes()).await?;
    connection.shutdown().await?;
    // Closing with unread bytes would reset the connection, and the client may not see the answer.
    tokio::io::copy(&mut connection.take(UNREAD), &mut tokio::io::sink()).await?;
    Ok(())
}
