//! The connection to Mooncake: whether calls go through, which calls run, and when clients end and new ones are made.
//!
//! Without a master every call fails, and a get only after 4.3 s. So after the first such failure no call is made until
//! the master has answered a question (a circuit breaker). Mooncake's own client comes back by itself when the master
//! does. `health_check` reports no error in either state, so it is not used.
//!
//! Mooncake gives a transfer up after 60 s but leaves it running. The owner of the segment may have been frozen. When
//! it thaws, its bytes come into memory that has long been used for other pages. Only the end of the client stops such
//! a transfer. So the pages of a call that failed after [`UNSETTLED`] are *held*: they end when no call runs any more
//! and the client has been closed. Then a new client is made.

use std::io::ErrorKind;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode, Level, Result, log};
use host_transfer_kit::locked;

use super::client::{Client, Library, Setup};
use super::master::{answers, without_silence};
use super::memory::Regions;
use super::metrics::Metrics;

/// A call that failed after this time may have left transfers behind that go on. Mooncake's own limit is 60 s.
pub const UNSETTLED: Duration = Duration::from_secs(50);

/// A key that is never put: a question for it tells whether the master answers.
const PROBE_KEY: &str = "host-kv/is-anybody-there";

/// How the link is made.
#[derive(Clone, Debug)]
pub struct Making {
    pub setup: Setup,
    pub connect_timeout: Duration,
    pub retry: Duration,
    /// Whether there has to be a master at the start.
    pub is_needed: bool,
}

#[derive(Default)]
struct State {
    client: Option<Arc<dyn Client>>,
    up: bool,
    /// Calls that run.
    calls: usize,
    /// Calls left transfers behind, so the client has to end.
    fence: bool,
    stopping: bool,
}

/// The connection of one instance to Mooncake.
pub struct Link {
    state: Mutex<State>,
    changed: Condvar,
    making: Making,
    metrics: Metrics,
}

/// A call that runs.
pub struct Call<'a> {
    link: &'a Link,
    pub client: Arc<dyn Client>,
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        locked(&self.link.state).calls -= 1;
        self.link.changed.notify_all();
    }
}

