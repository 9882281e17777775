use std::io::Read as _;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream as StdUnixStream;

use host_tests::skip::skipped;
use host_tests::wait::answered_until;
use rustix::thread::set_thread_res_uid;

use super::*;
use crate::endpoint::fixture::{Counting, ask, beat, client};

/// A user who is not root, and need not exist.
const OTHER: u32 = 65_533;

/// Does something as another user, on a thread of its own: on Linux each thread has its own user.
fn as_other<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let user = rustix::process::Uid::from_raw(OTHER);
            set_thread_res_uid(user, user, user).unwrap();
            act()
        });
        other.join().unwrap()
    })
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        skipped("connections of another user: only root can make them");
    }
    is_root
}

/// A folder that every user may use, so that only the check of credentials can refuse them.
fn open_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).unwrap();
    folder
}

async fn unix(path: &Path) -> Listener {
    Listener::bind(&ListenAt::Unix(path.to_owned()), Credentials::SameUser).await.unwrap()
}

#[tokio::test]
async fn processes_of_one_user_speak_over_a_socket_of_that_user_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.sock");
    let server = Counting::default();
    let address = server.on(unix(&path).await);
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    ask(&address, &Credentials::SameUser).await.unwrap();
    assert_eq!(server.calls(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_of_another_user_is_closed_without_a_word() {
    if !is_root() {
        return;
    }
    let folder = open_folder();
    let path = folder.path().join("a.sock");
    let server = Counting::default();
    let address = server.on(unix(&path).await);
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
    let read = tokio::task::spawn_blocking(move || {
        as_other(|| {
            let mut connection = StdUnixStream::connect(&path).unwrap();
            connection.set_read_timeout(Some(host_tests::cluster::PATIENCE)).unwrap();
            // A server that speaks HTTP/2 would answer with its settings. It may be gone before this is written.
            drop(std::io::Write::write_all(
                &mut connection,
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
            ));
            let mut answer = Vec::new();
            let ended = connection.read_to_end(&mut answer);
            let is_closed = ended.is_ok() || ended.unwrap_err().kind() == std::io::ErrorKind::ConnectionReset;
            (is_closed, answer)
        })
    });
    assert_eq!(read.await.unwrap(), (true, Vec::new()));
    ask(&address, &Credentials::SameUser).await.unwrap();
    assert_eq!(server.calls(), 1, "its own user's");
}

#[tokio::test]
async fn a_server_of_another_user_is_not_spoken_to() {
    if !is_root() {
        return;
    }
    let folder = open_folder();
    let path = folder.path().join("a.sock");
    let socket = as_other(|| bind_socket(&path).unwrap());
    let server = Counting::default();
    let address = server.on(Listener::inherited(socket, Credentials::SameUser).unwrap());
    let refused = ask(&address, &Credentials::SameUser).await.unwrap_err();
    assert!(refused.contains(&OTHER.to_string()) && refused.contains("a.sock"), "{refused}");
    assert_eq!(server.calls(), 0);
}

#[tokio::test]
async fn connections_beyond_the_limit_are_closed_and_places_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let server = Counting::default();
    let address = server.on(unix(&folder.path().join("a.sock")).await.at_most(2));
    let (mut first, mut second) =
        (client(&address, &Credentials::SameUser), client(&address, &Credentials::SameUser));
    beat(&mut first).await.unwrap();
    beat(&mut second).await.unwrap();
    ask(&address, &Credentials::SameUser).await.unwrap_err();
    assert_eq!(server.calls(), 2);
    drop(first);
    answered_until("a place to be free", async || ask(&address, &Credentials::SameUser).await).await;
    beat(&mut second).await.unwrap();
}

#[test]
fn a_socket_that_was_left_is_replaced_and_nothing_else_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.sock");
    let listening = bind_socket(&path).unwrap();
    assert_eq!(bind_socket(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    drop(listening);
    let _listening = bind_socket(&path).unwrap();
    let file = folder.path().join("notes");
    std::fs::write(&file, "mine").unwrap();
    assert_eq!(bind_socket(&file).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
    let long = folder.path().join("d".repeat(LONGEST_PATH));
    assert!(bind_socket(&long).unwrap_err().to_string().contains("107 bytes"));
}

#[tokio::test]
async fn a_listener_has_the_credentials_that_its_address_is_for() {
    let folder = tempfile::tempdir().unwrap();
    let at = ListenAt::Unix(folder.path().join("a.sock"));
    let unchecked = Listener::bind(&at, Credentials::None).await.unwrap_err();
    assert!(unchecked.to_string().contains("over Unix sockets"), "{unchecked}");
    let socket = bind_socket(&folder.path().join("b.sock")).unwrap();
    assert!(Listener::inherited(socket, Credentials::None).is_err());
    assert!(Listener::bind(&ListenAt::loopback(), Credentials::SameUser).await.is_err());
    let open = Listener::bind(&ListenAt::loopback(), Credentials::None).await.unwrap();
    let server = Counting::default();
    ask(&server.on(open), &Credentials::None).await.unwrap();
}
