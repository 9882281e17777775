//! The threads that own the ranks' executors and compute on their KV pools. All ranks get the same commands in the same
//! order, and their answers are combined into one.

mod batch;
mod page_digests;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use host_core::{Batch, Event, PageId, Room};
use host_executor::{Executor, ExecutorError, KvMemory, LayersDone};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use self::batch::{Outcome, RanksOfBatch};
use self::page_digests::PageDigests;
use super::alive::Alive;
use super::channels::Input;

/// How long a rank without work waits before it [checks](Executor::check) its device. A worker that has lost it must not wait for a
/// batch that may never come: it cannot connect to its peers any more.
const CHECKED_AFTER: Duration = Duration::from_secs(1);

/// A command to a rank. Commands are carried out in order.
#[derive(Clone, Debug)]
enum Command {
    /// Computes a batch. An event reports its end.
    Run(Arc<Batch>),
    /// Log the digest of each page that holds a prompt.
    LogDigests(Arc<PageDigests>),
}

/// The channels to all ranks.
pub(super) struct Ranks(Vec<Sender<Command>>);

impl Ranks {
    /// Computes a batch. Events report it. The events of the batch before must have come.
    pub(super) fn run(&self, batch: Batch) {
        self.all(&Command::Run(Arc::new(batch)));
    }

    /// Logs the digest of each page that holds a prompt.
    pub(super) fn log_digests(&self, room: Room, tokens: usize, pages: Vec<PageId>) {
        self.all(&Command::LogDigests(Arc::new(PageDigests::new(self.0.len(), room, tokens, pages))));
    }

    fn all(&self, command: &Command) {
        for rank in &self.0 {
            // A rank thread that ends is reported by `Alive`, which ends the worker.
            if rank.send(command.clone()).is_err() {
                tracing::error!("a rank thread takes no commands any more");
            }
        }
    }
}

/// One rank's thread.
struct Rank {
    rank: usize,
    ranks: usize,
    executor: Box<dyn Executor>,
    kv: KvMemory,
    batch: Arc<Mutex<RanksOfBatch>>,
    inputs: mpsc::Sender<Input>,
}

/// Starts a thread for each rank.
pub(super) fn start(
    ranks: Vec<(Box<dyn Executor>, KvMemory)>,
    inputs: &mpsc::Sender<Input>,
    alive: impl Fn() -> Alive,
) -> std::io::Result<(Ranks, Vec<JoinHandle<()>>)> {
    let count = ranks.len();
    let batch = Arc::new(Mutex::new(RanksOfBatch::new(count)));
    let (mut senders, mut threads) = (Vec::new(), Vec::new());
    for (rank, (executor, kv)) in ranks.into_iter().enumerate() {
        // The channel holds at most one batch, and the digests of prompts that became ready while the last one was
        // computed.
        let (commands, receive) = channel();
        let part = Rank { rank, ranks: count, executor, kv, batch: batch.clone(), inputs: inputs.clone() };
        let alive = alive();
        threads.push(std::thread::Builder::new().name(format!("rank-{rank}")).spawn(move || {
            let _alive = alive;
            part.run(&receive);
        })?);
        senders.push(commands);
    }
    Ok((Ranks(senders), threads))
}

impl Rank {
    fn run(mut self, commands: &Receiver<Command>) {
        loop {
            let command = match commands.recv_timeout(CHECKED_AFTER) {
                Ok(command) => command,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => match self.executor.check() {
                    Err(error @ ExecutorError::Lost(_)) => {
                        tracing::error!(%error, "this rank ends");
                        return;
                    }
                    _ => continue,
                },
            };
            match command {
                Command::Run(batch) => {
                    let mut layers_done =
                        news(self.rank, &batch, self.executor.shape().layers, &self.batch, &self.inputs);
                    let (outcome, lost) =
                        compute(self.executor.as_mut(), &mut self.kv, &batch, &mut layers_done);
                    let event = self.batch.lock().ended(self.rank, outcome);
                    let unheard =
                        event.is_some_and(|event| self.inputs.blocking_send(Input::Event(event)).is_err());
                    // A rank that has lost its device ends, and the worker ends with it. Other workers take its requests.
                    if unheard || lost {
                        return;
                    }
                }
                Command::LogDigests(digests) => {
                    digests.add(&self.kv, self.executor.shape().kv_heads, self.ranks, self.rank);
                }
            }
        }
    }
}

/// Tells the scheduler of every group of layers but the last, as the batch asks, once all ranks have done it.
fn news<'a>(
    rank: usize,
    batch: &Batch,
    layers: usize,
    ranks: &'a Mutex<RanksOfBatch>,
    inputs: &'a mpsc::Sender<Input>,
) -> impl FnMut(usize) + Send + use<'a> {
    let (batch, group) = (batch.id, batch.layer_group as usize);
    move |done| {
        if group > 0 && done < layers && done.is_multiple_of(group) {
            let done = u32::try_from(done).unwrap_or(u32::MAX);
            // Reports arrive in order: the slowest rank sends them, one layer after the other.
            let Some(layers) = ranks.lock().layers_done(rank, done) else { return };
            // If the scheduler is behind, the report is dropped. These layers are reported with the next ones, or with
            // the batch.
            let dropped = inputs.try_send(Input::Event(Event::LayersDone { batch, layers })).is_err();
            if dropped {
                tracing::trace!(batch, layers, "the scheduler is busy; finished layers were not told of");
            }
        }
    }
}

/// Computes a batch. Returns its outcome, and whether the executor is lost. A panic of the executor fails the batch's
/// requests and nothing else.
fn compute(
    executor: &mut dyn Executor,
    kv: &mut KvMemory,
    batch: &Batch,
    layers_done: &mut LayersDone<'_>,
) -> (Outcome, bool) {
    let outcome = match catch_unwind(AssertUnwindSafe(|| executor.forward_by_layer(kv, batch, layers_done))) {
        Ok(Ok(outputs)) => Outcome::Done(outputs),
        Ok(Err(error @ (ExecutorError::Failed(_) | ExecutorError::NoPool { .. }))) => {
            Outcome::Failed(error.to_string())
        }
        Ok(Err(error @ ExecutorError::Lost(_))) => {
            tracing::error!(%error, "this rank ends");
            return (Outcome::Failed(error.to_string()), true);
        }
        Ok(Err(error @ ExecutorError::Broken(_))) => Outcome::Broken(error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            Outcome::Failed(format!("the executor panicked: {text}"))
        }
    };
    (outcome, false)
}
