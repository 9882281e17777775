//! What a supervisor and a child have in common: the child's standard input, a pair of sockets.
//!
//! It ends with the supervisor, and the child ends with it. The child writes a byte into it when it is ready. Before it ends for a
//! configuration that cannot work, it writes another byte and why.

use std::os::unix::net::UnixStream;
use std::process::Stdio;

use tokio::io::AsyncReadExt;

/// What the child writes.
const READY: u8 = b'r';
const REFUSED: u8 = b'x';

/// Longest text of a refusal, in bytes: what fits into a socket that is not read.
const LONGEST: usize = 16 << 10;

/// The supervisor's end. The child ends when this is dropped.
#[derive(Debug)]
pub(super) struct Lifeline {
    socket: tokio::net::UnixStream,
    /// What the child has written so far.
    said: Vec<u8>,
}

/// A lifeline, and the standard input of the child that it is for.
///
/// # Errors
/// When the system has no more sockets.
pub(super) fn pair() -> std::io::Result<(Lifeline, Stdio)> {
    let (ours, childs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let socket = tokio::net::UnixStream::from_std(ours)?;
    Ok((Lifeline { socket, said: Vec::new() }, std::os::fd::OwnedFd::from(childs).into()))
}

impl Lifeline {
    /// Resolves when the child says that it is ready.
    pub async fn ready(&mut self) {
        let mut first = [0];
        let ready = matches!(self.socket.read(&mut first).await, Ok(1)) && {
            self.said.extend(first);
            first == [READY]
        };
        if !ready {
            // It has ended or ends, which its caller notices.
            std::future::pending::<()>().await;
        }
    }

    /// Whether a child that has ended had said that it was ready.
    pub fn said_ready(&mut self) -> bool {
        self.take_rest();
        self.said.first() == Some(&READY)
    }

    /// Why a child that has ended said that its configuration cannot work.
    pub fn refusal(&mut self) -> Option<String> {
        self.take_rest();
        let said = self.said.strip_prefix(&[READY]).unwrap_or(&self.said);
        said.strip_prefix(&[REFUSED]).map(|why| String::from_utf8_lossy(why).into_owned())
    }

    fn take_rest(&mut self) {
        let mut more = [0; 4096];
        while let Ok((bytes @ 1.., _)) =
            rustix::net::recv(&self.socket, &mut more, rustix::net::RecvFlags::DONTWAIT)
        {
            if self.said.len() > LONGEST {
                return;
            }
            self.said.extend(&more[..bytes]);
        }
    }
}

/// Tells the supervisor that this process is ready. It is for processes that have one.
pub(super) fn tell_ready() {
    if let Err(error) = tell(&[READY]) {
        tracing::debug!(%error, "no supervisor was told that this process is ready");
    }
}

/// Tells the supervisor why this process's configuration cannot work, or returns false when there is no supervisor to tell. A
/// supervisor that wants this process to end already has heard the reason from another, or needs none.
pub(super) fn tell_refused(why: &str) -> bool {
    let mut said = vec![REFUSED];
    said.extend(why.bytes().take(LONGEST - 1));
    match tell(&said) {
        Ok(sent) => sent == said.len(),
        Err(error) => matches!(error, rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET),
    }
}

fn tell(bytes: &[u8]) -> rustix::io::Result<usize> {
    // A standard input that is a file, a pipe or a terminal is no lifeline, and is not written to.
    rustix::net::send(std::io::stdin(), bytes, rustix::net::SendFlags::NOSIGNAL)
}

/// Waits until the supervisor has ended, or wants this process to end.
pub(super) fn wait_for_end() {
    // Nothing is ever written to it. A connection that breaks has ended, too.
    let _ended = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}
