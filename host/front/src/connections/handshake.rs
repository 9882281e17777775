//! The beginning of a connection: TLS where the listener has a certificate, and a sentence for clients that speak none.

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
/// The same once the server ends.
const HANDSHAKE_AT_END: Duration = Duration::from_secs(1);
/// The first byte of a TLS connection: the type of a handshake's record.
const RECORD: u8 = 0x16;
/// Longest wait for a client to take the sentence.
const FAREWELL: Duration = Duration::from_secs(1);
/// Most bytes of a request that are read so that its client gets the sentence, and not a reset.
const UNREAD: u64 = 64 << 10;

/// Shakes hands, within [`HANDSHAKE`] and the time for a `head`.
///
/// # Errors
/// When the client does not, or speaks something else.
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

/// Answers a request in plain text that this is no place for one, as other servers do.
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
