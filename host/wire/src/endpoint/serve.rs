//! Serving other processes.

use std::future::Future;

use tonic::service::Routes;
use tonic::transport::Server;

use super::credentials::Credentials;
use super::listener::Listener;
use super::{PING_EVERY, PING_WAIT};

/// Calls of one connection at once: more than a worker queues and runs. Further ones wait at the caller.
const MAX_CALLS: u32 = 1 << 14;

/// Answers calls on a listener until `stop` resolves. Then calls under way may end, however long they take.
///
/// A listener without credentials answers HTTP/1 requests, too.
///
/// # Errors
/// When the server fails.
pub async fn serve(
    listener: Listener,
    routes: Routes,
    stop: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let is_open = matches!(listener.credentials(), Credentials::None);
    Server::builder()
        .http2_keepalive_interval(Some(PING_EVERY))
        .http2_keepalive_timeout(Some(PING_WAIT))
        .max_concurrent_streams(Some(MAX_CALLS))
        .accept_http1(is_open)
        .add_routes(routes)
        .serve_with_incoming_shutdown(listener.incoming(), stop)
        .await
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::clock;
    use crate::endpoint::fixture::{Counting, ask, beat, client};
    use crate::endpoint::{Address, ListenAt};

    /// The beginning of an HTTP/2 connection: the preface and empty settings.
    const BEGINNING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

    async fn open() -> Listener {
        Listener::bind(&ListenAt::loopback(), Credentials::None).await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_vanished_is_hung_up_on() {
        let Address::Plain(host) = Counting::default().on(open().await) else { panic!("another address") };
        let mut caller = TcpStream::connect((host.name.as_str(), host.port)).await.unwrap();
        caller.write_all(BEGINNING).await.unwrap();
        let before = clock::now();
        // It takes in everything and answers no ping.
        let mut heard = Vec::new();
        clock::timeout(10 * PING_WAIT, caller.read_to_end(&mut heard)).await.unwrap().unwrap();
        assert!(!heard.is_empty() && before.elapsed() >= PING_EVERY + PING_WAIT, "{:?}", before.elapsed());
        assert!(before.elapsed() < 2 * (PING_EVERY + PING_WAIT), "{:?}", before.elapsed());
    }

    #[tokio::test]
    async fn a_call_to_a_server_that_vanished_fails() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = Address::Plain(silent.local_addr().unwrap().into());
        let asked = tokio::spawn(async move { ask(&address, &Credentials::None).await });
        let accepted = silent.accept().await.unwrap();
        // Connecting takes real time. From here on, time passes as soon as nothing else can happen.
        tokio::time::pause();
        let before = clock::now();
        clock::timeout(10 * PING_WAIT, asked).await.unwrap().unwrap().unwrap_err();
        assert!(before.elapsed() >= PING_WAIT, "{:?}", before.elapsed());
        drop(accepted);
    }

    #[tokio::test]
    async fn a_connection_that_broke_is_made_again_by_the_next_call() {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let counting = Counting::default();
        let first = open().await;
        let address = first.address().unwrap();
        let Address::Plain(host) = &address else { panic!("{address}") };
        let at = ListenAt::Tcp(format!("{host}").parse().unwrap());
        let serving = tokio::spawn(serve(first, counting.routes(), async move { drop(stopped.await) }));
        let mut client = client(&address, &Credentials::None);
        beat(&mut client).await.unwrap();
        stop.send(()).unwrap();
        serving.await.unwrap().unwrap();
        beat(&mut client).await.unwrap_err();
        counting.on(Listener::bind(&at, Credentials::None).await.unwrap());
        host_tests::wait::answered_until("a new connection", async || beat(&mut client).await).await;
    }
}
