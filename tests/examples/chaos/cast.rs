//! The processes, each started again when it has ended.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use host_tests::cluster::{agent, signal};
use host_tests::wait::until;
use host_tests::{plugin_files, ports};
use serde_json::Value;

use crate::load::Address;

/// Steps take a while, so that faults strike answers in the middle.
const SYNTHETIC: &str = "[synthetic]\nstep-us = 1000\nprefill-token-us = 20\n";
/// Between two looks at the processes.
const LOOK: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Router,
    Prefill,
    Decode,
}

/// What was done to a process that will end, or stands still.
#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Runs,
    Frozen(Instant),
    /// Its end was asked for.
    Ends,
}

/// One process, over its lives.
struct Part {
    role: Role,
    name: String,
    arguments: Vec<String>,
    child: Child,
    state: State,
    log: PathBuf,
    killed: Arc<AtomicU64>,
}

/// Resident bytes and descriptors of a process.
type Footprint = (u64, usize);

pub struct Cast {
    host: PathBuf,
    parts: Vec<Part>,
    routers: Vec<Address>,
    tier: PathBuf,
    unasked: Vec<String>,
    folder: Option<tempfile::TempDir>,
    _plugins: tempfile::TempDir,
}

impl Part {
    fn spawn(host: &Path, arguments: &[String], log: &Path) -> Child {
        let log = OpenOptions::new().create(true).append(true).open(log).expect("the log can be written");
        let output: File = log.try_clone().expect("another descriptor of the log");
        Command::new(host)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(log)
            .spawn()
            .expect("the program starts")
    }
}

impl Cast {
    /// Two routers, two prefill and three decode workers.
    pub fn start(host: &Path) -> Self {
        let plugins = plugin_files::directory(&["shm", "hicache-file"]);
        let folder = tempfile::tempdir().expect("a folder for logs and pages");
        let tier = folder.path().join("tier");
        let config = folder.path().join("host.toml");
        std::fs::write(&config, SYNTHETIC).expect("the configuration is written");
        let mut cast = Self {
            host: host.to_owned(),
            parts: Vec::new(),
            routers: Vec::new(),
            tier: tier.clone(),
            unasked: Vec::new(),
            _plugins: plugins,
            folder: None,
        };
        let common = |role: &str| -> Vec<String> {
            ["--role", role, "--executor", "synthetic", "--log-format", "json", "--config"]
                .map(str::to_owned)
                .into_iter()
                .chain([config.display().to_string()])
                .collect()
        };
        let mut controls = Vec::new();
        for at in 0..2 {
            let (http, control) = (ports::unused(), ports::unused());
            controls.push(format!("http://{control}"));
            let mut arguments = common("router");
            arguments.extend(["--port".into(), http.port().to_string()]);
            arguments.extend(["--control".into(), control.to_string()]);
            let killed = Arc::new(AtomicU64::new(0));
            cast.routers.push(Address { url: format!("http://{http}"), killed: Arc::clone(&killed) });
            cast.add(Role::Router, format!("router-{at}"), arguments, folder.path(), killed);
        }
        for (role, count) in [(Role::Prefill, 2), (Role::Decode, 3)] {
            let word = if role == Role::Prefill { "prefill" } else { "decode" };
            for at in 0..count {
                let name = format!("{word}-{at}");
                let mut arguments = common(word);
                let small = "--pool-pages 256 --hicache-memory 1MiB --chunk-tokens 64 --max-batch 16 --layer-groups 4 \
                             --drain-timeout 2 --control 127.0.0.1:0 --plugins shm,hicache-file";
                arguments.extend(small.split_whitespace().map(str::to_owned));
                arguments.extend(["--plugins-dir".into(), cast._plugins.path().display().to_string()]);
                let set = |key: &str| format!("hicache-file.{key}");
                arguments.extend(["--set".into(), set(&format!("dir={}", tier.display()))]);
                arguments.extend(["--set".into(), set("size_limit_mib=512")]);
                arguments.extend(["--router".into(), controls.join(","), "--name".into(), name.clone()]);
                cast.add(role, name, arguments, folder.path(), Arc::default());
            }
        }
        cast.folder = Some(folder);
        cast
    }

