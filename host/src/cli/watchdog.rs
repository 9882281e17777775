//! Ends this process when a plugin does not return from a call.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::time::Duration;

use anyhow::Context as _;
use host_worker::clock::Clock;
use host_worker::watchdog::{Hung, Slow, Watchdog};
use tokio::sync::oneshot;

use super::process_end::end_at_once;
use super::settings::Settings;

/// Time that the process gets to end by itself after a call was found to hang. Destructors of libraries may wait for the thread
/// that hangs, so it may not end.
const LAST: Duration = Duration::from_secs(10);

/// Limit of the lines about slow calls that wait to be written.
const LINES: usize = 64;

/// Runs a worker. If a call of a plugin does not return, ends with an error that names the plugin and the call.
///
/// # Errors
/// The worker's error, or an error for a call that does not return.
pub async fn beside(
    settings: &Settings,
    worker: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<()> {
    // Without a limit, slow calls are still logged.
    let bound = settings.plugin_call_timeout().unwrap_or(Duration::MAX);
    // Dropping this ends the thread.
    let (_running, runs) = channel();
    let (tell, hung) = oneshot::channel();
    // A thread of its own, because the worker uses the threads of the control plane.
    let thread = std::thread::Builder::new().name("watchdog".into());
    thread.spawn(move || watch(bound, &runs, tell)).context("no thread for the watchdog")?;
    tokio::select! {
        ended = worker => ended,
        Ok(hung) = hung => Err(anyhow::anyhow!("{hung}")),
    }
}

fn watch(bound: Duration, runs: &Receiver<()>, tell: oneshot::Sender<Hung>) {
    let (mut watchdog, clock) = (Watchdog::new(bound), Clock::start());
    // Another thread writes the lines, because the reader of the log may have stopped.
    let (slow, lines) = sync_channel::<Slow>(LINES);
    let writer = std::thread::Builder::new().name("watchdog-log".into());
    let _writer = writer.spawn(move || lines.iter().for_each(|slow| tracing::warn!("{slow}")));
    let hung = loop {
        let looked = watchdog.look(clock.now(), &host_plugins::in_progress());
        if let Some(hung) = looked.hung {
            break hung;
        }
        for call in looked.slow {
            // Calls for which there is no room are still counted, see `host_plugin_slow_calls_total`.
            let _too_many = slow.try_send(call).is_err();
        }
        if runs.recv_timeout(watchdog.pause()) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    };
    // Started before a line is written, because the reader of the log may have stopped, too.
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

/// Ends the process if it has not ended by itself after [`LAST`].
fn end_in_a_while() -> ! {
    // The sender is kept, so the wait ends only after its time.
    let (_kept, never): (Sender<()>, _) = channel();
    let _elapsed = never.recv_timeout(LAST);
    end_at_once()
}
