//! The thread that owns the core: it takes events, carries actions out, and makes no call that blocks.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use host_core::rank_barrier::{Contradiction, RankBarrier};
use host_core::request::FailureCode;
use host_core::scheduler::Stats;
use host_core::{Action, Config, Event, Role, Room, Scheduler};
use host_wire::Answer;
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

use super::alive::Alive;
use super::cache_thread::CacheFeed;
use super::channels::{Input, Outgoing};
use super::clock::Clock;
use super::grammars::Grammars;
use super::handle::Tiers;
use super::link::Links;
use super::rank_thread::Ranks;
use super::transfer_thread::{Command as TransferCommand, Inbox, Verification};
use super::{Pages, tier_thread};

/// Longest sleep without an event: keeps the published counters fresh.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// Events taken in one turn before decisions are made.
const EVENTS_PER_TURN: usize = 256;

pub(super) struct Start {
    /// The first field, so that this thread's end is reported before the ends of other threads that follow from it.
    #[expect(dead_code, reason = "held for its drop")]
    pub alive: Alive,
    pub config: Config,
    pub pages: Pages,
    pub page_bytes: u64,
    pub clock: Clock,
    pub runtime: tokio::runtime::Handle,
    pub inputs: mpsc::Receiver<Input>,
    pub outgoing: mpsc::Sender<Outgoing>,
    pub to_ranks: Ranks,
    /// One per rank, none on aggregated workers.
    pub to_transfer: Vec<Inbox>,
    /// `None` without a hierarchy.
    pub to_tiers: Option<tier_thread::Inbox>,
    pub tiers: Arc<Tiers>,
    pub links: Arc<Links>,
    pub cache_feed: Option<CacheFeed>,
    pub grammars: Option<Arc<Grammars>>,
    pub stats: Arc<Mutex<Stats>>,
}

/// Stops the scheduler's thread.
pub(super) struct Stop(watch::Sender<bool>);

impl Stop {
    pub(super) fn now(&self) {
        self.0.send_replace(true);
    }
}

struct Turn {
    start: Start,
    scheduler: Scheduler,
    barrier: RankBarrier,
    clients: HashMap<Room, mpsc::UnboundedSender<Answer>>,
    /// Connects and fences that found the control plane's inbox full. Messages are not kept, because the core repeats them.
    unsent: VecDeque<Outgoing>,
    warned_of_pace: bool,
    warned_of_pages: bool,
}

pub(super) fn start(mut start: Start) -> std::io::Result<(Stop, JoinHandle<()>)> {
    let (stop, stopped) = watch::channel(false);
    let thread = std::thread::Builder::new().name("scheduler".into());
    let thread = thread.spawn(move || {
        let Pages { plan, source } = &mut start.pages;
        let scheduler = Scheduler::with_pages(start.config.clone(), plan.limits, source.take());
        let barrier = RankBarrier::new(start.to_transfer.len());
        Turn {
            start,
            scheduler,
            barrier,
            clients: HashMap::new(),
            unsent: VecDeque::new(),
            warned_of_pace: false,
            warned_of_pages: false,
        }
        .run(stopped);
    })?;
    Ok((Stop(stop), thread))
}

impl Turn {
    fn run(mut self, mut stopped: watch::Receiver<bool>) {
        let runtime = self.start.runtime.clone();
        let mut actions = Vec::new();
        loop {
            let wait = self.wait();
            let input = runtime.block_on(async {
                tokio::select! {
                    biased;
                    _ = stopped.wait_for(|stop| *stop) => Err(()),
                    input = tokio::time::timeout(wait, self.start.inputs.recv()) => Ok(input.ok().flatten()),
                }
            });
            let Ok(input) = input else { return };
            let mut next = input;
            for _ in 0..EVENTS_PER_TURN {
                let Some(input) = next.take() else { break };
                self.take(input, &mut actions);
                next = self.start.inputs.try_recv().ok();
            }
            if let Some(input) = next {
                self.take(input, &mut actions);
            }
            self.scheduler.tick(self.start.clock.now(), &mut actions);
            for action in actions.drain(..) {
                self.act(action);
            }
            self.flush();
            if let Some(feed) = &mut self.start.cache_feed {
                feed.catch_up(|| self.scheduler.cache_contents());
            }
            let stats = self.scheduler.stats();
            self.warn_of_pace(&stats);
            self.warn_of_pages();
            let tiers = self.scheduler.tier_stats();
            *self.start.tiers.stats.lock() = tiers;
            *self.start.stats.lock() = stats;
        }
    }

