//! A connection on which this instance is the receiver.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use host_plugin_api::{Notification, NotificationKind};
use host_transfer_kit::{Random, notification};

use crate::pages::Pages;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A connection from a sender.
pub struct Inbound {
    pub instance: Random,
    pub name: String,
    pub socket: OwnedFd,
    pages: Pages,
    /// Readable once the sender's process is gone with everything that it had open. `None` when the sender's kernel has
    /// no such descriptor, or the sender speaks version 1 of the handshake.
    process: Option<OwnedFd>,
    /// Whether none of the sender's writes will land: its end of the socket is closed, and no device copies for it.
    ///
    /// A sender closes the socket after its copy threads have stopped. When a process dies, the kernel takes its
    /// threads' address space before it closes their files. So no thread can be copying once this side sees the end. A
    /// device goes on with its copies until the kernel has closed the driver's files. That comes later, and is done
    /// when the process can be waited for. (On an H100 the socket ended 0.2 ms after a kill, and the device wrote on.
    /// 89 ms after the kill nothing changed any more.)
    lost: AtomicBool,
    /// Whether the end was seen while a device was copying.
    dying: AtomicBool,
    /// How many regions on devices the sender was told to close.
    told: AtomicU64,
    /// Whether the host was told, or need not be. The service thread may then drop the connection.
    finished: AtomicBool,
}

impl Inbound {
    pub fn new(
        instance: Random,
        name: String,
        (socket, process): (OwnedFd, Option<OwnedFd>),
        pages: Pages,
    ) -> Self {
        let no = || AtomicBool::new(false);
        let (lost, dying, told, finished) = (no(), no(), AtomicU64::new(0), no());
        Self { instance, name, socket, pages, process, lost, dying, told, finished }
    }

