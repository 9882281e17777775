//! Pages as objects in a bucket, through NIXL's OBJ plugin, which speaks S3.
//!
//! - `PREFIX/KEY` holds a value and a header that tells whether it is whole ([`format`]). An object is written at once,
//!   so a reader finds all of a value or nothing. NIXL can neither remove nor list objects, so removed pages leave a
//!   tombstone, and scans and sums are refused.
//! - NIXL touches only buffers of the tier ([`moves`]), so a page ends in time whatever a server does.
//! - Two threads: one carries the pages ([`run`]), one asks which objects are there ([`asking`]), because NIXL's
//!   question blocks. Each has an agent of its own.

mod asking;
mod format;
mod moves;
mod run;
mod settings;
mod steps;

use std::ffi::CString;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode, Key, Result};

use super::run::Maker;
use super::{Guarded, start_thread};
use crate::capi::{Alive, Direction, Library, Refusal, guard};
use crate::config::Config;
use crate::environment;
use crate::library::find_library;
use asking::Asking;
use moves::Moves;
use run::Runner;
use settings::Settings;

/// Longest value. S3 takes 5 GiB at once, but a value is held in a buffer while it is moved.
pub const MAX_VALUE: u64 = 256 << 20;
/// The object that is written to see that the bucket takes objects.
const OPENED: &str = "opened";
/// An object that is never written. It is queried to see whether the bucket says when an object is not there.
const NOTHING: &str = "nothing";

/// The name of a key's object.
fn name_of(prefix: &str, key: &Key) -> Vec<u8> {
    let digits = key.0.iter().map(|byte| format!("{byte:02x}"));
    prefix.chars().map(String::from).chain(digits).collect::<String>().into_bytes()
}

/// The instance's access to its threads.
pub struct Objects {
    asking: Arc<Asking>,
    /// For messages.
    pub place: String,
}

impl Objects {
    pub fn stop(&self) {
        self.asking.stop();
    }

    /// The error that says why there are no scans and no sums.
    pub fn cannot_list(&self) -> Error {
        let text = format!(
            "NIXL's OBJ plugin cannot list what is in {}: look with the bucket's own tools, for example aws s3 ls, and have \
             it remove old objects by a rule of its life cycle",
            self.place
        );
        Error::new(ErrorCode::UNSUPPORTED, text)
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Says whether [`open`] would accept this configuration here. Asks no server.
///
/// # Errors
/// As opening, without `IO`.
pub fn check(config: &Config) -> Result<()> {
    Settings::of(config, variable)?;
    find_library(config, &config.storage.backend).map(drop)
}

/// Starts an instance's threads, once the bucket has answered.
///
/// # Errors
/// `CONFIG` for a wrong configuration, `UNSUPPORTED` without a NIXL that has the plugin, `IO` when NIXL or the bucket refuses.
pub fn open(
    config: &Config,
    library: Arc<Library>,
    unique: &str,
    guarded: &Guarded,
) -> Result<(Objects, Vec<JoinHandle<()>>)> {
    let settings = Settings::of(config, variable)?;
    environment::settle_aws(settings.has_keys);
    guard();
    let maker = |role: &str| Maker {
        library: library.clone(),
        backend: CString::new(config.storage.backend.as_str()).unwrap_or_default(),
        parameters: settings.parameters.clone(),
        name: CString::new(format!("{role}-{unique}")).unwrap_or_default(),
    };
    let (asks, moves) = (maker("asks"), maker("moves"));
    let asking = Arc::new(Asking::default());
    let objects = Objects { asking: asking.clone(), place: settings.place.clone() };
    let (place, prefix) = (settings.place.clone(), settings.prefix.clone());
    let thread = {
        let asking = asking.clone();
        move |started: &Started| {
            let _alive = Alive::begin();
            let agent = asks.agent().map_err(|refusal| refused(&refusal)).and_then(|mut agent| {
                let name = format!("{prefix}{NOTHING}").into_bytes();
                let text = |refusal| {
                    format!(
                        "{place} does not say which objects are there: {refusal}; is it up, and do the keys allow \
                         s3:GetObject and s3:ListBucket?"
                    )
                };
                agent.query_objects(&[name]).map_err(|refusal| Error::new(ErrorCode::IO, text(refusal)))?;
                Ok(agent)
            });
            if let Some(agent) = started.tell(agent) {
                asking.run(agent);
            }
        }
    };
    let mut threads = vec![start_and_wait("nixl-asks", guarded, thread)?];
    let front = guarded.front.clone();
    let stop = asking.clone();
    let thread = move |started: &Started| {
        let moves = Moves::new(moves, settings.requests).map_err(|refusal| refused(&refusal));
        let moves =
            moves.and_then(|moves| if settings.read_only { Ok(moves) } else { tried(moves, &settings) });
        if let Some(moves) = started.tell(moves) {
            Runner::new(front, settings, asking, moves).run();
        }
    };
    threads.push(start_and_wait("nixl-tier", guarded, thread).inspect_err(|_| stop.stop())?);
    guard();
    Ok((objects, threads))
}

fn refused(refusal: &Refusal) -> Error {
    Error::new(ErrorCode::IO, format!("NIXL's storage plugin cannot be used: {refusal}"))
}

/// Writes an object, to see that the bucket takes it.
fn tried(mut moves: Moves, settings: &Settings) -> Result<Moves> {
    let name = format!("{}{OPENED}", settings.prefix).into_bytes();
    let bytes = b"a worker was here, and could write".to_vec();
    let mut ended = Vec::new();
    if let Err(refusal) = moves.start(0, Direction::Write, &name, bytes) {
        return Err(refused(&refusal));
    }
    let start = Instant::now();
    while ended.is_empty() && start.elapsed() <= settings.deadline {
        moves.progress(&mut ended);
        std::thread::sleep(Duration::from_millis(1));
    }
    if ended.first().is_some_and(|moved| moved.well) {
        return Ok(moves);
    }
    moves.end();
    let why = if ended.is_empty() { "did not answer in time" } else { "refused it" };
    let text = format!(
        "{} takes no objects: it {why}; is it up, is there such a bucket, and do the keys allow s3:PutObject? \
         read_only = true needs no more than reading",
        settings.place
    );
    Err(Error::new(ErrorCode::IO, text))
}

/// Tells the caller that opens the instance how the thread began.
struct Started(Mutex<Option<SyncSender<Result<()>>>>);

impl Started {
    /// Tells it. Hands back what began well.
    fn tell<T>(&self, began: Result<T>) -> Option<T> {
        let (answer, kept) = match began {
            Ok(kept) => (Ok(()), Some(kept)),
            Err(error) => (Err(error), None),
        };
        let teller = host_transfer_kit::locked(&self.0).take()?;
        // When the caller has given up waiting, the thread must not run.
        let heard = teller.try_send(answer).is_ok();
        kept.filter(|_| heard)
    }
}

fn start_and_wait(
    name: &str,
    guarded: &Guarded,
    body: impl FnOnce(&Started) + Send + 'static,
) -> Result<JoinHandle<()>> {
    let (teller, start) = sync_channel(1);
    let started = Started(Mutex::new(Some(teller)));
    let thread = start_thread(name, guarded, move || body(&started))?;
    let died = |_| Error::new(ErrorCode::PANICKED, "the tier's thread panicked at its start");
    start.recv().map_err(died)??;
    Ok(thread)
}
