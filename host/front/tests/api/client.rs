//! A small HTTP client for the tests: one request per connection, events as they come, hanging up at any time.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use host_tests::wait::PATIENCE;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

/// An answer's head. The body is still on the wire.
pub struct Reply {
    pub status: u16,
    headers: Vec<(String, String)>,
    body: BufReader<TcpStream>,
    /// The beginning of an event whose end has not come. A chunk may end anywhere.
    begun: Vec<u8>,
}

/// Sends a request and reads the head of its answer.
pub async fn send(to: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
    send_from(Ipv4Addr::LOCALHOST.into(), to, method, path, headers, body).await
}

/// Sends a request from an address of the loopback network, and reads the head of its answer.
pub async fn send_from(
    from: IpAddr,
    to: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Reply {
    let exchange = send_unbounded(from, to, method, path, headers, body);
    timeout(PATIENCE, exchange).await.unwrap_or_else(|_| panic!("no answer to {method} {path}"))
}

/// A connection from an address of the loopback network.
pub async fn connect_from(from: IpAddr, to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    socket.connect(to).await.unwrap()
}

async fn send_unbounded(
    from: IpAddr,
    to: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Reply {
    let mut connection = connect_from(from, to).await;
    let mut head =
        format!("{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
    if headers.iter().all(|(name, _)| *name != "host") {
        head.push_str("host: localhost\r\n");
    }
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    connection.write_all(head.as_bytes()).await.unwrap();
    // A server may refuse a large body before it has read it.
    drop(connection.write_all(body).await);
    let mut body = BufReader::new(connection);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        body.read_line(&mut line).await.unwrap();
        if line.trim().is_empty() {
            break;
        }
        lines.push(line.trim().to_owned());
    }
    let status = lines[0].split(' ').nth(1).unwrap().parse().unwrap();
    let headers = lines[1..]
        .iter()
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    Reply { status, headers, body, begun: Vec::new() }
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(header, _)| header == name).map(|(_, value)| value.as_str())
    }

    /// The next chunk of a chunked body, or `None` at its end.
    pub async fn chunk(&mut self) -> Option<Vec<u8>> {
        let mut size = String::new();
        timeout(PATIENCE, self.body.read_line(&mut size)).await.expect("no more of the body comes").unwrap();
        let size = usize::from_str_radix(size.trim(), 16).unwrap_or(0);
        let mut chunk = vec![0; size + 2];
        if size == 0 || self.body.read_exact(&mut chunk).await.is_err() {
            return None;
        }
        chunk.truncate(size);
        Some(chunk)
    }

    /// The whole body.
    pub async fn text(mut self) -> String {
        let mut bytes = Vec::new();
        if self.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk().await {
                bytes.extend(chunk);
            }
        } else {
            let length: usize = self.header("content-length").unwrap().parse().unwrap();
            bytes.resize(length, 0);
            self.body.read_exact(&mut bytes).await.unwrap();
        }
        String::from_utf8(bytes).unwrap()
    }

    pub async fn json(self) -> Value {
        let text = self.text().await;
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text:?}"))
    }

    /// The next whole events that arrive together. Empty at the end. `[DONE]` is returned as a string.
    pub async fn some_events(&mut self) -> Vec<Value> {
        const END: &[u8] = b"\n\n";
        while let Some(chunk) = self.chunk().await {
            self.begun.extend(chunk);
            let ends = self.begun.windows(END.len()).rposition(|bytes| bytes == END);
            if let Some(end) = ends {
                let rest = self.begun.split_off(end + END.len());
                let whole = String::from_utf8(std::mem::replace(&mut self.begun, rest)).unwrap();
                return whole.split_terminator("\n\n").map(parse_event).collect();
            }
        }
        assert!(
            self.begun.is_empty(),
            "the body ends within an event: {:?}",
            String::from_utf8_lossy(&self.begun)
        );
        Vec::new()
    }

    /// All events up to the end of the body.
    pub async fn events(mut self) -> Vec<Value> {
        let mut all = Vec::new();
        loop {
            let events = self.some_events().await;
            if events.is_empty() {
                return all;
            }
            all.extend(events);
        }
    }
}

/// The data of an event. Checks that the event's name, if it has one, is the type of its data.
fn parse_event(event: &str) -> Value {
    let (name, data) = match event.strip_prefix("event: ").and_then(|event| event.split_once('\n')) {
        Some((name, data)) => (Some(name), data),
        None => (None, event),
    };
    let data = data.strip_prefix("data: ").unwrap_or_else(|| panic!("not an event: {event:?}"));
    let data = serde_json::from_str(data).unwrap_or_else(|_| Value::from(data));
    assert!(name.is_none_or(|name| data["type"] == name), "{event:?}");
    data
}
