//! Messages to operators about a transfer plugin that panics, fails, or gives impossible answers.

use std::sync::Mutex;

use host_core::Time;
use host_plugin_api::abi::open_guarded;
use host_plugin_api::transfer::{
    Completion, Memory, Notification, PeerId, RegionId, Submission, TransferLimits, Write,
};
use host_plugin_api::{Result, Tag as Submitted};
use host_plugins::{LoadedTransfer, PluginError, Running, Services};
use host_tests::wait::until;

use super::*;
use crate::fit::try_out_transfer;
use crate::link::not_cut_off;
use crate::told;
use crate::watchdog::Watchdog;

/// What the plugin does in one of its methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Panic,
    Answer(i32),
    /// Claims one entry more than there is room for.
    TooMany,
    /// Reports the end of a submission that was never made.
    Unknown,
    /// Reports one byte less than was written.
    Bytes,
    /// Does not return while this act is set.
    Block,
}

/// The act of one method of a plugin. Until an act is [set](Script::set), all methods behave as they should.
#[derive(Debug)]
pub struct Script {
    plugin: &'static str,
    does: Mutex<Option<(&'static str, Act)>>,
}

impl Script {
    fn of_plugin(plugin: &'static str) -> Self {
        Self { plugin, does: Mutex::default() }
    }

    fn set(&self, method: &'static str, act: Act) {
        *self.does.lock().unwrap() = Some((method, act));
    }

    fn clear(&self) {
        *self.does.lock().unwrap() = None;
    }

    fn of(&self, method: &str) -> Option<Act> {
        self.does.lock().unwrap().filter(|(of, _)| *of == method).map(|(_, act)| act)
    }

    /// Puts a plugin behind the guard that catches panics, as a loaded plugin is.
    pub fn guard(self: &Arc<Self>, inner: Arc<Node>) -> Arc<dyn TransferBackend> {
        let scripted = Scripted { inner, script: self.clone() };
        let object = open_guarded(|_opening| Ok(scripted), self.plugin.into(), "".into()).into_result();
        let object = object.unwrap_or_else(|_| panic!("the factory cannot fail"));
        let services = Services::of(&format!("test.{}", self.plugin)).unwrap();
        Arc::new(LoadedTransfer::new(self.plugin, object, &services).unwrap())
    }
}

struct Scripted {
    inner: Arc<Node>,
    script: Arc<Script>,
}

impl Scripted {
    /// Panics if that is the act of this method. Otherwise returns the method's act, if it has one.
    fn play(&self, method: &str) -> Option<Act> {
        until("the end of a blocked call", || {
            if self.script.of(method) == Some(Act::Block) { Err(method) } else { Ok(()) }
        });
        let act = self.script.of(method);
        assert!(act != Some(Act::Panic), "told to panic in {method}\nand to say it in two lines");
        act
    }

