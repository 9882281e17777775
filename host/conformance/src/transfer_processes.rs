//! A case of a sender and a receiver in processes of their own, as prefill and decode workers are.
//!
//! The process of the case is the receiver. It starts this program again as the sender and sends it orders, line by line. The sender
//! gives an [`Answer`] to each.

#![allow(clippy::disallowed_methods, reason = "the kit measures other people's code, in real time")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use host_memory::SharedMemory;
use host_plugin_api::{
    Error, ErrorCode, NOTIFICATION_BYTES, Notification, NotificationKind, PeerId, RegionId, Submission, Tag,
    TransferBackend, Write, capability,
};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, set_parent_process_death_signal, waitid,
};
use serde::{Deserialize, Serialize};

use super::bytes::{fill, peek, write_at};
use super::observe::{patience, shutdown_ms, wait_for, wait_while_moving};
use super::transfer_pair::{BYTES, NO_COMPLETION, no_notification, register};
use super::{Case, Outcome, Stop, Subject, ensure};

pub(super) const NAME: &str = "transfer-processes";

pub(super) const CASES: &[Case] = &[Case {
    name: NAME,
    role: Some("transfer"),
    capability: Some(capability::PAGE_WRITES),
    about: "pages and notifications reach another process, and after a fence no write of a sender that was stopped lands",
    run: receive,
}];

/// How often the receiver fences a sender that is stopped.
const ROUNDS: u32 = 4;
/// How long the sender is stopped, if the fence does not return before.
const STOPPED: Duration = Duration::from_millis(500);
/// Submissions of a sender that is fenced, where the backend takes so many.
const IN_FLIGHT: u32 = 8;
/// How often the receiver looks for a first byte before it stops the sender.
const LOOKS: u32 = 20_000;
/// The byte with which the receiver fills its memory after a fence. No submission carries it.
const GUARD: u8 = 0x5C;
/// Prefix of the sender's lines. A plugin may print others.
const MARK: &str = "@sender ";

/// What the receiver tells the sender to do.
#[derive(Debug, Deserialize, Serialize)]
enum Order {
    /// Connect to this endpoint, and disconnect from the receiver before if there is a connection.
    Connect(Vec<u8>),
    /// Write a byte over the whole region of this id and generation, in so many submissions, with the byte as notification or without
    /// one. Then wait until all have ended.
    Write { region: u32, generation: u32, byte: u8, submissions: u32, notifies: bool },
}

/// What the sender answers.
#[derive(Debug, Deserialize, Serialize)]
enum Answer {
    /// It is connected, and can be reached at this endpoint.
    Connected(Vec<u8>),
    /// The error of the connect.
    NotConnected(String),
    /// All submissions have ended. The first code that is an error.
    Ended(Option<i32>),
    /// The plugin breaks its contract.
    Wrong(String),
    /// The case cannot be checked.
    Impossible(String),
}

/// The byte that the submissions of a round carry.
fn byte(round: u32) -> u8 {
    0x80 | (round % 64) as u8
}

fn memory(name: &str) -> Result<SharedMemory, Stop> {
    SharedMemory::new(name, BYTES).map_err(|error| Stop::Skip(format!("no memory: {error}")))
}

/// The process of the sender.
struct Sender {
    child: Child,
    /// `None` once the sender is told to end.
    orders: Option<ChildStdin>,
    answers: Receiver<Answer>,
}