    fn add(
        &mut self,
        role: Role,
        name: String,
        arguments: Vec<String>,
        folder: &Path,
        killed: Arc<AtomicU64>,
    ) {
        let log = folder.join(format!("{name}.log"));
        let child = Part::spawn(&self.host, &arguments, &log);
        self.parts.push(Part { role, name, arguments, child, state: State::Runs, log, killed });
    }

    pub fn routers(&self) -> &[Address] {
        &self.routers
    }

    /// Processes that ended although nothing was done to them.
    pub fn unasked(&self) -> &Vec<String> {
        &self.unasked
    }

    /// Thaws what has been frozen long enough, and starts what has ended.
    fn look(&mut self) {
        for part in &mut self.parts {
            if let State::Frozen(until) = part.state
                && Instant::now() >= until
            {
                signal(part.child.id(), "CONT");
                part.state = State::Runs;
            }
            let Ok(Some(status)) = part.child.try_wait() else { continue };
            if part.state != State::Ends {
                let log = std::fs::read_to_string(&part.log).unwrap_or_default();
                let last = log.lines().last().unwrap_or_default().to_owned();
                self.unasked.push(format!("{} with {status}: {last}", part.name));
                assert!(self.unasked.len() < 20, "processes end by themselves: {:#?}", self.unasked);
            }
            part.child = Part::spawn(&self.host, &part.arguments, &part.log);
            part.state = State::Runs;
        }
    }

