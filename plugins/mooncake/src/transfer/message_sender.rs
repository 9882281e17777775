//! Carries messages to one other instance, so that each comes once and in order, or the peer is found to be gone.
//!
//! Mooncake delivers each message with a connection of its own, and gives no error when the other side was not there.
//! So messages are numbered, kept until they are acknowledged, and sent again, all from the oldest on, when nothing is
//! acknowledged for a while. Each sender has a thread of its own: a stopped peer keeps it waiting for seconds.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use host_plugin_api::{Level, Result, log};
use host_transfer_kit::{Random, locked};

use super::shared::{Event, Shared};
use super::wire::{Body, Frame};
use crate::engine::{Engine, Undelivered};

/// How long an acknowledgement may take before everything from the oldest message on is sent again.
const REPEAT: Duration = Duration::from_millis(300);
/// The most that this time grows to, for a peer that does not answer.
const SELDOM: Duration = Duration::from_secs(1);
/// How long to wait after a message could not be sent.
const AGAIN: Duration = Duration::from_millis(50);
/// After this many refusals in a row nothing listens at the peer's address.
const REFUSALS: u32 = 3;

struct State {
    /// Messages that are not acknowledged, with their numbers and connections.
    kept: VecDeque<(u64, u64, Body)>,
    /// How many of these have been sent since the last repetition.
    sent: usize,
    /// Number of the last message.
    last: u64,
    /// When to send everything again, while something is kept.
    repeat_at: Instant,
    patience: Duration,
    /// The other direction: stream, last message.
    heard: (u64, u64),
    /// Whether the peer is owed an acknowledgement.
    owing: bool,
    /// A message to send once, without a number.
    unnumbered: Option<Body>,
    stopping: bool,
}

/// The sender of messages to one peer.
pub struct MessageSender {
    instance: Random,
    session: String,
    stream: u64,
    state: Mutex<State>,
    wake: Condvar,
    acknowledged: AtomicU64,
    ended: AtomicBool,
}

