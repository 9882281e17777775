//! Connections to a listener with a certificate.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;

use host_wire::endpoint::authority::{Authority, Validity};
use host_wire::endpoint::{Authorities, ConnectedTls};

use super::*;

/// A certificate for `localhost`, and the authorities that a client trusts.
fn certified() -> (ApiTls, Authorities) {
    let folder = tempfile::tempdir().unwrap();
    let [cert, key, ca] = ["cert.pem", "key.pem", "ca.pem"].map(|name| folder.path().join(name));
    let authority = Authority::new(Validity::Days(1)).unwrap();
    let issued = authority.issue_server(&["localhost".to_owned()], Validity::Days(1)).unwrap();
    std::fs::write(&cert, issued.certificate.pem()).unwrap();
    std::fs::write(&key, issued.key.serialize_pem()).unwrap();
    std::fs::write(&ca, authority.certificate().pem()).unwrap();
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    let server = ApiTls::load(&cert, &key).unwrap();
    let client = Authorities::of_file(&ca).unwrap();
    // The folder is removed here: the server keeps what it has loaded.
    (server, client)
}

async fn listening_with_tls(
    limits: Limits,
) -> (SocketAddr, Authorities, watch::Sender<bool>, tokio::task::JoinHandle<()>) {
    let (server, client) = certified();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let listener = HttpListener::from(listener).with_tls(Some(server));
    assert_eq!(listener.to_string(), format!("https://{address}"));
    let (stop, stopping) = watch::channel(false);
    let serving = tokio::spawn(serve(listener, now(), limits, stopping));
    (address, client, stop, serving)
}

async fn connect(address: SocketAddr, client: &Authorities) -> ConnectedTls {
    client.connect("localhost", TcpStream::connect(address).await.unwrap()).await.unwrap()
}

async fn answer(connection: &mut ConnectedTls) -> String {
    connection.write_all(b"GET /now HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut all = String::new();
    connection.read_to_string(&mut all).await.unwrap();
    all
}

#[tokio::test]
async fn requests_are_answered_over_tls_and_one_in_plain_text_is_told_so() {
    let (address, client, _stop, _serving) = listening_with_tls(limits(8)).await;
    assert!(answer(&mut connect(address, &client).await).await.ends_with("answered"));
    let mut plain = TcpStream::connect(address).await.unwrap();
    // The request is longer than the part of a head that the server reads.
    let request = format!("GET /now HTTP/1.1\r\nhost: x\r\ncookie: {}\r\n\r\n", "x".repeat(10_000));
    plain.write_all(request.as_bytes()).await.unwrap();
    let told = rest(&mut plain).await;
    assert!(told.starts_with("HTTP/1.1 400 ") && told.contains("use https://"), "{told}");
    let mut nonsense = TcpStream::connect(address).await.unwrap();
    nonsense.write_all(b"\0\0\0").await.unwrap();
    assert_eq!(rest(&mut nonsense).await, "");
}

#[tokio::test]
async fn clients_that_shake_no_hands_take_their_share_alone_and_are_closed_in_time() {
    let (address, client, _stop, _serving) = listening_with_tls(limits(20)).await;
    let mut silent = Vec::new();
    for _ in 0..30 {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    // Connections beyond the share are closed without a handshake.
    let mut closed = 0;
    for connection in &mut silent[16..] {
        closed += usize::from(connection.read(&mut [0; 8]).await.is_ok_and(|count| count == 0));
    }
    assert_eq!(closed, 14);
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 2], 0).into()).unwrap();
    let other = socket.connect(address).await.unwrap();
    let mut other = client.connect("localhost", other).await.unwrap();
    assert!(answer(&mut other).await.ends_with("answered"));
    // The deadline of the handshake ends long before the time for a head.
    tokio::time::pause();
    let before = clock::now();
    assert_eq!(rest(&mut silent[0]).await, "");
    assert!(before.elapsed() < HEAD / 2, "{:?}", before.elapsed());
    for connection in &mut silent[1..16] {
        assert_eq!(rest(connection).await, "");
    }
    tokio::time::resume();
    assert!(answer(&mut connect(address, &client).await).await.ends_with("answered"));
}

#[tokio::test]
async fn a_stop_waits_for_no_handshake() {
    let (address, _client, stop, serving) = listening_with_tls(limits(8)).await;
    let mut silent = TcpStream::connect(address).await.unwrap();
    // When a later connection was accepted, this one was, too.
    let mut later = TcpStream::connect(address).await.unwrap();
    later.write_all(ASK).await.unwrap();
    assert!(rest(&mut later).await.contains("use https://"));
    stop.send_replace(true);
    tokio::time::pause();
    let before = clock::now();
    serving.await.unwrap();
    assert!(before.elapsed() < Duration::from_secs(5), "{:?}", before.elapsed());
    assert_eq!(rest(&mut silent).await, "");
}

#[tokio::test]
async fn a_unix_socket_is_for_processes_of_this_user() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.sock");
    let socket = host_wire::endpoint::bind_socket(&path).unwrap();
    let listener = tokio::net::UnixListener::from_std(socket.into()).unwrap();
    let listener = HttpListener::from(listener).with_tls(Some(certified().0));
    assert!(listener.is_local().unwrap());
    assert_eq!(listener.to_string(), format!("unix:{}", path.display()), "no TLS there");
    let (_stop, stopping) = watch::channel(false);
    tokio::spawn(serve(listener, now(), limits(8), stopping));
    let mut connection = tokio::net::UnixStream::connect(&path).await.unwrap();
    connection.write_all(b"GET /now HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut all = String::new();
    connection.read_to_string(&mut all).await.unwrap();
    assert!(all.ends_with("answered"), "{all}");
}