impl Sender {
    fn start(subject: &Subject) -> Result<Self, Stop> {
        let cannot = |error: std::io::Error| Stop::Skip(format!("no second process: {error}"));
        let mut child = Command::new(std::env::current_exe().map_err(cannot)?)
            .args(["plugins", "run-case", "--second", "--case", NAME, "--config-text", &subject.config])
            .args(["--run", &u64::from_le_bytes(subject.run).to_string()])
            .args(["--patience-ms", &patience().as_millis().to_string(), "--"])
            .arg(&subject.entry.path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(cannot)?;
        let (orders, output) = (child.stdin.take(), child.stdout.take());
        let (told, answers) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(output?).lines().map_while(Result::ok);
            let answers = lines.filter_map(|line| serde_json::from_str(line.split_once(MARK)?.1).ok());
            for answer in answers {
                told.send(answer).ok()?;
            }
            Some(())
        });
        Ok(Self { child, orders, answers })
    }

    fn order(&mut self, order: &Order) -> Outcome {
        let line = serde_json::to_string(order).map_err(|error| error.to_string())?;
        let written = self
            .orders
            .as_mut()
            .is_some_and(|orders| writeln!(orders, "{line}").and_then(|()| orders.flush()).is_ok());
        ensure!(written, "the process of the sender has ended");
        Ok(())
    }

    /// The next answer of the sender. Calls `drive` meanwhile, because polling drives a backend.
    fn answer(&self, mut drive: impl FnMut() -> Outcome) -> Result<Answer, Stop> {
        loop {
            drive()?;
            match self.answers.recv_timeout(Duration::from_millis(1)) {
                Ok(Answer::Wrong(text)) => return Err(Stop::Fail(text)),
                Ok(Answer::Impossible(text)) => return Err(Stop::Skip(text)),
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Stop::Fail(
                        "the process of the sender ended in the middle of its work".into(),
                    ));
                }
            }
        }
    }

    /// Stops the process (SIGSTOP). Returns when it is stopped.
    fn stop(&self) -> Outcome {
        signal(self.pid(), Signal::STOP)?;
        let wanted = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let looked = self.pid().ok_or(Errno::SRCH).and_then(|pid| {
            loop {
                match waitid(WaitId::Pid(pid), wanted) {
                    Err(Errno::INTR) => {}
                    looked => break looked,
                }
            }
        });
        let stopped = looked.is_ok_and(|status| status.is_some_and(|status| status.stopped()));
        ensure!(stopped, "the process of the sender ended in the middle of its work");
        Ok(())
    }

    /// Calls a fence while the process is stopped. A fence may need the sender's word, so the process continues after a while.
    fn fenced(&self, fence: impl FnOnce() -> Result<(), Error>) -> Result<Result<(), Error>, Stop> {
        self.stop()?;
        let fenced = std::thread::scope(|scope| {
            let (ended, has_ended) = channel::<()>();
            let pid = self.pid();
            scope.spawn(move || {
                if has_ended.recv_timeout(STOPPED) == Err(RecvTimeoutError::Timeout) {
                    // After a failure the fence fails, too.
                    let _continued = signal(pid, Signal::CONT);
                }
            });
            let fenced = fence();
            drop(ended);
            fenced
        });
        signal(self.pid(), Signal::CONT)?;
        Ok(fenced)
    }

    fn pid(&self) -> Option<Pid> {
        i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
    }
}

fn signal(pid: Option<Pid>, signal: Signal) -> Outcome {
    let sent = pid.ok_or(Errno::SRCH).and_then(|pid| kill_process(pid, signal));
    sent.map_err(|error| Stop::Skip(format!("no signal to the process of the sender: {error}")))
}

impl Drop for Sender {
    fn drop(&mut self) {
        // Without orders it shuts its instance down and ends. The case has its verdict then, so no failure of these counts.
        self.orders = None;
        let _continued = signal(self.pid(), Signal::CONT);
        let ended = wait_for(|| self.child.try_wait().ok().flatten());
        if ended.is_none() {
            let _gone = self.child.kill().and_then(|()| self.child.wait());
        }
    }
}

fn receive(subject: &Subject) -> Outcome {
    let target = memory("target")?;
    let receiver = subject.transfer("receiver")?;
    let mut generation = 1;
    let mut region = register(&*receiver, &target, generation)?;
    let mut sender = Sender::start(subject)?;
    let mut back = connect(&*receiver, &mut sender)?.map_err(|error| {
        Stop::Skip(format!(
            "connect from another process answered {error}: prefill and decode workers are processes"
        ))
    })?;
    arrives(subject, &*receiver, &mut sender, &target, region, generation)?;
    // Fences of each kind that are not tried any more: one was not proven.
    let mut unproven = [false; 2];
    for round in 1..=ROUNDS {
        let kind = (round % 2) as usize;
        if unproven[kind] {
            continue;
        }
        fill(&target, 0);
        let (id, byte) = (region.0, byte(round));
        sender.order(&Order::Write {
            region: id,
            generation,
            byte,
            submissions: IN_FLIGHT,
            notifies: false,
        })?;
        for _ in 0..LOOKS {
            let mut first = [0];
            peek(&target, 0, &mut first);
            if first[0] == byte {
                break;
            }
            std::thread::yield_now();
        }
        let (what, fenced) = match kind {
            0 => ("a deregister", sender.fenced(|| receiver.deregister(region))?),
            _ => ("a disconnect", sender.fenced(|| receiver.disconnect(back))?),
        };
        match fenced {
            Ok(()) => fill(&target, GUARD),
            Err(error) if error.code == ErrorCode::TIMEOUT => unproven[kind] = true,
            Err(error) => {
                return Err(Stop::Fail(format!("{what} while the sender was stopped answered {error}")));
            }
        }
        sender.answer(|| drained(&*receiver))?;
        if !unproven[kind] {
            let mut found = vec![0; BYTES];
            peek(&target, 0, &mut found);
            let wrong = found.iter().position(|byte| *byte != GUARD);
            ensure!(
                wrong.is_none(),
                "byte {} of the target was written after {what}, by a sender that had been stopped",
                wrong.unwrap_or_default()
            );
        }
        // What is left of the connection and of the region ends, so that the next round begins anew.
        let _ended = receiver.disconnect(back);
        if kind == 1 || unproven[kind] {
            let left = receiver.deregister(region);
            ensure!(kind == 0 || left.is_ok(), "deregister answered {:?} behind a disconnect", left.err());
        }
        generation += 1;
        region = register(&*receiver, &target, generation)?;
        let again = connect(&*receiver, &mut sender)?;
        back =
            again.map_err(|error| format!("connect from another process answered {error} after {what}"))?;
    }
    arrives(subject, &*receiver, &mut sender, &target, region, generation)?;
    drop(sender);
    receiver.shutdown(shutdown_ms()).map_err(|error| format!("shutdown answered {error}"))?;
    Ok(())
}

