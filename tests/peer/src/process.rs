//! The other process of tests: its roles, and how it is started.

use host_plugin_api::RegionId;
use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Barrier, Mutex, OnceLock};

use host_plugin_api::*;
use host_plugins::{Catalog, Entry, Policy, open_transfer};
use host_tests::built::{BUILT, profile, target};
use host_tests::lines::Lines;
use host_tests::wait::until;

use crate::{DeviceMemory, Place, Worker, empty_notification, hash, hex, ranks, submission, unhex};

const PACKAGE: &str = env!("CARGO_PKG_NAME");
const PROGRAM: &str = "plugin_process";

/// Role of the other process, and the arguments that the role takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A [`Worker`], driven by lines: directory, plugin, name, bytes, configuration.
    Worker,
    /// As [`Role::Worker`], with memory on a device.
    DeviceWorker,
    /// A side of [`ranks`], driven by lines: directory, plugin, name, configuration.
    Ranks,
    /// Opens the plugin of a name, and reports the result: directory, name.
    Load,
    /// Opens the only plugin of a directory, uses it, and reports the result: directory. Variables say what happens between the
    /// steps.
    Use,
    /// Opens files one after the other, and reports each result.
    Each,
    /// Opens copies of a plugin at the same time, one of which then sends to the other: plugin, configuration, directories.
    AtOnce,
}

const ROLES: [(Role, &str); 7] = [
    (Role::Worker, "worker"),
    (Role::DeviceWorker, "device-worker"),
    (Role::Ranks, "ranks"),
    (Role::Load, "load"),
    (Role::Use, "use"),
    (Role::Each, "each"),
    (Role::AtOnce, "at-once"),
];

/// Variable with a shell command that runs in the directory of the plugin, after the plugin was found and before it is opened.
pub const AFTER_SCAN: &str = "AFTER_SCAN";
/// Variable with a shell command that runs in the directory of the plugin, after it was opened and before it is opened again.
pub const AFTER_LOAD: &str = "AFTER_LOAD";
/// Variable that allows plugins that abort on a panic.
pub const MAY_ABORT: &str = "MAY_ABORT";

/// Variable with the name of a file of publishers in the directory of plugins. With it, plugins need a signature of one of them.
pub const PUBLISHERS: &str = "PUBLISHERS";

/// The program of the other process. Where [`BUILT`] says so, it was built with this test. Else it is built now, once in a
/// process.
pub fn program() -> PathBuf {
    static PROGRAM_FILE: OnceLock<PathBuf> = OnceLock::new();
    let find = || {
        let profile = profile();
        let file = profile.join("examples").join(PROGRAM);
        if std::env::var_os(BUILT).is_none() {
            let mut cargo = Command::new(env!("CARGO"));
            cargo.args(["build", "--quiet", "--package", PACKAGE, "--example", PROGRAM, "--profile"]);
            cargo.arg(if profile.ends_with("debug") { "dev" } else { "release" });
            cargo.current_dir(env!("CARGO_MANIFEST_DIR")).env("CARGO_TARGET_DIR", target());
            let output = cargo.output().expect("cargo runs");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{cargo:?} failed, run it by hand:\n{said}");
        }
        assert!(file.is_file(), "{} is missing, although it was built", file.display());
        file
    };
    PROGRAM_FILE.get_or_init(find).clone()
}

/// The program in a role, without the role's arguments.
pub fn command(role: Role) -> Command {
    let (_, word) = ROLES.iter().find(|(known, _)| *known == role).expect("every role has a word");
    let mut command = Command::new(program());
    command.arg(word);
    command
}

/// Runs the program in a role and returns its answers. The program must end by itself, with success.
pub fn said(name: &str, command: &mut Command) -> String {
    let output = command.output().expect("the other process runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {}\n{text}{errors}", output.status);
    text.lines().filter_map(|line| Some(line.split_once("@ ")?.1)).collect::<Vec<_>>().join("\n")
}

