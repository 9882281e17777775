//! The lifeline between a supervisor and a child: a pair of sockets, one of which is the child's standard input.
//!
//! It closes when the supervisor ends, and then the child ends. The child writes a byte to it when it is ready. Before it ends
//! because its configuration cannot work, it writes another byte and the reason.

use std::os::unix::net::UnixStream;
use std::process::Stdio;

use tokio::io::AsyncReadExt;

/// Bytes that the child writes.
const READY: u8 = b'r';
const REFUSED: u8 = b'x';

/// Limit of the reason for a refusal, in bytes. It fits into a socket that is not read.
const LONGEST: usize = 16 << 10;

/// The supervisor's end. The child ends when this is dropped.
#[derive(Debug)]
pub(super) struct Lifeline {
    socket: tokio::net::UnixStream,
    /// Bytes that the child has written so far.
    said: Vec<u8>,
}

/// Makes a lifeline, and the standard input for the child.
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
    /// Resolves when the child reports that it is ready.
    pub async fn ready(&mut self) {
        let mut first = [0];
        let ready = matches!(self.socket.read(&mut first).await, Ok(1)) && {
            self.said.extend(first);
            first == [READY]
        };
        if !ready {
            // The child has ended or is about to end. The caller notices that, so this never resolves.
            std::future::pending::<()>().await;
        }
    }

    /// Whether a child that has ended had said that it was ready.
    pub fn said_ready(&mut self) -> bool {
        self.take_rest();
        self.said.first() == Some(&READY)
    }

    /// The reason of a child that has ended because its configuration cannot work, if it gave one.
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

/// Tells the supervisor that this process is ready. Only for processes with a supervisor.
pub(super) fn tell_ready() {
    if let Err(error) = tell(&[READY]) {
        tracing::debug!(%error, "no supervisor was told that this process is ready");
    }
}

/// Tells the supervisor why this process's configuration cannot work. Returns false if no supervisor reads it. A closed lifeline
/// counts as told: the supervisor already wants this process to end.
pub(super) fn tell_refused(why: &str) -> bool {
    let mut said = vec![REFUSED];
    said.extend(why.bytes().take(LONGEST - 1));
    match tell(&said) {
        Ok(sent) => sent == said.len(),
        Err(error) => matches!(error, rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET),
    }
}

fn tell(bytes: &[u8]) -> rustix::io::Result<usize> {
    // If standard input is a file, a pipe or a terminal, it is not a lifeline, and `send` fails without writing to it.
    rustix::net::send(std::io::stdin(), bytes, rustix::net::SendFlags::NOSIGNAL)
}

/// Waits until the supervisor has ended, or wants this process to end.
pub(super) fn wait_for_end() {
    // The supervisor never writes to the lifeline, so this returns when it closes or breaks.
    let _ended = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}
