//! Requests: lists of ranges on both sides, posted and polled.

use std::ffi::{CStr, c_int};

use super::{Agent, Handle, Ranges, Refusal, check, made};

/// In progress. 0 is success, and errors are negative.
const IN_PROGRESS: c_int = 1;

/// What a request does, with NIXL's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the remote ranges into the local ones.
    Read = 0,
    Write = 1,
}

/// A posted request. To be given back to its agent.
pub struct Request {
    handle: Handle,
}

/// The state of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Done,
    Running,
    Failed,
}

impl Agent {
    fn join(&mut self, join: bool) -> Result<(), Refusal> {
        let skip = self.library.api.opt_args_set_skip_desc_merge;
        // SAFETY: the options are alive until our drop.
        check("opt_args_set_skip_desc_merge", unsafe { skip(self.making, !join) })
    }

    fn announce(&mut self, message: &[u8]) -> Result<(), Refusal> {
        let api = &self.library.api;
        let (data, length) = (message.as_ptr().cast(), message.len());
        // SAFETY: the options are alive, the message is copied.
        check("opt_args_set_notif_msg", unsafe { (api.opt_args_set_notif_msg)(self.posting, data, length) })?;
        // SAFETY: the options are alive.
        let code = unsafe { (api.opt_args_set_has_notif)(self.posting, length > 0) };
        check("opt_args_set_has_notif", code)
    }

    fn post(&mut self, request: &Request) -> Progress {
        // SAFETY: agent, request and options are alive.
        progress(unsafe { (self.library.api.post_xfer_req)(self.agent, request.handle, self.posting) })
    }

    /// Starts writes of `local` into `remote`, range by range, with a message that follows when all are there.
    ///
    /// # Errors
    /// When the request cannot be made. Then nothing was started.
    pub fn write(
        &mut self,
        local: &Ranges,
        remote: &Ranges,
        to: &CStr,
        message: &[u8],
    ) -> Result<(Request, Progress), Refusal> {
        self.announce(message)?;
        self.start(Direction::Write, local, remote, to)
    }

    /// Starts a request without a message.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn start(
        &mut self,
        direction: Direction,
        local: &Ranges,
        remote: &Ranges,
        with: &CStr,
    ) -> Result<(Request, Progress), Refusal> {
        // Ranges that touch were joined before NIXL sees them.
        self.join(false)?;
        let api = &self.library.api;
        let (agent, name) = (self.agent, with.as_ptr());
        // SAFETY: agent, lists and options are alive, the name outlives the call. NIXL checks the local ranges against
        // what this agent registered and the remote ones against the peer's metadata, and keeps copies.
        let create = |at| unsafe {
            let (local, remote) = (local.handle, remote.handle);
            (api.create_xfer_req)(agent, direction as c_int, local, remote, name, at, self.making)
        };
        let request = Request { handle: made("create_xfer_req", create)? };
        let progress = self.post(&request);
        Ok((request, progress))
    }

    /// Drives progress, and returns the state of a request.
    pub fn progress(&mut self, request: &Request) -> Progress {
        // SAFETY: the agent is alive, and the request until it is released.
        progress(unsafe { (self.library.api.get_xfer_status)(self.agent, request.handle) })
    }

    /// Gives a request back. One that still runs may go on: only dropping the agent ends it.
    pub fn release(&mut self, request: Request) {
        let api = &self.library.api;
        // SAFETY: agent and request are alive. The request is not used after this.
        let released = unsafe { (api.release_xfer_req)(self.agent, request.handle) };
        if released == 0 {
            // SAFETY: as above. A request that could not be released keeps its few bytes.
            let _destroyed = unsafe { (api.destroy_xfer_req)(request.handle) };
        }
    }
}

fn progress(code: c_int) -> Progress {
    match code {
        0 => Progress::Done,
        IN_PROGRESS => Progress::Running,
        _ => Progress::Failed,
    }
}
