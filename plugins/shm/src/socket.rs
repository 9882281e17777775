//! Sockets.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use host_transfer_kit::Random;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recvmsg, sendmsg, socket_with, sockopt,
};

use crate::regions::MAX_REGIONS;
use crate::wire::MESSAGE_BYTES;

/// Most descriptors in one message: a connection's own four, and the regions'.
const FDS: usize = MAX_REGIONS + 4;

fn address(socket: &Random) -> rustix::io::Result<SocketAddrUnix> {
    SocketAddrUnix::new_abstract_name(format!("host-shm-{:032x}", u128::from_le_bytes(*socket)).as_bytes())
}

fn open(flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
    // Packets keep messages whole. The end of the connection still shows, as for a stream.
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags | SocketFlags::CLOEXEC, None)
}

/// Listens, without blocking, under this name.
pub fn listener(socket: &Random) -> rustix::io::Result<OwnedFd> {
    let fd = open(SocketFlags::NONBLOCK)?;
    bind(&fd, &address(socket)?)?;
    listen(&fd, 64)?;
    Ok(fd)
}

/// Most connections of other users that are closed before the caller looks at its other work.
const MOST_FOREIGN: usize = 64;
/// Wait when the process has no descriptor left for a connection. The listener stays readable meanwhile.
const WITHOUT_DESCRIPTORS: Duration = Duration::from_millis(10);

/// The next connection that a process of the same user made, or `None`. Closes those of other users.
pub fn accept(listener: impl AsFd) -> Option<OwnedFd> {
    for _ in 0..MOST_FOREIGN {
        match accept_with(&listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(fd) if is_same_user(&fd) => return Some(fd),
            Ok(_foreign) => {}
            Err(Errno::MFILE | Errno::NFILE) => {
                std::thread::sleep(WITHOUT_DESCRIPTORS);
                return None;
            }
            Err(_none) => return None,
        }
    }
    None
}

fn is_same_user(fd: impl AsFd) -> bool {
    sockopt::socket_peercred(fd).is_ok_and(|c| c.uid == rustix::process::geteuid())
}

/// Connects, says `hello` with these descriptors, and returns the answer.
pub fn dial(
    socket: &Random,
    hello: &[u8],
    fds: &[BorrowedFd<'_>],
    timeout: Duration,
) -> rustix::io::Result<(OwnedFd, Vec<u8>, Vec<OwnedFd>)> {
    let fd = open(SocketFlags::empty())?;
    sockopt::set_socket_timeout(&fd, sockopt::Timeout::Send, Some(timeout))?;
    sockopt::set_socket_timeout(&fd, sockopt::Timeout::Recv, Some(timeout))?;
    // Retried, because the waits of a process that was stopped are interrupted when it goes on.
    let address = address(socket)?;
    retry_on_intr(|| connect(&fd, &address))?;
    if !is_same_user(&fd) {
        return Err(Errno::ACCESS);
    }
    retry_on_intr(|| send(&fd, hello, fds))?;
    let (answer, fds) = retry_on_intr(|| receive(&fd))?;
    if answer.is_empty() { Err(Errno::CONNRESET) } else { Ok((fd, answer, fds)) }
}

/// Sends one message.
pub fn send(fd: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    sendmsg(fd, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL).map(|_| ())
}

/// Receives one message. Empty bytes mean that the other end is closed.
pub fn receive(fd: impl AsFd) -> rustix::io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(fd, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    bytes.truncate(got.bytes);
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok((bytes, fds))
}

/// Content of a readable socket after the handshake.
pub enum Heard {
    /// The end of the connection.
    End,
    /// Nothing for now.
    Nothing,
    /// A message.
    Message(Vec<u8>),
}

/// Takes what a readable socket has.
pub fn hear(fd: impl AsFd) -> Heard {
    match receive(fd) {
        Ok((bytes, _)) if bytes.is_empty() => Heard::End,
        Ok((bytes, _)) => Heard::Message(bytes),
        Err(Errno::AGAIN | Errno::INTR) => Heard::Nothing,
        Err(_) => Heard::End,
    }
}

/// Whether a readable socket has reached its end. Anything else that a peer says is thrown away.
pub fn has_ended(fd: impl AsFd) -> bool {
    matches!(hear(fd), Heard::End)
}