/// Plays the role that the arguments name.
pub fn be(arguments: &[String]) {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (role, rest) = words.split_first().expect("a role");
    let (role, _) = ROLES.iter().find(|(_, word)| word == role).expect("a known role");
    match (role, rest) {
        (Role::Worker, [directory, plugin, name, bytes, config]) => {
            let bytes = bytes.parse().unwrap();
            serve(Worker::open(Path::new(directory), plugin, name, bytes, config));
        }
        (Role::DeviceWorker, [directory, plugin, name, bytes, config]) => {
            let bytes = bytes.parse().unwrap();
            serve(Worker::open_on(Place::Device, Path::new(directory), plugin, name, bytes, config));
        }
        (Role::Ranks, [directory, plugin, name, config]) => {
            ranks::serve(Path::new(directory), plugin, name, config);
        }
        (Role::Load, [directory, name]) => load(directory, name),
        (Role::Use, [directory]) => find_and_use(directory),
        (Role::Each, files) => open_each(files),
        (Role::AtOnce, [plugin, config, folders @ ..]) => open_at_once(plugin, config, folders),
        _ => panic!("{role:?} takes other arguments than {rest:?}"),
    }
}

/// A [`Worker`] in a child process: the program [`program`], whose role is [`Role::Worker`].
pub struct Remote {
    /// The process.
    pub process: Child,
    input: ChildStdin,
    output: Lines,
}

impl Remote {
    /// Starts a process with a worker as [`Worker::open`] makes it.
    pub fn start(directory: &Path, plugin: &str, name: &str, bytes: usize, config: &str) -> Self {
        let bytes = bytes.to_string();
        Self::of(Role::Worker, directory, &[plugin, name, &bytes, config])
    }

    /// As [`start`](Self::start), with memory at `place` and with these variables. The process finds the stand-in for NVIDIA's
    /// driver.
    pub fn start_on(
        place: Place,
        directory: &Path,
        plugin: &str,
        name: &str,
        bytes: usize,
        (config, variables): (&str, &[(&str, &str)]),
    ) -> Self {
        let mut command = command(if place == Place::Host { Role::Worker } else { Role::DeviceWorker });
        command.env("LD_LIBRARY_PATH", host_tests::cuda::stand_in()).envs(variables.iter().copied());
        Self::by(command, directory, &[plugin, name, &bytes.to_string(), config])
    }

    /// Starts a process in another role, with these arguments after the directory.
    pub fn of(role: Role, directory: &Path, arguments: &[&str]) -> Self {
        Self::by(command(role), directory, arguments)
    }

    fn by(mut command: Command, directory: &Path, arguments: &[&str]) -> Self {
        let mut process = command
            .arg(directory)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = process.stdin.take().unwrap();
        let output = Lines::of(process.stdout.take().unwrap());
        Self { process, input, output }
    }

    /// Sends a line and returns the answer.
    pub fn ask(&mut self, line: &str) -> String {
        self.say(line);
        self.answer()
    }

    /// Sends a line.
    pub fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// The next answer.
    pub fn answer(&mut self) -> String {
        // Libraries print to the same pipe, even on the line of an answer.
        let answer = |line: &str| line.split_once("@ ").map(|(_, answer)| answer.trim_end().to_owned());
        self.output.find("the child process's answer", answer).unwrap_or_else(|missing| panic!("{missing}"))
    }

    /// Its endpoint.
    pub fn endpoint(&mut self) -> Vec<u8> {
        unhex(&self.ask("endpoint"))
    }

    /// Waits until all that it has tried to write so far has ended, and so many later tries. It was told to `flood` this worker.
    pub fn floods_on(&mut self, more: u64, worker: &Worker) {
        let (_, next) = self.tries();
        until("the ends of a flood's tries", || {
            // Notifications that are not fetched hold a flood up.
            worker.backend.notifications(&mut [empty_notification(); 64]);
            let (oldest, _) = self.tries();
            let ended = oldest >= next + more;
            if ended { Ok(()) } else { Err(format!("{oldest} ended, and it was at {next} at first")) }
        });
    }

    /// The number of its oldest try that has not ended, and that of its next one.
    fn tries(&mut self) -> (u64, u64) {
        let answer = self.ask("tries");
        let (oldest, next) = answer.split_once(' ').unwrap();
        (oldest.parse().unwrap(), next.parse().unwrap())
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let _already_gone = self.process.kill();
        let _reaped = self.process.wait();
    }
}

