//! Ends this process when a plugin does not return from a call.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::time::Duration;

use anyhow::Context as _;
use host_worker::clock::Clock;
use host_worker::watchdog::{Hung, Slow, Watchdog};
use tokio::sync::oneshot;

use super::process_end::end_at_once;
use super::settings::Settings;

/// Once a call was found to hang, the process has this long to end by itself. What libraries do at the end of a process may
/// wait for the very thread that hangs.
const LAST: Duration = Duration::from_secs(10);

/// Most lines about slow calls that wait to be written.
const LINES: usize = 64;

/// Runs a worker, and ends with the error that names plugin and call when one does not return.
///
/// # Errors
/// As the worker does, and for a call that does not return.
pub async fn beside(
    settings: &Settings,
    worker: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<()> {
    // Without a bound slow calls are told all the same.
    let bound = settings.plugin_call_timeout().unwrap_or(Duration::MAX);
    // Ends the thread when it is dropped.
    let (_running, runs) = channel();
    let (tell, hung) = oneshot::channel();
    // A thread, because the control plane's are what the worker itself runs on.
    let thread = std::thread::Builder::new().name("watchdog".into());
    thread.spawn(move || watch(bound, &runs, tell)).context("no thread for the watchdog")?;
    tokio::select! {
        ended = worker => ended,
        Ok(hung) = hung => Err(anyhow::anyhow!("{hung}")),
    }
}

fn watch(bound: Duration, runs: &Receiver<()>, tell: oneshot::Sender<Hung>) {
    let (mut watchdog, clock) = (Watchdog::new(bound), Clock::start());
    // Apart, because what reads the lines may have stopped.
    let (slow, lines) = sync_channel::<Slow>(LINES);
    let writer = std::thread::Builder::new().name("watchdog-log".into());
    let _writer = writer.spawn(move || lines.iter().for_each(|slow| tracing::warn!("{slow}")));
    let hung = loop {
        let looked = watchdog.look(clock.now(), &host_plugins::in_progress());
        if let Some(hung) = looked.hung {
            break hung;
        }
        for call in looked.slow {
            // What is too much is counted, see `host_plugin_slow_calls_total`.
            let _too_many = slow.try_send(call).is_err();
        }
        if runs.recv_timeout(watchdog.pause()) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    };
    // Before a line is written: what reads the lines may have stopped, too.
    let last = std::thread::Builder::new().name("watchdog-last".into());
    if let Err(error) = last.spawn(end_in_a_while) {
        tracing::error!(%error, "no thread that ends this process");
    }
    let (plugin, call, thread) = (&hung.call.plugin, hung.call.call, &hung.call.thread);
    tracing::error!(
        plugin,
        call,
        thread,
        seconds = hung.age.as_secs_f64(),
        "a plugin does not return from a call"
    );
    let _worker_has_ended = tell.send(hung).is_err();
}

/// Ends the process if it does not by itself.
fn end_in_a_while() -> ! {
    // Held, so that the wait only ends with its time, or the process.
    let (_kept, never): (Sender<()>, _) = channel();
    let _elapsed = never.recv_timeout(LAST);
    end_at_once()
}