impl Link {
    pub fn new(making: Making, metrics: Metrics) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), making, metrics }
    }

    /// Begins a call, if one would go through.
    ///
    /// # Errors
    /// The code with which pages end instead.
    pub fn enter(&self) -> std::result::Result<Call<'_>, ErrorCode> {
        let mut state = locked(&self.state);
        match &state.client {
            _ if state.stopping => Err(ErrorCode::CLOSED),
            Some(client) if state.up && !state.fence => {
                let client = client.clone();
                state.calls += 1;
                Ok(Call { link: self, client })
            }
            _ => Err(ErrorCode::PEER_LOST),
        }
    }

    /// Notes that the master did not answer.
    pub fn lost(&self, why: &str) {
        let mut state = locked(&self.state);
        if std::mem::replace(&mut state.up, false) {
            self.metrics.master_up.set(0);
            self.metrics.master_lost.add(1);
            let address = &self.making.setup.master_server_address;
            log!(
                Level::WARN,
                "the Mooncake master at {address} is lost: {why}; storage is skipped until it is back"
            );
        }
        self.changed.notify_all();
    }

    /// Notes that a call left a transfer behind that may still touch memory.
    pub fn fence(&self) {
        let mut state = locked(&self.state);
        state.fence = true;
        self.metrics.master_up.set(0);
        self.changed.notify_all();
    }

    /// Tells the client of a change to memory, if there is a client that stays. A new client is told of all memory.
    pub fn tell<T>(&self, what: impl FnOnce(&dyn Client) -> T) -> Option<T> {
        let mut state = locked(&self.state);
        let client = state.client.clone().filter(|_| !state.fence && !state.stopping)?;
        state.calls += 1;
        drop(state);
        let call = Call { link: self, client };
        Some(what(&*call.client))
    }

    /// Stops the link: from here on no call begins.
    pub fn stop(&self) {
        locked(&self.state).stopping = true;
        self.changed.notify_all();
    }

    /// Whether no call runs.
    pub fn is_quiet(&self) -> bool {
        locked(&self.state).calls == 0
    }

    /// Whether no call begins any more.
    pub fn is_stopping(&self) -> bool {
        locked(&self.state).stopping
    }

    /// Makes the first client, unless it may come later.
    ///
    /// # Errors
    /// `IO` when no process listens at the master's address, or Mooncake refuses. `TIMEOUT` when the process does not answer.
    pub fn open(&self, library: &dyn Library, regions: &Regions) -> Result<()> {
        let address = &self.making.setup.master_server_address;
        if let Err(error) = answers(address, self.making.connect_timeout) {
            let text = format!("no Mooncake master answers at {address}: {error}");
            if self.making.is_needed {
                let is_silent = error.kind() == ErrorKind::TimedOut;
                let code = if is_silent { ErrorCode::TIMEOUT } else { ErrorCode::IO };
                let text = format!("{text}; start mooncake_master, or correct master_server_address");
                return Err(Error::new(code, text));
            }
            log!(Level::WARN, "{text}; storage is skipped until there is one");
            return Ok(());
        }
        self.make(library, regions).map_err(|why| {
            let text = format!("Mooncake Store cannot be set up with the master at {address}: {why}");
            Error::new(ErrorCode::IO, text)
        })
    }

    fn make(&self, library: &dyn Library, regions: &Regions) -> std::result::Result<(), String> {
        let client: Arc<dyn Client> = self.watched(library, || library.connect(&self.making.setup))?.into();
        let still = regions.still();
        for span in still.spans() {
            if let Err(why) = client.register(span) {
                self.watched(library, || client.close());
                return Err(why);
            }
        }
        let mut state = locked(&self.state);
        (state.client, state.up) = (Some(client), true);
        self.metrics.master_up.set(1);
        drop(state);
        drop(still);
        Ok(())
    }

    /// The link's thread: brings it up again when it is down, and ends clients. `release` ends the pages that are held.
    pub fn keep(&self, library: &dyn Library, regions: &Regions, release: impl Fn()) {
        let mut state = locked(&self.state);
        loop {
            if state.stopping || state.fence {
                while state.calls > 0 {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                let client = state.client.take();
                state.up = false;
                drop(state);
                if let Some(client) = client {
                    if library.holds_others_up() {
                        self.await_master();
                    }
                    self.watched(library, || client.close());
                }
                release();
                state = locked(&self.state);
                if state.stopping {
                    return;
                }
                state.fence = false;
                self.metrics.fences.add(1);
                log!(
                    Level::WARN,
                    "transfers were given up that might have gone on, so the client of Mooncake Store was closed; a new one \
                     is made"
                );
            } else if state.up {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            } else {
                drop(state);
                let back = self.try_again(library, regions);
                state = locked(&self.state);
                if back {
                    continue;
                }
                let until = Instant::now() + self.making.retry;
                while !state.stopping && !state.fence {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break;
                    }
                    state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }

    /// Makes or closes a client. The master has answered just now, but may stop meanwhile.
    fn watched<T>(&self, library: &dyn Library, run: impl FnOnce() -> T) -> T {
        if !library.holds_others_up() {
            return run();
        }
        without_silence(&self.making.setup.master_server_address, self.making.connect_timeout, run)
    }

    /// Waits until the master answers, or refuses because it is not there.
    ///
    /// A goodbye to a master that is stopped takes half a minute, during which no other call of this process gets to
    /// Mooncake. While this waits, the client touches only memory that it was given before, which is held.
    fn await_master(&self) {
        let address = &self.making.setup.master_server_address;
        let is_silent = || {
            answers(address, self.making.connect_timeout)
                .is_err_and(|error| error.kind() == ErrorKind::TimedOut)
        };
        if is_silent() {
            log!(
                Level::WARN,
                "the Mooncake master at {address} does not answer, so a client of it is not closed before it does"
            );
            while is_silent() {
                std::thread::park_timeout(self.making.retry);
            }
        }
    }

    /// Tries to bring the link up. Returns whether it is up again.
    fn try_again(&self, library: &dyn Library, regions: &Regions) -> bool {
        let address = &self.making.setup.master_server_address;
        if let Err(error) = answers(address, self.making.connect_timeout) {
            log!(Level::DEBUG, "no Mooncake master answers at {address} yet: {error}");
            return false;
        }
        let client = locked(&self.state).client.clone();
        let back = match client {
            Some(client) => match client.exist(&[PROBE_KEY.to_owned()]) {
                Ok(answers) if answers.iter().all(|answer| *answer >= 0) => {
                    locked(&self.state).up = true;
                    self.metrics.master_up.set(1);
                    Ok(())
                }
                Ok(answers) => Err(format!("a question was answered with {answers:?}")),
                Err(why) => Err(why),
            },
            None => self.make(library, regions),
        };
        match back {
            Ok(()) => {
                self.metrics.master_back.add(1);
                log!(Level::INFO, "the Mooncake master at {address} answers again");
                true
            }
            Err(why) => {
                log!(Level::DEBUG, "the Mooncake master at {address} is not back yet: {why}");
                false
            }
        }
    }
}