impl MessageSender {
    /// Starts a message sender for an instance at an address. `stream` is larger than that of any sender before it.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(
        shared: &Arc<Shared>,
        front: &Arc<dyn Engine>,
        instance: Random,
        session: String,
        stream: u64,
    ) -> Result<Arc<Self>> {
        let state = State {
            kept: VecDeque::new(),
            sent: 0,
            last: 0,
            repeat_at: Instant::now(),
            patience: REPEAT,
            heard: (0, 0),
            owing: false,
            unnumbered: None,
            stopping: false,
        };
        let sender = Arc::new(Self {
            instance,
            session,
            stream,
            state: Mutex::new(state),
            wake: Condvar::new(),
            acknowledged: AtomicU64::new(0),
            ended: AtomicBool::new(false),
        });
        let (own, service, front) = (sender.clone(), shared.clone(), front.clone());
        shared.spawn_alone("mooncake-sender", move || {
            own.run(&service, &*front);
            own.ended.store(true, Ordering::SeqCst);
        })?;
        Ok(sender)
    }

    /// Sends a message that comes once and in order. Returns its number.
    pub fn say(&self, connection: u64, body: Body) -> u64 {
        let mut state = locked(&self.state);
        state.last += 1;
        let number = state.last;
        if state.kept.is_empty() {
            state.repeat_at = Instant::now() + state.patience;
        }
        state.kept.push_back((number, connection, body));
        self.wake.notify_all();
        number
    }

    /// Sends a message once, as soon as possible, without an acknowledgement.
    pub fn say_once(&self, body: Body) {
        locked(&self.state).unnumbered = Some(body);
        self.wake.notify_all();
    }

    /// The last message that the peer has taken.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// Whether nothing waits to be acknowledged.
    pub fn is_idle(&self) -> bool {
        locked(&self.state).kept.is_empty()
    }

    /// Notes that the peer has taken a stream up to a message. False when this is nothing new.
    pub fn note_acknowledged(&self, (stream, number): (u64, u64)) -> bool {
        let mut state = locked(&self.state);
        if stream != self.stream || number > state.last || number <= self.acknowledged() {
            return false;
        }
        self.acknowledged.store(number, Ordering::SeqCst);
        while state.kept.front().is_some_and(|(kept, ..)| *kept <= number) {
            state.kept.pop_front();
            state.sent = state.sent.saturating_sub(1);
        }
        state.patience = REPEAT;
        state.repeat_at = Instant::now() + REPEAT;
        true
    }

    /// Notes how far the peer's stream has come, so that the peer is told.
    pub fn note_heard(&self, heard: (u64, u64)) {
        let mut state = locked(&self.state);
        state.heard = heard;
        state.owing = true;
        self.wake.notify_all();
    }

    /// Ends the thread after its current work.
    pub fn stop(&self) {
        locked(&self.state).stopping = true;
        self.wake.notify_all();
    }

    /// Whether the thread has ended.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    fn run(&self, shared: &Shared, front: &dyn Engine) {
        let mut refusals = 0;
        while let Some((frame, fresh, look)) = self.next(shared) {
            match front.notify(&self.session, &frame.encode(), look || refusals > 0) {
                Ok(()) => refusals = 0,
                Err(why) => {
                    if let Undelivered::Other(why) = &why {
                        log!(Level::DEBUG, "a message to {} could not be sent: {why}", self.session);
                        refusals = 0;
                    } else {
                        refusals += 1;
                    }
                    if refusals >= REFUSALS {
                        shared.tell(Event::Refused { instance: self.instance });
                        return;
                    }
                    self.take_back(fresh, frame);
                }
            }
        }
    }

    /// Waits for the next frame. Also says whether the frame is kept until it is acknowledged, and whether there is
    /// reason to doubt that the peer is there. `None` at the end.
    fn next(&self, shared: &Shared) -> Option<(Frame, bool, bool)> {
        let mut state = locked(&self.state);
        loop {
            let unnumbered = state.unnumbered.take();
            if state.stopping && unnumbered.is_none() {
                return None;
            }
            let now = Instant::now();
            if !state.kept.is_empty() && state.sent >= state.kept.len() && now >= state.repeat_at {
                shared.counts.repeated.add(state.kept.len() as u64);
                state.sent = 0;
                state.patience = (state.patience * 2).min(SELDOM);
                state.repeat_at = now + state.patience;
            }
            let kept = state.kept.get(state.sent).cloned();
            let (number, connection, body) = match (unnumbered, kept) {
                (Some(body), _) => (0, 0, body),
                (None, Some((number, connection, body))) => {
                    state.sent += 1;
                    (number, connection, body)
                }
                (None, None) if state.owing => (0, 0, Body::Heard),
                (None, None) => {
                    let wait = match state.kept.is_empty() {
                        true => SELDOM,
                        false => state.repeat_at.saturating_duration_since(now),
                    };
                    state = self.wake.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
                    continue;
                }
            };
            state.owing = false;
            let frame = Frame {
                from: shared.id,
                to: self.instance,
                session: shared.session.clone(),
                stream: self.stream,
                number,
                heard: state.heard,
                connection,
                body,
            };
            let doubt = state.patience > REPEAT || frame.body == Body::Ping || self.acknowledged() == 0;
            return Some((frame, number > 0, doubt));
        }
    }

    /// Takes back a frame that was not sent. It is the next one again, after a moment.
    fn take_back(&self, fresh: bool, frame: Frame) {
        let mut state = locked(&self.state);
        state.owing = true;
        if fresh {
            // A message that was acknowledged meanwhile is not kept any more.
            let place = state.kept.iter().position(|(number, ..)| *number == frame.number);
            state.sent = place.unwrap_or(state.sent).min(state.sent);
        }
        let until = Instant::now() + AGAIN;
        while !state.stopping {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
