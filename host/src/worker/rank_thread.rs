//! The thread that owns a rank's executor and computes on its KV pool.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use host_core::{Batch, Event, PageId, Room};
use tokio::sync::mpsc;

use super::{Alive, Input};
use crate::executor::digest::{self, PagePart};
use crate::executor::{Executor, KvMemory, LayersDone};

/// What a rank is asked to do, in order.
#[derive(Debug)]
pub(super) enum Command {
    /// Compute; answered by an event.
    Run(Batch),
    /// Log the digest of each page that holds a prompt.
    LogDigests { room: Room, tokens: usize, pages: Vec<PageId> },
}

pub(super) fn start(
    executor: Box<dyn Executor>,
    kv: KvMemory,
    inputs: mpsc::Sender<Input>,
    alive: Alive,
) -> std::io::Result<(Sender<Command>, JoinHandle<()>)> {
    // At most one batch, and the digests of prompts that became ready while the last one was computed.
    let (commands, receive) = channel();
    let thread = std::thread::Builder::new().name("rank-0".into());
    let thread = thread.spawn(move || {
        let _alive = alive;
        run(executor, kv, &receive, &inputs);
    })?;
    Ok((commands, thread))
}

fn run(
    mut executor: Box<dyn Executor>,
    mut kv: KvMemory,
    commands: &Receiver<Command>,
    inputs: &mpsc::Sender<Input>,
) {
    while let Ok(command) = commands.recv() {
        match command {
            Command::Run(batch) => {
                let mut layers_done = news(&batch, executor.shape().layers, inputs);
                let event = compute(executor.as_mut(), &mut kv, &batch, &mut layers_done);
                if inputs.blocking_send(Input::Event(event)).is_err() {
                    return;
                }
            }
            Command::LogDigests { room, tokens, pages } => log_digests(&kv, room, tokens, &pages),
        }
    }
}

/// Tells the scheduler of every group of layers but the last, as the batch asks.
fn news<'a>(
    batch: &Batch,
    layers: usize,
    inputs: &'a mpsc::Sender<Input>,
) -> impl FnMut(usize) + Send + use<'a> {
    let (batch, group) = (batch.id, batch.layer_group as usize);
    move |done| {
        if group > 0 && done < layers && done.is_multiple_of(group) {
            let layers = u32::try_from(done).unwrap_or(u32::MAX);
            // A scheduler that is behind does without: these layers go with the next ones, or with the batch.
            let dropped = inputs.try_send(Input::Event(Event::LayersDone { batch, layers })).is_err();
            if dropped {
                tracing::trace!(batch, layers, "the scheduler is busy; finished layers were not told of");
            }
        }
    }
}

/// A panic of the executor fails the batch's requests and nothing else.
fn compute(
    executor: &mut dyn Executor,
    kv: &mut KvMemory,
    batch: &Batch,
    layers_done: &mut LayersDone<'_>,
) -> Event {
    match catch_unwind(AssertUnwindSafe(|| executor.forward_by_layer(kv, batch, layers_done))) {
        Ok(Ok(outputs)) => Event::BatchDone(outputs),
        Ok(Err(error)) => Event::BatchFailed(error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            Event::BatchFailed(format!("the executor panicked: {text}"))
        }
    }
}

fn log_digests(kv: &KvMemory, room: Room, tokens: usize, pages: &[PageId]) {
    let page_tokens = kv.layout().shape.page_tokens;
    let digests: Vec<String> = pages
        .iter()
        .enumerate()
        .map(|(index, page)| {
            let tokens = tokens - index * page_tokens;
            let (layers, heads) = (0..kv.layout().shape.layers, kv.heads());
            format!("{:016x}", digest::part(kv, &PagePart { page: *page, index, layers, heads, tokens }))
        })
        .collect();
    tracing::debug!(target: "host::pages", %room, tokens, digests = digests.join(","), "prompt ready");
}