/// The tries of a thread that submits writes again and again.
struct Tries {
    /// The number of the next one, which is its tag.
    next: u64,
    in_flight: BTreeSet<u64>,
}

impl Tries {
    fn begin(&mut self) -> u64 {
        let tag = self.next;
        self.next += 1;
        self.in_flight.insert(tag);
        tag
    }

    fn oldest(&self) -> u64 {
        self.in_flight.first().copied().unwrap_or(self.next)
    }
}

/// Submits a write again and again until the process ends.
fn flood(backend: &dyn TransferBackend, peer: PeerId, write: Write, tries: &Mutex<Tries>) {
    let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }; 16];
    loop {
        let tag = tries.lock().unwrap().begin();
        if backend.submit(&submission(peer, tag, &tag.to_le_bytes()), &[write]) < 0 {
            let count = usize::try_from(backend.poll(&mut done)).unwrap_or(0);
            let mut tries = tries.lock().unwrap();
            tries.in_flight.remove(&tag);
            for done in &done[..count] {
                tries.in_flight.remove(&done.tag.0);
            }
            drop(tries);
            std::thread::yield_now();
        }
    }
}

/// The other process's side of a [`Remote`] worker.
fn serve(mut worker: Worker) {
    let mut peer = PeerId(0);
    let tries = Arc::new(Mutex::new(Tries { next: 1, in_flight: BTreeSet::new() }));
    let answer = |text: String| println!("@ {text}");
    let outcome = |result: Result<()>| match result {
        Ok(()) => "ok".to_owned(),
        Err(error) => error.to_string(),
    };
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<usize>().unwrap();
        match words[0] {
            "endpoint" => answer(hex(&worker.backend.endpoint().unwrap())),
            "region" => answer(worker.region.0.to_string()),
            "notification" => {
                let n = worker.notification();
                let kind = if n.kind == NotificationKind::PEER_LOST { "lost" } else { "arrived" };
                let name = std::str::from_utf8(&n.peer_name[..n.peer_name_length as usize]).unwrap();
                answer(format!("{kind} {name} {}", hex(&n.payload[..n.length as usize])));
            }
            "hash" => answer(hash(&worker.bytes()[number(1)..number(1) + number(2)]).to_string()),
            "byte" => answer(worker.bytes()[number(1)].to_string()),
            "fill" => {
                worker.bytes_mut().fill(number(1) as u8);
                answer("ok".to_owned());
            }
            "connect" => {
                peer = worker.backend.connect("parent", &unhex(words[1])).unwrap();
                answer("ok".to_owned());
            }
            "try" => answer(outcome(worker.backend.connect("parent", &unhex(words[1])).map(drop))),
            // Registers host memory as if it were a device's.
            "offer-device" => {
                let address = Address::of(worker.bytes().as_ptr());
                let (kind, length) = (MemoryKind::VRAM, worker.bytes().len() as u64);
                let memory = Memory { address, length, kind, device: 0, fd: -1, generation: 1, fd_offset: 0 };
                answer(outcome(worker.backend.register(&memory).map(drop)));
            }
            "disconnect" => answer(outcome(worker.backend.disconnect(peer))),
            "opened" => answer(DeviceMemory::opened().to_string()),
            "deregister" => answer(outcome(worker.backend.deregister(worker.region))),
            "reregister" => {
                worker.backend.deregister(worker.region).unwrap();
                worker.generation += 1;
                worker.register().unwrap();
                answer(worker.region.0.to_string());
            }
            // Submits one write of all memory. The next completion belongs to it.
            "send" => {
                let write = Write {
                    source_region: worker.region,
                    target_region: RegionId(words[1].parse().unwrap()),
                    length: worker.bytes().len() as u32,
                    target_generation: 1,
                    ..Write::default()
                };
                let tag: u64 = words[2].parse().unwrap();
                let submission = submission(peer, tag, &tag.to_le_bytes());
                answer(worker.backend.submit(&submission, &[write]).to_string());
            }
            "completion" => answer(worker.completion().status.to_string()),
            // Submits one write of all memory, again and again until killed. Of the other words only "tries" may follow.
            "flood" => {
                let target = RegionId(words[1].parse().unwrap());
                let write = Write {
                    source_region: worker.region,
                    target_region: target,
                    length: worker.bytes().len() as u32,
                    target_generation: 1,
                    ..Write::default()
                };
                let (backend, tries) = (worker.backend.clone(), tries.clone());
                std::thread::spawn(move || flood(&*backend, peer, write, &tries));
                answer("ok".to_owned());
            }
            "tries" => {
                let tries = tries.lock().unwrap();
                answer(format!("{} {}", tries.oldest(), tries.next));
            }
            other => panic!("unknown word {other}"),
        }
    }
    if tries.lock().unwrap().next > 1 {
        // The thread reads the memory as long as the process lives.
        std::mem::forget(worker);
    }
}

