//! Checks whether a master is there and answers, without Mooncake. Mooncake would try for 88 s, and its wheel would
//! hold Python's lock meanwhile.

use std::io::{Error, ErrorKind, Read as _, Result, Write as _};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::engine::idle_connections::hang_up;

/// Time between two looks whether a watched call has ended.
const LOOK: Duration = Duration::from_millis(50);

/// A question as Mooncake's clients ask it, for a function that no master has: the magic number, no version, no serialisation,
/// a request, and zeros for its number, its function and its length. An answer and the end of the connection both prove that
/// the process is awake.
const QUESTION: [u8; 20] = {
    let mut header = [0; 20];
    header[0] = 21;
    header
};

/// Checks within `timeout` whether a process listens there and reacts to a question.
///
/// # Errors
/// `TimedOut` when nothing refuses and nothing answers. Otherwise the system's error for a master that is not there.
pub fn answers(address: &str, timeout: Duration) -> Result<()> {
    let mut last = Error::new(ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout).and_then(|stream| exchange(stream, timeout)) {
            Ok(()) => return Ok(()),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Runs a call that may wait for an answer of the master at this address. Shuts the connections to the master when the
/// master has gone silent: otherwise a call to a stopped master takes half a minute and holds Python's lock. A master
/// is silent when it answers two questions in a row too late.
pub fn without_silence<T>(address: &str, timeout: Duration, run: impl FnOnce() -> T) -> T {
    let ended = AtomicBool::new(false);
    let watch = || {
        let (mut looked, mut silent) = (Instant::now(), 0);
        while !ended.load(Ordering::SeqCst) {
            std::thread::park_timeout(LOOK);
            // With a master that answers, the call mostly ends before the first question to it.
            if looked.elapsed() < timeout || ended.load(Ordering::SeqCst) {
                continue;
            }
            let answer = answers(address, timeout);
            looked = Instant::now();
            silent =
                if answer.is_err_and(|error| error.kind() == ErrorKind::TimedOut) { silent + 1 } else { 0 };
            if silent >= 2 && !ended.load(Ordering::SeqCst) {
                let peers: Vec<SocketAddr> = address.to_socket_addrs().into_iter().flatten().collect();
                hang_up(&peers);
            }
        }
    };
    std::thread::scope(|scope| {
        // Without a thread no connection is shut, and the call takes its time.
        let watching =
            std::thread::Builder::new().name("mooncake-master".to_owned()).spawn_scoped(scope, watch);
        let result = run();
        ended.store(true, Ordering::SeqCst);
        if let Ok(watching) = watching {
            watching.thread().unpark();
        }
        result
    })
}

fn exchange(mut stream: TcpStream, timeout: Duration) -> Result<()> {
    // The kernel may give a connection the very port that it goes to, when no process listens there: it is then its own peer.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(ErrorKind::ConnectionRefused.into());
    }
    let deadline = Instant::now() + timeout;
    let left = || Some(deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
    stream.set_write_timeout(left())?;
    let reaction = stream.write_all(&QUESTION).and_then(|()| {
        loop {
            stream.set_read_timeout(left())?;
            match stream.read(&mut [0; 16]) {
                // This process was stopped and goes on, which says nothing of the master.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                read => return read.map(drop),
            }
        }
    });
    match reaction {
        Err(error) if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()) => {
            let text = format!(
                "it takes connections, and did not answer within {timeout:?}: is it a mooncake_master, and is it stopped?"
            );
            Err(Error::new(ErrorKind::TimedOut, text))
        }
        // The master answered or closed the connection, so it is there.
        Ok(()) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::net::TcpListener;
    use std::os::fd::OwnedFd;

    use rustix::net::{AddressFamily, SocketType};

    use super::*;

    /// A socket with a port of its own, at which it does not listen. No other process gets the port while it is open.
    pub fn port() -> (OwnedFd, SocketAddr) {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = rustix::net::getsockname(&socket).unwrap().try_into().unwrap();
        (socket, address)
    }

    #[test]
    fn an_answer_or_an_end_is_a_sign_of_life_and_silence_is_none() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let silence = answers(&address, Duration::from_millis(20)).unwrap_err();
        assert!(
            silence.kind() == ErrorKind::TimedOut && silence.to_string().contains("takes connections"),
            "{silence}"
        );
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The connection without an answer.
                drop(listener.accept().unwrap());
                let mut question = [0; 20];
                let (mut answered, _) = listener.accept().unwrap();
                answered.read_exact(&mut question).unwrap();
                answered.write_all(b"x").unwrap();
                assert_eq!(question, QUESTION);
                drop(listener.accept().unwrap());
            });
            for _ in 0..2 {
                answers(&address, Duration::from_secs(60)).unwrap();
            }
        });
    }

    #[test]
    fn a_port_without_a_listener_is_no_sign_of_life() {
        let (_held, address) = port();
        let gone = answers(&address.to_string(), Duration::from_secs(60)).unwrap_err();
        assert_eq!(gone.kind(), ErrorKind::ConnectionRefused);
    }

    #[test]
    fn a_connection_that_is_its_own_peer_is_no_sign_of_life() {
        let (socket, address) = port();
        rustix::net::connect(&socket, &address).unwrap();
        let alone = exchange(TcpStream::from(socket), Duration::from_secs(60)).unwrap_err();
        assert_eq!(alone.kind(), ErrorKind::ConnectionRefused);
    }
}