    /// Logs once that the allocator hands out no more pages.
    fn warn_of_pages(&mut self) {
        if let Some(fault) = self.scheduler.page_source_fault().filter(|_| !self.warned_of_pages) {
            self.warned_of_pages = true;
            tracing::error!(
                "{fault}: it is out of service, and this worker hands out its pages itself; no page was lost or used \
                 twice"
            );
        }
    }

    /// Logs once that the target for the time between tokens cannot be met.
    fn warn_of_pace(&mut self, stats: &Stats) {
        if stats.pace.out_of_reach && !self.warned_of_pace {
            self.warned_of_pace = true;
            tracing::warn!(
                target_itl = ?self.start.config.target_itl,
                step = ?stats.pace.predicted,
                "not even one request at a time stays under --target-itl-ms; requests decode one by one until it does"
            );
        }
    }

    fn wait(&self) -> Duration {
        if !self.unsent.is_empty() {
            return Duration::from_millis(10);
        }
        let deadline = self.scheduler.next_deadline();
        deadline.map_or(LONGEST_WAIT, |at| at.since(self.start.clock.now()).min(LONGEST_WAIT))
    }

    fn take(&mut self, input: Input, actions: &mut Vec<Action>) {
        let event = match input {
            Input::Submit(request, answers, followed) => {
                if self.clients.contains_key(&request.room) {
                    let message = format!("room {} is in use", request.room);
                    let failure =
                        host_core::request::Failure::new(host_core::request::FailureCode::Invalid, message);
                    // The client may be gone already, and then the answer is not needed.
                    let _gone = answers.send(Answer::Failed(failure)).is_err();
                    return;
                }
                self.clients.insert(request.room, answers);
                if let (Some(grammars), Some(followed)) = (&self.start.grammars, followed) {
                    grammars.begin(request.room, followed);
                }
                Event::Submit(request)
            }
            Input::Event(event) => event,
            Input::Transfer(report) => match self.barrier.take(report) {
                Ok(Some(event)) => event,
                Ok(None) => return,
                Err(contradiction) => {
                    let Contradiction { room, peer, rank, notice, reason } = &contradiction;
                    tracing::warn!(%room, %peer, rank, ?notice, reason, "a part of a transfer cannot be");
                    contradiction.event()
                }
            },
            Input::FlushCache(flushed) => {
                // The caller may have hung up.
                let _gone = flushed.send(self.scheduler.flush_cache()).is_err();
                return;
            }
        };
        self.scheduler.handle(self.start.clock.now(), event, actions);
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Tier(action) => match &self.start.to_tiers {
                Some(tiers) => tiers.push(action),
                None => tracing::error!(?action, "a tier action on a worker without offload tiers"),
            },
            Action::Run(batch) => self.start.to_ranks.run(batch),
            Action::Cache(events) => {
                if let Some(feed) = &mut self.start.cache_feed {
                    feed.tell(events);
                }
            }
            Action::PromptReady { room, tokens, pages, cached_tokens, offload_tokens, transferred_pages } => {
                if self.start.config.role != Role::Prefill {
                    let transferred_bytes = u64::from(transferred_pages) * self.start.page_bytes;
                    let began = Answer::Began { cached_tokens, offload_tokens, transferred_bytes };
                    self.answer(room, began, false);
                }
                if tracing::enabled!(target: "host::pages", tracing::Level::DEBUG) {
                    self.start.to_ranks.log_digests(room, tokens as usize, pages);
                }
            }
            Action::Send { to, floor, message } => {
                // Lost when the inbox is full: the core repeats it.
                let lost = self.start.outgoing.try_send(Outgoing::Message { to, floor, message }).is_err();
                if lost {
                    tracing::debug!(%to, "a control message was dropped: the control plane is busy");
                }
            }
            Action::Connect { peer, floor } => self.unsent.push_back(Outgoing::Connect { peer, floor }),
            Action::Fence { peer, session } => self.unsent.push_back(Outgoing::Fence { peer, session }),
            Action::Write(write) => {
                self.barrier.write(write.tag);
                self.transfer(&TransferCommand::Write(Arc::new(write)));
            }
            Action::CancelWrite(tag) => self.transfer(&TransferCommand::Cancel(tag)),
            Action::OpenRoom(opening) => {
                let link = self.start.links.get(opening.peer);
                let lanes = link.filter(|link| link.session == opening.session);
                self.barrier.open(&opening, lanes.map_or_else(Vec::new, |link| link.lanes.clone()));
                self.transfer(&TransferCommand::OpenRoom(Arc::new(opening)));
            }
            Action::CloseRoom { room } => {
                self.barrier.close(room);
                self.transfer(&TransferCommand::CloseRoom(room));
            }
            Action::ForgetRoom { room } => {
                self.barrier.forget(room);
                self.transfer(&TransferCommand::ForgetRoom(room));
            }
            Action::Verify { room, attempt, pages, aux_slot } => {
                let lanes = self.barrier.verify(room);
                let verification = Verification { room, attempt, pages, aux_slot, lanes };
                self.transfer(&TransferCommand::Verify(Arc::new(verification)));
            }
            Action::Emit { room, token } => self.answer(room, Answer::Token(token), false),
            Action::EmitScores { room, first, tokens } => {
                self.answer(room, Answer::Scores { first, tokens }, false);
            }
            Action::Finish { room, reason, usage } => {
                let transferred_bytes = u64::from(usage.transferred_pages) * self.start.page_bytes;
                tracing::debug!(%room, reason = reason.as_str(), "finished");
                self.answer(room, Answer::Finished { reason, usage, transferred_bytes }, true);
            }
            Action::Stalled { room, peer, writes, waited } => {
                let (plugin, seconds) = (self.start.links.plugin_name(), waited.as_secs());
                match writes {
                    0 => tracing::warn!(
                        %room, plugin, %peer, seconds,
                        "the transfer plugin says that all KV was written, and the other worker has heard of no arrival: a notification may be lost"
                    ),
                    _ => tracing::warn!(
                        %room, plugin, %peer, writes, seconds,
                        "no write of the transfer plugin to this worker has ended: it is cut off"
                    ),
                }
            }
            Action::Fail { room, failure } => {
                // A message about a client's own mistake may repeat the client's data, which must not be logged.
                let why = (failure.code != FailureCode::Invalid).then_some(failure.message.as_str());
                tracing::info!(%room, code = failure.code.as_str(), why, "request failed");
                self.answer(room, Answer::Failed(failure), true);
            }
        }
    }

    fn answer(&mut self, room: Room, answer: Answer, last: bool) {
        let client = if last { self.clients.remove(&room) } else { self.clients.get(&room).cloned() };
        if let Some(grammars) = self.start.grammars.as_ref().filter(|_| last) {
            grammars.end(room);
        }
        // A client that is gone needs no answer. Its stream cancels the request when it is dropped.
        let gone = client.is_none_or(|client| client.send(answer).is_err());
        if gone {
            tracing::trace!(%room, "an answer had no taker");
        }
    }

    /// Sends a command to every rank's transfer thread.
    fn transfer(&self, command: &TransferCommand) {
        if self.start.to_transfer.is_empty() {
            tracing::error!("a transfer was asked of a worker without a transfer plugin");
        }
        for inbox in &self.start.to_transfer {
            inbox.push(command.clone());
        }
    }

    fn flush(&mut self) {
        while let Some(next) = self.unsent.pop_front() {
            match self.start.outgoing.try_send(next) {
                Ok(()) => {}
                Err(mpsc::error::TrySendError::Full(next)) => {
                    self.unsent.push_front(next);
                    return;
                }
                Err(mpsc::error::TrySendError::Closed(_)) => return,
            }
        }
    }
}