/// Has the sender connect to the receiver, and connects the receiver to the sender, which it needs for a fence. The inner error is that
/// of the sender's connect.
fn connect(receiver: &dyn TransferBackend, sender: &mut Sender) -> Result<Result<PeerId, String>, Stop> {
    let endpoint = receiver.endpoint().map_err(|error| format!("endpoint answered {error}"))?;
    sender.order(&Order::Connect(endpoint))?;
    let endpoint = match sender.answer(|| drained(receiver))? {
        Answer::Connected(endpoint) => endpoint,
        Answer::NotConnected(error) => return Ok(Err(error)),
        other => return Err(Stop::Fail(format!("the sender answered a connect with {other:?}"))),
    };
    let back = receiver.connect("sender", &endpoint);
    Ok(Ok(back.map_err(|error| format!("connect to the sender's process answered {error}"))?))
}

/// Takes one notification from the receiver, if there is one.
fn notified(receiver: &dyn TransferBackend) -> Result<Option<Notification>, Stop> {
    let mut one = [no_notification()];
    match receiver.notifications(&mut one) {
        0 => Ok(None),
        1 => Ok(Some(one[0])),
        code => {
            let code = ErrorCode(code);
            Err(Stop::Fail(format!("notifications with room for one answered {code:?}")))
        }
    }
}

fn drained(receiver: &dyn TransferBackend) -> Outcome {
    notified(receiver).map(drop)
}

/// Has the sender write all of the target, and checks it when its notification has come.
fn arrives(
    subject: &Subject,
    receiver: &dyn TransferBackend,
    sender: &mut Sender,
    target: &SharedMemory,
    region: RegionId,
    generation: u32,
) -> Outcome {
    let notifies = subject.declares("transfer", capability::ARRIVAL_NOTIFICATION);
    let byte = byte(63);
    fill(target, 0);
    sender.order(&Order::Write { region: region.0, generation, byte, submissions: 1, notifies })?;
    let mut arrived = None;
    let look = |arrived: &mut Option<Notification>| {
        if let Some(notification) = notified(receiver)?
            && notification.kind == NotificationKind::ARRIVED
        {
            *arrived = Some(notification);
        }
        Outcome::Ok(())
    };
    match sender.answer(|| look(&mut arrived))? {
        Answer::Ended(None) => {}
        Answer::Ended(Some(code)) => {
            let code = ErrorCode(code);
            return Err(Stop::Fail(format!("a write into another process ended with {code:?}")));
        }
        other => return Err(Stop::Fail(format!("the sender answered a write with {other:?}"))),
    }
    if notifies && arrived.is_none() {
        let mut wrong = Ok(());
        wait_for(|| {
            wrong = look(&mut arrived);
            (arrived.is_some() || wrong.is_err()).then_some(())
        });
        wrong?;
    }
    if let Some(Notification { length, payload, .. }) = arrived {
        ensure!(
            length == 1 && payload[0] == byte,
            "the notification from another process carries {length} bytes, the first is {}; it should carry {byte} alone",
            payload[0]
        );
    }
    ensure!(arrived.is_some() || !notifies, "no notification came from another process");
    let mut found = vec![0; BYTES];
    peek(target, 0, &mut found);
    let wrong = found.iter().position(|one| *one != byte);
    ensure!(
        wrong.is_none(),
        "byte {} of a write from another process is {}, it should be {byte}",
        wrong.unwrap_or_default(),
        wrong.map(|at| found[at]).unwrap_or_default()
    );
    Ok(())
}

