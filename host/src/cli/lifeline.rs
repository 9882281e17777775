//! What a supervisor and a child have in common: the child's standard input, a pair of sockets.
//!
//! It ends with the supervisor, and the child ends with it. The child writes a byte into it when it is ready.

use std::os::unix::net::UnixStream;
use std::process::Stdio;

use tokio::io::AsyncReadExt;

/// The supervisor's end. The child ends when this is dropped.
#[derive(Debug)]
pub(super) struct Lifeline(tokio::net::UnixStream);

/// A lifeline, and the standard input of the child that it is for.
///
/// # Errors
/// When the system has no more sockets.
pub(super) fn pair() -> std::io::Result<(Lifeline, Stdio)> {
    let (ours, childs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let ours = tokio::net::UnixStream::from_std(ours)?;
    Ok((Lifeline(ours), std::os::fd::OwnedFd::from(childs).into()))
}

impl Lifeline {
    /// Resolves when the child says that it is ready.
    pub async fn ready(&mut self) {
        if !matches!(self.0.read(&mut [0]).await, Ok(1)) {
            // It has ended, which its caller notices.
            std::future::pending::<()>().await;
        }
    }

    /// Whether the child has said so, and [`ready`](Self::ready) has not noticed yet.
    pub fn said_ready(&self) -> bool {
        rustix::net::recv(&self.0, &mut [0], rustix::net::RecvFlags::DONTWAIT)
            .is_ok_and(|(bytes, _)| bytes == 1)
    }
}

/// Tells the supervisor that this process is ready. It is for processes that have one.
pub(super) fn tell_ready() {
    // A standard input that is a file, a pipe or a terminal is no lifeline, and is not written to.
    let sent = rustix::net::send(std::io::stdin(), b"r", rustix::net::SendFlags::NOSIGNAL);
    if let Err(error) = sent {
        tracing::debug!(%error, "no supervisor was told that this process is ready");
    }
}

/// Waits until the supervisor has ended, or wants this process to end.
pub(super) fn wait_for_end() {
    // Nothing is ever written to it. A connection that breaks has ended, too.
    let _ended = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}
