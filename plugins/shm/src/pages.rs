//! The pages that both sides of a connection write, as one list of lines: first the lines of copy threads, on the
//! control page, then those of devices, on the device page.
//!
//! `tests/loom` compiles this file with loom's atomics.

use std::time::Instant;

use host_plugin_api::ErrorCode;

use crate::control::{Busy, ControlPage, DevicePage, MAX_COPY_THREADS};
use crate::mapping::SharedPage;

/// The two pages of one connection.
pub struct Pages {
    pub control: SharedPage<ControlPage>,
    /// `None` when the peer speaks version 1 of the handshake: no device copies anything on the connection.
    pub device: Option<SharedPage<DevicePage>>,
}

impl Pages {
    /// Sender: marks a line busy.
    ///
    /// # Errors
    /// `PEER_LOST` when the receiver closed, `UNSUPPORTED` for a device's line when the connection has no device page.
    pub fn enter(&self, line: usize) -> Result<Busy<'_>, ErrorCode> {
        let busy = match line.checked_sub(MAX_COPY_THREADS) {
            None => self.control.enter(line),
            Some(line) => self.device.as_ref().ok_or(ErrorCode::UNSUPPORTED)?.enter(line),
        };
        if self.control.is_open() { Ok(busy) } else { Err(ErrorCode::PEER_LOST) }
    }

    /// Sender: ends the busy time that `enter` of a device's line began, when the returned value was forgotten.
    pub fn leave(&self, line: usize) {
        if let (Some(page), Some(line)) = (&self.device, line.checked_sub(MAX_COPY_THREADS)) {
            page.leave(line);
        }
    }

    /// Receiver: waits for all lines, see [`Line::wait`](crate::control::Line::wait).
    pub fn wait(&self, deadline: Instant, dead: impl Fn() -> bool) -> bool {
        self.control.wait(deadline, &dead)
            && self.device.as_ref().is_none_or(|page| page.wait(deadline, &dead))
    }

    /// Receiver: whether no copy of a device is under way. Meaningful only when the sender begins none any more.
    pub fn devices_are_done(&self) -> bool {
        self.device.as_ref().is_none_or(|page| page.is_left())
    }
}
