//! The transfer role: what the host's threads call. None of it calls into NIXL.

use std::ffi::CString;
use std::os::fd::AsRawFd;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host_plugin_api::{
    Completion, Error, ErrorCode, Level, Memory, MemoryKind, NOTIFICATION_BYTES, Notification, Opening,
    PeerId, PreparedId, RegionId, Result, Submission, Tag, TransferBackend, TransferLimits, Write, log,
};

use crate::config::Config;
use crate::driver::{self, Maker};
use crate::library;
use crate::lists::Lists;
use crate::queue::{Work, locked};
use crate::regions::{Card, source, target};
use crate::shared::{Command, Peer, Shared, clear, random, signal};
use crate::wire::{Endpoint, NAME_BYTES};

/// An instance of the backend. See the crate.
pub struct NixlBackend {
    shared: Arc<Shared>,
    endpoint: Endpoint,
    driver: Mutex<Option<JoinHandle<()>>>,
    lists: Lists,
}

impl NixlBackend {
    /// Finds NIXL and starts an instance.
    ///
    /// # Errors
    /// See [`crate::open`].
    pub fn open(opening: &Opening) -> Result<Self> {
        let config = Config::parse(&opening.config)?;
        if opening.name.is_empty() || opening.name.len() > NAME_BYTES || opening.name.contains('\0') {
            let text = format!("the name {:?} is not 1 to {NAME_BYTES} bytes of text", opening.name);
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, text));
        }
        let (library, parameters) = library::settle(&config)?;
        log!(Level::INFO, "NIXL is {}", library.path().display());
        let library = Arc::new(library);
        let (instance, token) = (random()?, random()?);
        let identity: String = instance[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let maker = Maker {
            library,
            backend: CString::new(config.backend.as_str()).unwrap_or_default(),
            parameters,
            prefix: format!("{}/{identity}", opening.name),
        };
        let shared = Arc::new(Shared::new(config, opening.name.clone())?);
        let (started, start) = sync_channel(1);
        let driver = driver::start(shared.clone(), maker, instance, token, started)?;
        let name = opening.name.clone();
        let backend = |front| Self {
            shared,
            endpoint: Endpoint { token, instance, name, front },
            driver: Mutex::new(Some(driver)),
            lists: Lists::default(),
        };
        let died = |_| Error::new(ErrorCode::PANICKED, "the driver of NIXL panicked at its start");
        start.recv().map_err(died)?.map(backend)
    }

    /// 0, or why no call is taken.
    fn state(&self) -> i32 {
        if self.shared.is_stopping() {
            return ErrorCode::CLOSED.0;
        }
        if self.shared.is_broken() { ErrorCode::PANICKED.0 } else { 0 }
    }

    fn ready(&self) -> Result<()> {
        match ErrorCode(self.state()) {
            ErrorCode(0) => Ok(()),
            ErrorCode::CLOSED => Err(Error::new(ErrorCode::CLOSED, "the instance was shut down")),
            code => Err(Error::new(code, "the driver of NIXL panicked")),
        }
    }

    /// Asks the driver, and waits for its answer; it keeps the deadlines.
    fn ask<T>(&self, command: impl FnOnce(SyncSender<Result<T>>) -> Command) -> Result<T> {
        self.ready()?;
        let (reply, answer) = sync_channel(1);
        self.shared.ask(command(reply));
        loop {
            match answer.recv_timeout(Duration::from_millis(100)) {
                Ok(answer) => return answer,
                // The driver may have ended just before it was asked.
                Err(RecvTimeoutError::Timeout) => self.ready()?,
                Err(RecvTimeoutError::Disconnected) => {
                    self.ready()?;
                    return Err(Error::new(ErrorCode::INTERNAL, "the driver of NIXL gave no answer"));
                }
            }
        }
    }

    fn known_peer(&self, id: PeerId) -> Result<Arc<Peer>> {
        let unknown = || Error::new(ErrorCode::INVALID_ARGUMENT, format!("no peer {}", id.0));
        self.shared.peer(id).ok_or_else(unknown)
    }

    fn fit(&self, peer: &Peer, writes: &[Write]) -> std::result::Result<(), usize> {
        let regions = self.shared.regions.read().unwrap_or_else(PoisonError::into_inner);
        let fits = |write: &Write| {
            source(regions.alive(), write).is_some() && target(&peer.regions, write).is_some()
        };
        writes.iter().position(|write| !fits(write)).map_or(Ok(()), Err)
    }

    /// Whether memory of a device can be registered here. That of the host always can; this depends on the machine, on UCX
    /// and on the transports, which is why the manifest does not promise it.
    fn try_device(&self, memory: &Memory) -> Result<()> {
        let Memory { device, address, length, generation, .. } = *memory;
        let no = |why: &str| {
            let text = format!("memory of device {device} cannot be registered: {why}");
            Error::new(ErrorCode::UNSUPPORTED, text)
        };
        self.shared
            .config
            .allows_devices(library::ucx_tls().as_deref())
            .map_err(|error| no(&error.message))?;
        crate::capi::cuda_driver().map_err(|why| no(&format!("there is no CUDA driver ({why})")))?;
        let card = Card { id: 1, generation, address, length, device: Some(device) };
        let tried = self.ask(|reply| Command::Try { card, reply });
        tried.map_err(|error| no(&format!("{}; UCX needs its CUDA transports for it", error.message)))
    }

    /// What [`submit`](TransferBackend::submit) and [`post`](TransferBackend::post) share.
    fn accept(&self, submission: &Submission, count: usize, work: Work) -> i32 {
        if count > self.shared.config.max_writes as usize
            || submission.notification_length as usize > NOTIFICATION_BYTES
        {
            return ErrorCode::INVALID_ARGUMENT.0;
        }
        if !self.shared.queue.push(submission, work) {
            return ErrorCode::WOULD_BLOCK.0;
        }
        self.shared.wake();
        0
    }

    /// Keeps the event level-triggered: cleared once nothing waits, set again when something came meanwhile.
    fn settle_event(&self) {
        if self.shared.nothing_waits() {
            clear(&self.shared.event);
            if !self.shared.nothing_waits() {
                signal(&self.shared.event);
            }
        }
    }
}

