//! The service thread: it answers peers that connect and notices those that go.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use host_plugin_api::{Level, log};
use host_transfer_kit::{Peer as _, locked};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::handshake::greet;
use crate::outbound::Outbound;
use crate::shared::Core;
use crate::socket::{self, Heard};
use crate::wire::LetGo;

/// Most connections that have not said hello.
const MAX_STRANGERS: usize = 32;

/// The service thread. `listener` does not block.
pub fn run(core: &Core, listener: &OwnedFd) {
    let mut strangers: Vec<(OwnedFd, Instant)> = Vec::new();
    while !core.instance.is_stopping() {
        locked(&core.inbound).retain(|i| !i.is_finished());
        let inbound = core.inbounds().into_iter().filter(|i| !i.is_lost() && i.watched().is_some());
        let inbound: Vec<_> = inbound.collect();
        let outbound: Vec<_> = core.instance.peers.all().into_iter().filter(|o| !o.is_gone()).collect();
        let timeout = (!strangers.is_empty()).then_some(Timespec { tv_sec: 1, tv_nsec: 0 });
        let watched = [core.wake.as_fd(), listener.as_fd()]
            .into_iter()
            .chain(strangers.iter().map(|(fd, _)| fd.as_fd()))
            .chain(inbound.iter().filter_map(|i| i.watched()))
            .chain(outbound.iter().map(|o| o.socket.as_fd()));
        let ready = readable(watched, timeout.as_ref());
        let mut ready = ready.into_iter();
        let woken = ready.next().unwrap_or(false);
        let called = ready.next().unwrap_or(false);
        let speaking: Vec<bool> = ready.by_ref().take(strangers.len()).collect();
        for peer in inbound {
            if !ready.next().unwrap_or(false) {
                continue;
            }
            if peer.notice(|socket| socket::has_ended(socket)) {
                log!(Level::INFO, "{} closed its connection to us", peer.name);
                core.instance.event.signal();
            } else if peer.watched().is_none() {
                log!(
                    Level::ERROR,
                    "{} ended in mid copy, and its kernel has no proof that its GPU stopped",
                    peer.name
                );
            }
        }
        for peer in outbound {
            if !ready.next().unwrap_or(false) {
                continue;
            }
            match socket::hear(&peer.socket) {
                Heard::End => lose(core, &peer),
                Heard::Message(bytes) => let_go(core, &peer, &bytes),
                Heard::Nothing => {}
            }
        }
        let mut speaking = speaking.into_iter();
        strangers.retain(|(fd, since)| {
            if speaking.next().unwrap_or(false) {
                greet(core, fd);
                return false;
            }
            since.elapsed() < core.config.connect_timeout()
        });
        if woken {
            core.wake.clear();
        }
        while called && let Some(fd) = socket::accept(listener) {
            // A connection beyond the limit is closed. The caller sees this as a peer that does not answer.
            if strangers.len() < MAX_STRANGERS {
                strangers.push((fd, Instant::now()));
            }
        }
    }
}

fn readable<'a>(fds: impl Iterator<Item = BorrowedFd<'a>>, timeout: Option<&Timespec>) -> Vec<bool> {
    let mut fds: Vec<PollFd<'_>> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    match poll(&mut fds, timeout) {
        Ok(_) => fds.iter().map(|fd| !fd.revents().is_empty()).collect(),
        // Interrupted: nothing is known to be readable, the loop looks again.
        Err(_) => Vec::new(),
    }
}

/// Takes note that the peer of an outbound connection is gone, unless that is known.
pub fn lose(core: &Core, peer: &Outbound) {
    if peer.set_gone() {
        report_outbound(core, peer);
        close_memory(core, peer);
    }
}

/// Reports that the peer of an outbound connection is gone, unless a connection of the peer's own will report it.
fn report_outbound(core: &Core, peer: &Outbound) {
    let other_way = locked(&core.inbound).iter().any(|i| i.instance == peer.instance);
    if !other_way {
        let notifications = &core.instance.notifications;
        if !notifications.is_full() {
            notifications.peer_lost(&peer.own_name);
        }
    }
    core.instance.event.signal();
}

/// Closes the memory on devices of a peer that is gone, so that its successor can have it.
fn close_memory(core: &Core, peer: &Outbound) {
    // Copies that begin from now on see that the peer is gone.
    if peer.devices().next().is_some() && core.wait_own_copies(Instant::now() + core.config.fence_timeout()) {
        peer.close_devices(|_| true);
    }
}

/// Closes a region on a device that the peer has deregistered. The peer is about to free its memory.
fn let_go(core: &Core, peer: &Outbound, message: &[u8]) {
    let Ok(LetGo { region }) = LetGo::decode(message) else { return };
    // The peer has closed the region's gate, so copies that begin from now on do not use it.
    if core.wait_own_copies(Instant::now() + core.config.fence_timeout()) {
        peer.close_devices(|known| known.id == region && !peer.region_lives(known));
        peer.say_let_go();
    }
}