fn opening() -> Opening {
    Opening { name: "test".into(), config: String::new() }
}

/// Loads a plugin by its name from a directory, as the host would, and reports the result.
fn load(directory: &str, name: &str) {
    let catalog = Catalog::scan([directory]);
    match catalog.find(name).and_then(|entry| open_transfer(entry, &opening())) {
        Ok(backend) => println!("@ opened {}", backend.limits().max_writes > 0),
        Err(error) => println!("@ {} | {error}", error.reason()),
    }
    for file in catalog.unusable() {
        println!("@ unusable {} | {}", file.reason.reason(), file.reason);
    }
}

/// Finds the only plugin of a directory as the host would, opens it, uses it, and reports the result.
fn find_and_use(directory: &str) {
    let policy = Policy {
        panic_abort: std::env::var(MAY_ABORT).is_ok(),
        publishers: std::env::var_os(PUBLISHERS).map(|name| Path::new(directory).join(name)),
        ..Policy::default()
    };
    let catalog = Catalog::scan_with(policy, [directory]);
    for file in catalog.unusable() {
        println!("@ {} | {}", file.reason.reason(), file.reason);
    }
    let Some(entry) = catalog.entries().first() else {
        if catalog.unusable().is_empty() {
            println!("@ not_found | {}", catalog.find("x").unwrap_err());
        }
        return;
    };
    let then = |variable: &str| {
        let Ok(then) = std::env::var(variable) else { return false };
        assert!(Command::new("sh").args(["-c", &then]).current_dir(directory).status().unwrap().success());
        true
    };
    then(AFTER_SCAN);
    let backend = match open_transfer(entry, &opening()) {
        Ok(backend) => backend,
        Err(error) => return println!("@ {} | {error}", error.reason()),
    };
    if then(AFTER_LOAD) {
        match open_transfer(entry, &opening()) {
            Ok(_again) => println!("@ again opened"),
            Err(error) => println!("@ again {} | {error}", error.reason()),
        }
    }
    assert_eq!(backend.settled(Tag(1)), 1);
    backend.shutdown(1000).unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let from = if maps.contains("/memfd:") { "sealed memory" } else { "its place" };
    println!("@ opened from {from}, api {}", entry.manifest.api.version);
}

/// Opens one file after the other in one process, and reports each result.
fn open_each(files: &[&str]) {
    for file in files {
        match open_transfer(&Entry::of_file(Path::new(file)).unwrap(), &opening()) {
            Ok(backend) => println!("@ settled {}", backend.settled(Tag(1))),
            Err(error) => println!("@ {} | {error}", error.reason()),
        }
    }
}

/// Opens a copy of the plugin from each folder at the same time. The first one then sends a notification to the second.
fn open_at_once(plugin: &str, config: &str, folders: &[&str]) {
    const BYTES: usize = 1 << 16;
    let both = Barrier::new(folders.len());
    let open = |folder: &Path| {
        both.wait();
        Worker::open(folder, plugin, &folder.file_name().unwrap().to_string_lossy(), BYTES, config)
    };
    let workers: Vec<Worker> = std::thread::scope(|scope| {
        let opening: Vec<_> = folders.iter().map(|folder| scope.spawn(|| open(Path::new(folder)))).collect();
        opening.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    // Both copies can be used afterwards.
    let [sender, receiver] = &workers[..] else { panic!("two copies") };
    let peer = sender.backend.connect("receiver", &receiver.backend.endpoint().unwrap()).unwrap();
    assert_eq!(sender.backend.submit(&submission(peer, 1, b"n"), &[]), 0);
    assert_eq!(sender.completion().status, 0);
    println!("@ both work");
}