/// What the second process does: it follows the receiver's orders.
pub(super) fn send(subject: &Subject) -> Outcome {
    // Ends with the receiver's process, also when it is stopped.
    let tied = set_parent_process_death_signal(Some(Signal::KILL));
    tied.map_err(|error| Stop::Skip(format!("the sender cannot be tied to its receiver: {error}")))?;
    let followed = follow(subject);
    match &followed {
        Ok(()) => {}
        Err(Stop::Fail(text)) => tell(&Answer::Wrong(text.clone())),
        Err(Stop::Skip(text)) => tell(&Answer::Impossible(text.clone())),
    }
    followed
}

fn tell(answer: &Answer) {
    // The receiver fails the case when it hears nothing.
    let line = serde_json::to_string(answer).unwrap_or_default();
    let mut output = std::io::stdout().lock();
    let _unheard = writeln!(output, "\n{MARK}{line}").and_then(|()| output.flush());
}

fn follow(subject: &Subject) -> Outcome {
    let source = memory("source")?;
    let sender = subject.transfer("sender")?;
    let from = register(&*sender, &source, 1)?;
    let (mut peer, mut tag) = (None, 0);
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let order: Order = serde_json::from_str(&line).map_err(|error| format!("{line}: {error}"))?;
        match order {
            Order::Connect(endpoint) => {
                if let Some(before) = peer.take() {
                    // The receiver may have ended it already.
                    let _ended = sender.disconnect(before);
                }
                match sender.connect("receiver", &endpoint) {
                    Ok(id) => {
                        peer = Some(id);
                        let here = sender.endpoint().map_err(|error| format!("endpoint answered {error}"))?;
                        tell(&Answer::Connected(here));
                    }
                    Err(error) => tell(&Answer::NotConnected(error.to_string())),
                }
            }
            Order::Write { region, generation, byte, submissions, notifies } => {
                let peer = peer.ok_or_else(|| "a write was ordered without a connection".to_owned())?;
                write_at(&source, 0, &vec![byte; BYTES]);
                let mut submission = Submission {
                    peer,
                    notification_length: u32::from(notifies),
                    tag: Tag(0),
                    notification: [0; NOTIFICATION_BYTES],
                };
                submission.notification[0] = byte;
                let writes = writes(&sender, from, RegionId(region), generation);
                let ended = write(&*sender, &submission, &mut tag, submissions, &writes)?;
                tell(&Answer::Ended(ended));
            }
        }
    }
    sender.shutdown(shutdown_ms()).map_err(|error| format!("shutdown of the sender answered {error}"))?;
    Ok(())
}

/// The whole region in eight writes, or in one if the backend takes fewer.
fn writes(sender: &Arc<dyn TransferBackend>, from: RegionId, to: RegionId, generation: u32) -> Vec<Write> {
    let count = if sender.limits().max_writes < 8 { 1 } else { 8 };
    let length = BYTES / count;
    let write = |place: usize| Write {
        source_region: from,
        target_region: to,
        source_offset: (place * length) as u64,
        target_offset: (place * length) as u64,
        length: length as u32,
        target_generation: generation,
    };
    (0..count).map(write).collect()
}

/// Submits the writes so many times, each time under the next tag, and waits until all have ended. Returns the first code that is an
/// error, of a submission that was refused, too.
fn write(
    sender: &dyn TransferBackend,
    submission: &Submission,
    last: &mut u64,
    submissions: u32,
    writes: &[Write],
) -> Result<Option<i32>, Stop> {
    let (mut in_flight, mut left, mut failed, mut wrong) = (0, submissions, None, None);
    let all = wait_while_moving(|| {
        if left > 0 {
            match sender.submit(&tagged(submission, *last + 1), writes) {
                0 => (*last, in_flight, left) = (*last + 1, in_flight + 1, left - 1),
                code if code == ErrorCode::WOULD_BLOCK.0 => {}
                code => (failed, left) = (failed.or(Some(code)), 0),
            }
        }
        let mut one = [NO_COMPLETION];
        match sender.poll(&mut one) {
            0 => {}
            1 if in_flight == 0 => wrong = Some("poll has more completions than were submitted".to_owned()),
            1 => {
                in_flight -= 1;
                failed = failed.or(Some(one[0].status).filter(|status| *status != 0));
            }
            code => wrong = Some(format!("poll with room for one answered {:?}", ErrorCode(code))),
        }
        let done = (left == 0 && in_flight == 0) || wrong.is_some();
        (done.then_some(()), (left, in_flight))
    });
    if let Some(wrong) = wrong {
        return Err(Stop::Fail(wrong));
    }
    ensure!(
        all.is_some(),
        "of {submissions} submissions to another process {left} were never accepted, and {in_flight} never ended"
    );
    Ok(failed)
}

/// The same submission under another tag.
fn tagged(submission: &Submission, tag: u64) -> Submission {
    Submission { tag: Tag(tag), ..*submission }
}