    fn coded(&self, method: &str, truth: impl FnOnce() -> i32) -> i32 {
        if let Some(Act::Answer(code)) = self.play(method) { code } else { truth() }
    }
}

macro_rules! forward {
    ($($name:ident($($argument:ident: $of:ty),*) -> $out:ty;)*) => {
        $(fn $name(&self, $($argument: $of),*) -> $out {
            self.play(stringify!($name));
            self.inner.$name($($argument),*)
        })*
    };
}

impl TransferBackend for Scripted {
    forward! {
        limits() -> TransferLimits;
        register(memory: &Memory) -> Result<RegionId>;
        deregister(region: RegionId) -> Result<()>;
        endpoint() -> Result<Vec<u8>>;
        connect(name: &str, endpoint: &[u8]) -> Result<PeerId>;
        disconnect(peer: PeerId) -> Result<()>;
        cancel(tag: Submitted) -> i32;
        event_fd() -> i32;
        shutdown(deadline: u64) -> Result<()>;
    }
    fn submit(&self, submission: &Submission, writes: &[Write]) -> i32 {
        self.coded("submit", || self.inner.submit(submission, writes))
    }
    fn settled(&self, tag: Submitted) -> i32 {
        self.coded("settled", || self.inner.settled(tag))
    }
    fn poll(&self, completions: &mut [Completion]) -> i32 {
        let act = self.play("poll");
        let count = self.inner.poll(completions);
        match act {
            Some(Act::Answer(code)) => code,
            Some(Act::TooMany) => completions.len() as i32 + 1,
            Some(Act::Unknown) if count > 0 => {
                completions[count as usize] = Completion { tag: Submitted(99), ..completions[0] };
                count + 1
            }
            Some(Act::Bytes) => {
                completions[..count as usize].iter_mut().for_each(|done| done.bytes -= 1);
                count
            }
            _ => count,
        }
    }
    fn notifications(&self, notifications: &mut [Notification]) -> i32 {
        match self.play("notifications") {
            Some(Act::Answer(code)) => code,
            Some(Act::TooMany) => notifications.len() as i32 + 1,
            _ => self.inner.notifications(notifications),
        }
    }
}

/// Two workers of one rank each. Prefill's plugin is scripted.
fn scripted() -> (Side, Side, Arc<Wire>, Arc<Script>) {
    scripted_as("acme")
}

/// Like [`scripted`], with a plugin of this name.
fn scripted_as(plugin: &'static str) -> (Side, Side, Arc<Wire>, Arc<Script>) {
    told::listen();
    let script = Arc::new(Script::of_plugin(plugin));
    let wire = Wire::scripted(Some(script.clone()));
    let mut prefill = Side::new(&wire, "prefill", 1, ORDERS[0], 7);
    let decode = Side::new(&wire, "decode", 1, ORDERS[0], 9);
    prefill.fill();
    (prefill, decode, wire, script)
}

/// Two connected workers. Prefill gets a write after the act of its plugin is set.
fn writing(method: &'static str, act: Act) -> (Side, Side, Arc<Wire>) {
    let (mut prefill, mut decode, wire, script) = scripted();
    decode.links.connect(&prefill.info()).unwrap();
    prefill.links.connect(&decode.info()).unwrap();
    decode.open(1, &EXPECTED);
    if method == "settled" {
        wire.fail(&rank_name(PREFILL, 0));
    }
    wire.hold(method == "cancel");
    script.set(method, act);
    let session = prefill.links.get(DECODE).unwrap().session;
    prefill.write(parts(session).swap_remove(2));
    if method == "cancel" {
        // The plugin must have the write before it can be asked to cancel it.
        decode.nodes[0].until_told();
        prefill.ask(&Command::Cancel(Tag(3)));
    }
    (prefill, decode, wire)
}

/// Gives prefill a write, and waits until its thread has ended.
fn ends(method: &'static str, act: Act) {
    let (mut prefill, _decode, _wire) = writing(method, act);
    // The thread has the only sender, so the channel closes when the thread ends.
    while prefill.inputs.blocking_recv().is_some() {}
}

/// The error with which the write ends.
fn written(method: &'static str, act: Act) -> Option<String> {
    let (mut prefill, _decode, _wire) = writing(method, act);
    match prefill.event() {
        Event::Written { error, .. } => error,
        event => panic!("{event:?}"),
    }
}

#[test]
fn what_a_transfer_plugin_does_wrong_is_told_as_the_page_says() {
    told::listen();
    let mut said = Vec::new();
    for method in ["submit", "poll", "notifications", "cancel", "settled", "event_fd"] {
        let before = told::lines("acme").len();
        ends(method, Act::Panic);
        let lines = told::lines("acme").split_off(before);
        let names = format!("told to panic in {method}");
        assert!(lines.iter().any(|line| line.contains(&names)), "{method}: {lines:?}");
    }
    ends("poll", Act::Answer(ErrorCode::IO.0));
    ends("poll", Act::TooMany);
    ends("notifications", Act::TooMany);
    assert_eq!(written("poll", Act::Unknown), None);
    assert!(written("poll", Act::Bytes).unwrap().contains("wrote "));
    assert!(written("submit", Act::Answer(ErrorCode::NO_RESOURCE.0)).unwrap().contains("NO_RESOURCE"));
    {
        let (prefill, _decode, _wire) = writing("settled", Act::Answer(ErrorCode::UNSUPPORTED.0));
        let of = |line: &String| line.contains("settled answered UNSUPPORTED");
        until("the line about settled", || {
            let lines = told::lines("acme");
            if lines.iter().any(of) { Ok(()) } else { Err(format!("{lines:?}")) }
        });
        drop(prefill);
    }

    // Some messages are not lines of the log but errors of calls.
    let (prefill, decode, _wire, script) = scripted();
    script.set("register", Act::Panic);
    let node = Wire::scripted(Some(script.clone()));
    let backend = script.guard(node.node("other"));
    // SAFETY: nothing touches the pool.
    let kv = unsafe { prefill.pools[0].share() };
    let (plugin, kv_heads) = (Some("acme".into()), HEADS);
    let opening = Opening { plugin, vram: false, kv_heads, aux_rows: 4, staging_bytes: 0 };
    said.push(Links::open(opening, vec![(kv, backend)]).err().unwrap().to_string());
    // Each method is called as the host calls it first.
    for method in ["limits", "deregister"] {
        let script = Arc::new(Script::of_plugin("acme"));
        script.set(method, Act::Panic);
        let backend = script.guard(Wire::scripted(Some(script.clone())).node("other"));
        said.push(match method {
            "limits" => {
                let problem = host_plugins::limits::of_transfer(&*backend).unwrap_err();
                PluginError::NotReady { plugin: "acme".into(), problem }.to_string()
            }
            _ => try_out_transfer("acme", &*backend).unwrap_err().to_string(),
        });
        assert!(said.last().unwrap().contains(&format!("told to panic in {method}")), "{said:?}");
    }
    let (info, peer) = (prefill.info(), decode.info());
    let with = |method, call: &dyn Fn(&Side) -> String| {
        let (prefill, decode, _wire, script) = scripted();
        decode.links.connect(&info).unwrap();
        if method == "disconnect" {
            prefill.links.connect(&peer).unwrap();
        }
        script.set(method, Act::Panic);
        call(&prefill)
    };
    said.push(with("endpoint", &|side| side.links.endpoints().unwrap_err().to_string()));
    said.push(with("connect", &|side| side.links.connect(&peer).unwrap_err()));
    said.push(with("disconnect", &|side| {
        let session = side.links.get(DECODE).unwrap().session;
        not_cut_off("acme", DECODE, &side.links.fence(DECODE, session).unwrap_err())
    }));
    said.push(with("shutdown", &|side| side.links.shutdown(Running::default()).unwrap_err().to_string()));
    said.extend(told::lines("acme"));
    told::compare("### A transfer plugin", &said);
}

/// The messages of the watchdog while the call lasts and when it has returned, in a time of its own.
fn slow(method: &str, seconds: u64, script: &Script) -> Vec<String> {
    let of = || {
        let mut calls = host_plugins::in_progress();
        calls.retain(|call| call.plugin == script.plugin && call.call == method);
        calls
    };
    let calls = until("a call in progress", || {
        let calls = of();
        if calls.is_empty() { Err(format!("{method} is not called")) } else { Ok(calls) }
    });
    let mut watchdog = Watchdog::new(Duration::from_secs(10));
    let mut said = Vec::new();
    for second in 0..=seconds {
        let looked = watchdog.look(Time(Duration::from_secs(second)), &calls);
        said.extend(looked.slow.iter().map(ToString::to_string));
        said.extend(looked.hung.iter().map(ToString::to_string));
    }
    script.clear();
    let looked = watchdog.look(Time(Duration::from_secs(seconds + 1)), &[]);
    said.extend(looked.slow.iter().map(ToString::to_string));
    said
}

#[test]
fn a_call_that_is_slow_is_told_with_its_peer_as_the_page_says() {
    // The watchdog looks at calls of the whole process, and another test uses the plugin name of the page.
    let (prefill, decode, _wire, script) = scripted_as("acme-slow");
    decode.links.connect(&prefill.info()).unwrap();
    let mut said = Vec::new();
    for (method, seconds) in [("connect", 3), ("submit", 1), ("poll", 10)] {
        script.set(method, Act::Block);
        let (links, peer) = (prefill.links.clone(), decode.info());
        let connecting = std::thread::spawn(move || links.connect(&peer));
        if method == "submit" {
            connecting.join().unwrap().unwrap();
            let session = prefill.links.get(DECODE).unwrap().session;
            prefill.ask(&Command::Write(Arc::new(parts(session).swap_remove(2))));
            said.extend(slow(method, seconds, &script));
        } else {
            said.extend(slow(method, seconds, &script));
            connecting.join().unwrap().unwrap();
        }
    }
    let peer = format!("for the peer {:?}", rank_name(DECODE, 0));
    assert!(
        said.iter()
            .filter(|line| line.contains("connect ") || line.contains("submit "))
            .all(|line| line.contains(&peer))
    );
    said.iter_mut().for_each(|line| *line = line.replace("acme-slow", "acme"));
    told::compare("## A plugin that is slow", &said);
}