    /// Lets time pass.
    pub fn run_for(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.look();
            std::thread::sleep(LOOK);
        }
    }

    /// One of a role to which nothing is done at the moment, unless it is the last one that runs.
    fn victim(&mut self, role: Role, random: &mut fastrand::Rng) -> Option<&mut Part> {
        let runs = |part: &&mut Part| part.role == role && part.state == State::Runs;
        let mut running: Vec<&mut Part> = self.parts.iter_mut().filter(runs).collect();
        if running.len() < 2 {
            return None;
        }
        let at = random.usize(0..running.len());
        Some(running.swap_remove(at))
    }

    pub fn kill(&mut self, role: Role, random: &mut fastrand::Rng) -> bool {
        let Some(part) = self.victim(role, random) else { return false };
        part.state = State::Ends;
        // Before and after, so that a client whose connection breaks sees another number than it saw when it connected.
        part.killed.fetch_add(1, Ordering::SeqCst);
        let killed = part.child.kill();
        part.killed.fetch_add(1, Ordering::SeqCst);
        killed.is_ok()
    }

    pub fn drain(&mut self, role: Role, random: &mut fastrand::Rng) -> bool {
        let Some(part) = self.victim(role, random) else { return false };
        part.state = State::Ends;
        signal(part.child.id(), "TERM");
        true
    }

    pub fn freeze(&mut self, role: Role, time: Duration, random: &mut fastrand::Rng) -> bool {
        let Some(part) = self.victim(role, random) else { return false };
        part.state = State::Frozen(Instant::now() + time);
        signal(part.child.id(), "STOP");
        true
    }

    pub fn flush(&mut self, random: &mut fastrand::Rng) -> bool {
        let Some(router) = random.choice(&self.routers) else { return false };
        // A worker that is down just now cannot be told.
        agent().post(format!("{}/flush_cache", router.url)).send_empty().is_ok()
    }

    /// Changes some bytes in the middle of a file of the storage tier.
    pub fn change_stored_bytes(&mut self, random: &mut fastrand::Rng) -> bool {
        let mut files = Vec::new();
        files_below(&self.tier, &mut files);
        let Some(file) = random.choice(&files) else { return false };
        let Ok(open) = OpenOptions::new().write(true).open(file) else { return false };
        let length = open.metadata().map_or(0, |metadata| metadata.len());
        if length < 8192 {
            return false;
        }
        let bytes: Vec<u8> = (0..64).map(|_| random.u8(..)).collect();
        open.write_all_at(&bytes, random.u64(4096..length - 64)).is_ok()
    }

    /// Nothing is frozen any more.
    pub fn heal(&mut self) {
        for part in &mut self.parts {
            if let State::Frozen(until) = &mut part.state {
                *until = Instant::now();
            }
        }
        self.look();
    }

    fn health(url: &str) -> Value {
        let reply = agent().get(format!("{url}/health")).call();
        let text = reply.ok().and_then(|mut reply| reply.body_mut().read_to_string().ok());
        text.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default()
    }

    /// Waits until every router sees every worker live.
    pub fn wait_until_ready(&mut self) {
        let workers = self.parts.iter().filter(|part| part.role != Role::Router).count();
        until("all workers to be live", || {
            self.look();
            for router in &self.routers {
                let health = Self::health(&router.url);
                let all = health["workers"].as_array().cloned().unwrap_or_default();
                let live = all.iter().filter(|worker| worker["state"] == "live").count();
                if live != workers {
                    return Err(health);
                }
            }
            Ok(())
        });
    }

    /// Answers that went on, by the routers that live now.
    pub fn resumed(&self) -> u64 {
        let of = |router: &Address| {
            let text =
                agent().get(format!("{}/metrics", router.url)).call().ok()?.body_mut().read_to_string();
            let text = text.ok()?;
            let line = text.lines().find(|line| line.starts_with("host_resumed_total "))?;
            line.rsplit(' ').next()?.parse::<u64>().ok()
        };
        self.routers.iter().filter_map(of).sum()
    }

    pub fn footprints(&self) -> BTreeMap<String, Footprint> {
        self.parts.iter().map(|part| (part.name.clone(), footprint(part.child.id()))).collect()
    }

    /// Pages that are not given back although nothing is under way, and processes that have grown.
    pub fn leaks(&mut self, before: &BTreeMap<String, Footprint>) -> Vec<String> {
        let addresses: Vec<String> = Self::health(&self.routers[0].url)["workers"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|worker| worker["metrics"].as_str().map(str::to_owned))
            .collect();
        let idle = host_tests::wait::try_until(|| {
            let busy: Vec<String> = addresses.iter().flat_map(|address| held(address)).collect();
            if busy.is_empty() { Ok(()) } else { Err(busy) }
        });
        let mut leaks = idle.err().unwrap_or_default();
        for part in &self.parts {
            let ((bytes, files), (bytes_before, files_before)) =
                (footprint(part.child.id()), before[&part.name]);
            // Twice, because some processes have just started, and before was under load.
            if bytes > 2 * bytes_before + (32 << 20) || files > files_before + 32 {
                let name = &part.name;
                leaks.push(format!(
                    "{name} went from {bytes_before} bytes and {files_before} descriptors to {bytes} and {files}"
                ));
            }
        }
        leaks
    }

    /// The logs, which stay.
    pub fn keep_logs(&mut self) -> PathBuf {
        self.folder.take().map(tempfile::TempDir::keep).unwrap_or_default()
    }
}

/// What a worker holds although it should be idle.
fn held(address: &str) -> Vec<String> {
    let text = agent().get(format!("{address}/metrics")).call();
    let text = text.ok().and_then(|mut reply| reply.body_mut().read_to_string().ok());
    let Some(text) = text else { return vec![format!("{address} does not answer")] };
    let wrong = [
        "host_kv_pages{state=\"held\"}",
        "host_kv_pages{state=\"quarantined\"}",
        "host_requests_queued",
        "host_requests_active",
        "host_rooms_quarantined",
        "host_messages_unanswered",
    ];
    text.lines()
        .filter(|line| {
            line.rsplit_once(' ').is_some_and(|(name, value)| wrong.contains(&name) && value != "0")
        })
        .map(|line| format!("{address}: {line}"))
        .collect()
}

fn footprint(pid: u32) -> Footprint {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap_or_default();
    let kib: u64 = line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).unwrap_or(0);
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    (kib << 10, files)
}

fn files_below(folder: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            files_below(&path, files);
        } else {
            files.push(path);
        }
    }
    files.sort();
}

impl Drop for Cast {
    fn drop(&mut self) {
        for part in &mut self.parts {
            // Frozen ones, too.
            let _ended = part.child.kill();
            let _status = part.child.wait();
        }
    }
}
