//! The transfer role: the calls of the host's threads. None of them calls into NIXL.

use std::ffi::CString;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host_plugin_api::{
    Error, ErrorCode, Level, Memory, MemoryKind, Opening, PeerId, RegionId, Result, Write, log,
};
use host_transfer_kit::wire::Endpoint;
use host_transfer_kit::{Backend, Frontend, Instance, RegionDescriptor, Reply, locked, random};

use crate::agents::Maker;
use crate::config::Config;
use crate::driver;
use crate::library;
use crate::shared::{Command, Peer, Shared};
use crate::wire::FORMAT;

/// An instance of the backend. See the crate.
pub type NixlBackend = Frontend<Nixl>;

/// What NIXL brings to a [`NixlBackend`].
pub struct Nixl {
    shared: Arc<Shared>,
    endpoint: Endpoint,
    driver: Mutex<Option<JoinHandle<()>>>,
}

/// Finds NIXL and starts an instance.
///
/// # Errors
/// See [`crate::open`].
pub fn open(opening: &Opening) -> Result<NixlBackend> {
    let config = Config::parse(&opening.config)?;
    let shared = Arc::new(Shared::new(config, &opening.name)?);
    let (library, parameters) = library::settle(&shared.config)?;
    log!(Level::INFO, "NIXL is {}", library.path().display());
    let (instance, token) = (random()?, random()?);
    let identity: String = instance[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let maker = Maker {
        library: Arc::new(library),
        backend: CString::new(shared.config.backend.as_str()).unwrap_or_default(),
        parameters,
        prefix: format!("{}/{identity}", opening.name),
    };
    let (started, start) = sync_channel(1);
    let driver = driver::start(shared.clone(), maker, (instance, token), started)?;
    let name = opening.name.clone();
    let backend = |address| Nixl {
        shared,
        endpoint: Endpoint { token, instance, name, address },
        driver: Mutex::new(Some(driver)),
    };
    let died = |_| Error::new(ErrorCode::PANICKED, "the driver of NIXL panicked at its start");
    Ok(Frontend::new(start.recv().map_err(died)?.map(backend)?))
}

impl Nixl {
    /// Asks the driver, and waits for its answer.
    fn ask(&self, command: impl FnOnce(Reply<()>) -> Command) -> Result<()> {
        self.shared.linked.ask(|reply| self.shared.tell(command(reply)))
    }

    /// Tries whether memory of a device can be registered here. Memory of the host always can. Memory of a device
    /// depends on the machine, on UCX and on the transports, so the manifest does not promise it.
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
        let region = RegionDescriptor {
            id: RegionId(1),
            generation,
            address: address.0,
            length,
            device: Some(device),
        };
        let tried = self.ask(|reply| Command::Try { region, reply });
        tried.map_err(|error| no(&format!("{}; UCX needs its CUDA transports for it", error.message)))
    }
}

impl Backend for Nixl {
    type Peer = Peer;
    type Progress = ();

    fn instance(&self) -> &Instance<Peer> {
        self.shared.instance()
    }

    fn register(&self, memory: &Memory) -> Result<RegionId> {
        if memory.kind == MemoryKind::VRAM {
            self.try_device(memory)?;
        }
        self.shared.linked.register(memory)
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.shared.linked.deregister(region, |request| self.shared.tell(Command::Connections(request)))
    }

    fn endpoint(&self) -> Result<Vec<u8>> {
        Ok(self.endpoint.encode(&FORMAT))
    }

    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId> {
        let send = |request| self.shared.tell(Command::Connections(request));
        self.shared.linked.connect((name, endpoint), (&self.endpoint, &FORMAT), send)
    }

    fn disconnect(&self, id: PeerId) -> Result<()> {
        self.shared.linked.disconnect(id, |request| self.shared.tell(Command::Connections(request)))
    }

    fn misfit(&self, peer: &Peer, writes: &[Write]) -> Option<usize> {
        self.shared.linked.misfit(peer, writes)
    }

    fn start(&self, _: &Arc<Peer>, index: u32) -> bool {
        self.shared.start(index);
        true
    }

    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        self.shared.stop();
        let deadline = Instant::now() + Duration::from_millis(deadline_ms.min(600_000));
        if !self.shared.linked.wait_ended(deadline) {
            let text = format!("the driver of NIXL did not end within {deadline_ms} ms");
            return Err(Error::new(ErrorCode::TIMEOUT, text));
        }
        if let Some(driver) = locked(&self.driver).take() {
            // The thread has ended. Its panics were caught inside.
            let _caught = driver.join().is_err();
        }
        Ok(())
    }
}

impl Drop for Nixl {
    fn drop(&mut self) {
        self.shared.stop();
        if let Some(driver) = locked(&self.driver).take() {
            let _caught = driver.join().is_err();
        }
    }
}