impl TransferBackend for NixlBackend {
    fn limits(&self) -> TransferLimits {
        let Config { max_writes, max_submissions, short_writes, .. } = self.shared.config;
        TransferLimits { max_writes, max_submissions, reserved: [0; 6] }.with_short_writes(short_writes)
    }

    fn register(&self, memory: &Memory) -> Result<RegionId> {
        self.ready()?;
        if memory.kind == MemoryKind::VRAM {
            self.try_device(memory)?;
        }
        self.shared.regions.write().unwrap_or_else(PoisonError::into_inner).add(memory)
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.ready()?;
        if !self.shared.regions.write().unwrap_or_else(PoisonError::into_inner).kill(region) {
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, format!("no region {}", region.0)));
        }
        self.ask(|reply| Command::Deregister { region, reply })?;
        self.shared.regions.write().unwrap_or_else(PoisonError::into_inner).bury(region);
        Ok(())
    }

    fn endpoint(&self) -> Result<Vec<u8>> {
        self.ready()?;
        Ok(self.endpoint.encode())
    }

    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId> {
        self.ready()?;
        let endpoint = Endpoint::decode(endpoint)?;
        if endpoint.instance == self.endpoint.instance {
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, format!("{name} is this instance itself")));
        }
        self.ask(|reply| Command::Connect { name: name.to_owned(), endpoint, reply })
    }

    fn disconnect(&self, id: PeerId) -> Result<()> {
        // Before anything else, so that nothing new is taken for it.
        let known = self.shared.peer(id).inspect(|peer| {
            peer.set_gone();
        });
        self.ready()?;
        known.map_or_else(|| self.known_peer(id).map(drop), |_| Ok(()))?;
        self.ask(|reply| Command::Disconnect { peer: id, reply })?;
        self.lists.forget(id);
        Ok(())
    }

    fn prepare(&self, peer: PeerId, writes: &[Write]) -> Result<PreparedId> {
        self.ready()?;
        let peer = self.known_peer(peer)?;
        self.fit(&peer, writes).map_err(|at| {
            let text = format!("write {at} is empty or leaves its region: {:?}", writes[at]);
            Error::new(ErrorCode::INVALID_ARGUMENT, text)
        })?;
        let list = self.lists.add(peer, writes)?;
        let id = PreparedId(list.id);
        let prepared = self.ask(|reply| Command::Prepare { list, reply });
        prepared.map(|()| id).or_else(|error| self.lists.remove(id).and(Err(error)))
    }

    fn release(&self, prepared: PreparedId) -> Result<()> {
        self.ready()?;
        let list = self.lists.remove(prepared)?;
        self.ask(|reply| Command::Release { list, reply })
    }

    fn submit(&self, submission: &Submission, writes: &[Write]) -> i32 {
        let state = self.state();
        if state != 0 {
            return state;
        }
        let Some(peer) = self.shared.peer(submission.peer) else { return ErrorCode::INVALID_ARGUMENT.0 };
        if peer.is_gone() {
            return ErrorCode::PEER_LOST.0;
        }
        if self.fit(&peer, writes).is_err() {
            return ErrorCode::INVALID_ARGUMENT.0;
        }
        self.accept(submission, writes.len(), Work::Writes(writes))
    }

    fn post(&self, submission: &Submission, prepared: PreparedId, indices: &[u32]) -> i32 {
        let state = self.state();
        if state != 0 {
            return state;
        }
        let Some(list) = self.lists.get(prepared) else { return ErrorCode::INVALID_ARGUMENT.0 };
        let known = |index: &u32| (*index as usize) < list.writes.len();
        if list.peer.id != submission.peer || !indices.iter().all(known) {
            return ErrorCode::INVALID_ARGUMENT.0;
        }
        if list.peer.is_gone() {
            return ErrorCode::PEER_LOST.0;
        }
        self.accept(submission, indices.len(), Work::Prepared(&list, indices))
    }

    fn poll(&self, completions: &mut [Completion]) -> i32 {
        let state = self.state();
        if state != 0 {
            return state;
        }
        let taken = self.shared.queue.take(completions);
        self.settle_event();
        taken as i32
    }

    fn notifications(&self, notifications: &mut [Notification]) -> i32 {
        let state = self.state();
        if state != 0 {
            return state;
        }
        let taken = self.shared.notices.take(notifications);
        self.settle_event();
        taken as i32
    }

    fn cancel(&self, tag: Tag) -> i32 {
        match self.state() {
            0 if self.shared.queue.cancel(tag) => 0,
            0 => ErrorCode::INVALID_ARGUMENT.0,
            state => state,
        }
    }

    fn settled(&self, tag: Tag) -> i32 {
        match self.state() {
            0 => i32::from(self.shared.queue.is_settled(tag)),
            state => state,
        }
    }

    fn event_fd(&self) -> i32 {
        self.shared.event.as_raw_fd()
    }

    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        self.shared.stop();
        let deadline = Instant::now() + Duration::from_millis(deadline_ms.min(600_000));
        if !self.shared.wait_ended(deadline) {
            let text = format!("the driver of NIXL did not end within {deadline_ms} ms");
            return Err(Error::new(ErrorCode::TIMEOUT, text));
        }
        if let Some(driver) = locked(&self.driver).take() {
            // It has ended; what it panicked with was caught inside.
            let _caught = driver.join().is_err();
        }
        Ok(())
    }
}

impl Drop for NixlBackend {
    fn drop(&mut self) {
        self.shared.stop();
        if let Some(driver) = locked(&self.driver).take() {
            let _caught = driver.join().is_err();
        }
    }
}