    /// The descriptor that becomes readable when the sender is gone, or is ending. `None` when there is none.
    pub fn watched(&self) -> Option<BorrowedFd<'_>> {
        match self.dying.load(Ordering::SeqCst) {
            false => Some(self.socket.as_fd()),
            true => self.process.as_ref().map(AsFd::as_fd),
        }
    }

    /// To be called when [`watched`](Self::watched) is readable. `has_ended` says whether the socket is at its end.
    /// True when the sender was lost just now.
    pub fn notice(&self, has_ended: impl FnOnce(BorrowedFd<'_>) -> bool) -> bool {
        let gone = self.dying.load(Ordering::SeqCst)
            || (has_ended(self.socket.as_fd()) && {
                let done = self.pages.devices_are_done();
                self.dying.store(!done, Ordering::SeqCst);
                done
            });
        if gone {
            self.set_lost();
        }
        gone
    }

    /// Whether the sender may have regions on devices open, and closes them when it is told to.
    pub fn knows_devices(&self) -> bool {
        self.pages.device.is_some()
    }

    /// Notes that the sender is told to close one more region on a device. Returns how many it was told to close so far.
    pub fn tell(&self) -> u64 {
        self.told.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Waits until the sender has closed `count` regions, or is proven gone. False when `deadline` passed first.
    pub fn wait_let_go(&self, count: u64, deadline: Instant) -> bool {
        let Some(page) = &self.pages.device else { return true };
        while page.count_let_go() < count && !self.is_lost() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
        true
    }

    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    pub fn set_lost(&self) {
        self.lost.store(true, Ordering::SeqCst);
    }

    pub fn is_finished(&self) -> bool {
        self.finished.load(Ordering::SeqCst)
    }

    /// From now on nothing of this connection is reported.
    pub fn finish(&self) {
        self.finished.store(true, Ordering::SeqCst);
    }

    /// Closes the gate: nothing more may be written, once a [`wait`](Self::wait) after it has ended.
    pub fn close(&self) {
        self.pages.control.close();
    }

    /// Closes the gate and waits until no thread can be behind it. False when that could not be proven in time.
    pub fn fence(&self, deadline: Instant) -> bool {
        self.close();
        self.wait(deadline)
    }

    /// Waits until every copy that began before this call has ended, or the sender is proven gone.
    pub fn wait(&self, deadline: Instant) -> bool {
        self.pages.wait(deadline, || self.is_lost())
    }

    /// The next thing to tell the host: what arrived, and last that the peer is gone.
    pub fn take(&self) -> Option<Notification> {
        if self.is_finished() {
            return None;
        }
        // Read before the ring, so that the take that follows sees all that was pushed before the end.
        let lost = self.is_lost();
        if let Some((payload, length)) = self.pages.control.take() {
            return Some(notification(NotificationKind::ARRIVED, &self.name, &payload[..length as usize]));
        }
        if lost {
            self.finish();
            return Some(notification(NotificationKind::PEER_LOST, &self.name, &[]));
        }
        None
    }

    pub fn has_waiting(&self) -> bool {
        !self.is_finished() && (self.is_lost() || self.pages.control.has_waiting())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use host_plugin_api::ErrorCode;
    use rustix::pipe::pipe;

    use super::*;
    use crate::control::{LINES, MAX_COPY_THREADS};
    use crate::mapping::{Shared, SharedPage, Writers};

    /// A page as the receiver has it, and as the sender does.
    fn both<T: Shared>() -> (SharedPage<T>, SharedPage<T>) {
        let (page, file) = SharedPage::create("test", Writers::All).unwrap();
        (page, SharedPage::open(&file, true).unwrap())
    }

    /// The pages of a receiver, and of a sender.
    fn pages() -> (Pages, Pages) {
        let ((control, controlled), (device, others)) = (both(), both());
        (Pages { control, device: Some(device) }, Pages { control: controlled, device: Some(others) })
    }

    #[test]
    fn a_sender_whose_device_was_copying_is_lost_when_its_process_is_gone() {
        for busy in [None, Some(MAX_COPY_THREADS - 1), Some(MAX_COPY_THREADS), Some(LINES - 1)] {
            let (pages, sender) = pages();
            if let Some(line) = busy {
                std::mem::forget(sender.enter(line));
            }
            let ((socket, _other), (process, _writer)) = (pipe().unwrap(), pipe().unwrap());
            let numbers = [&socket, &process].map(AsRawFd::as_raw_fd);
            let inbound = Inbound::new([0; 16], "prefill".into(), (socket, Some(process)), pages);
            let watched = || inbound.watched().map(|fd| fd.as_raw_fd());
            assert!(!inbound.notice(|_| false) && watched() == Some(numbers[0]), "it only said something");
            let by_device = busy.is_some_and(|line| line >= MAX_COPY_THREADS);
            assert_eq!(inbound.notice(|_| true), !by_device);
            assert_eq!((inbound.is_lost(), inbound.take().is_some()), (!by_device, !by_device));
            if by_device {
                assert!(!inbound.fence(Instant::now()), "its device may go on");
                assert_eq!(watched(), Some(numbers[1]));
                assert!(inbound.notice(|_| unreachable!("the socket says nothing more")));
                assert!(inbound.is_lost() && inbound.fence(Instant::now()));
                assert_eq!(inbound.take().unwrap().kind, NotificationKind::PEER_LOST);
            }
        }
    }

    #[test]
    fn a_sender_of_version_1_is_fenced_by_its_copy_threads_and_lost_with_its_socket() {
        let (control, controlled) = both();
        let inbound = Inbound::new(
            [0; 16],
            "prefill".into(),
            (pipe().unwrap().0, None),
            Pages { control, device: None },
        );
        let sender = Pages { control: controlled, device: None };
        let device = sender.enter(MAX_COPY_THREADS);
        assert_eq!(device.err(), Some(ErrorCode::UNSUPPORTED), "it has no line for a device");
        let busy = sender.enter(MAX_COPY_THREADS - 1);
        assert!(!inbound.wait(Instant::now()), "it is copying");
        drop(busy);
        assert!(inbound.fence(Instant::now()));
        assert_eq!(sender.enter(0).err(), Some(ErrorCode::PEER_LOST));
        assert!(!inbound.knows_devices() && inbound.wait_let_go(1, Instant::now()));
        assert!(inbound.notice(|_| true) && inbound.is_lost());
    }

    #[test]
    fn regions_are_let_go_when_the_sender_says_so_or_is_lost() {
        let (pages, sender) = pages();
        let inbound = Inbound::new([0; 16], "prefill".into(), (pipe().unwrap().0, None), pages);
        let soon = Instant::now();
        assert_eq!((inbound.tell(), inbound.tell()), (1, 2));
        sender.device.unwrap().let_go();
        assert!(inbound.wait_let_go(1, soon) && !inbound.wait_let_go(2, soon));
        inbound.set_lost();
        assert!(inbound.wait_let_go(2, soon));
    }
}
