//! The processes of the cluster. Each is started again after it has ended.

mod held;
mod part;
mod plan;

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use host_tests::cluster::agent;
use host_tests::wait::until;
use serde_json::Value;

use crate::Options;
use crate::disk::Disk;
use crate::footprint::{Footprint, Trend};
use crate::load::Address;
use crate::memory;
use crate::network::Network;
use crate::sandbox::is_inside;

pub use part::{Part, Role, State, Ways};

/// Time between two looks at the processes.
const LOOK: Duration = Duration::from_millis(20);

/// Longest time of a call that empties caches.
const FLUSH: Duration = Duration::from_secs(5);

const SIGABRT: i32 = 6;

pub struct Cast {
    host: PathBuf,
    parts: Vec<Part>,
    routers: Vec<Address>,
    pub disk: Disk,
    network: Option<Network>,
    /// Whether the transfer plugin can be told to hang and to mix up what it sends.
    pub switched: bool,
    /// Whether clocks can be stepped: libfaketime is installed, and this run is in its sandbox.
    pub clocks: bool,
    unasked: Vec<String>,
    /// Processes that ended because they were made to hang or to panic, or got no memory.
    ended: BTreeMap<&'static str, u32>,
    trend: Trend,
    folder: Option<tempfile::TempDir>,
    _plugins: tempfile::TempDir,
}

impl Cast {
    /// Two routers, two prefill and three decode workers.
    ///
    /// Links are made in namespaces of this run alone, never in the machine's own.
    pub fn start(options: &Options, executor: &[String]) -> Self {
        let folder = tempfile::tempdir().expect("a folder for logs and pages");
        let mut network = match options.network && is_inside() {
            true => Network::make().map_err(|why| println!("no network of its own: {why}")).ok(),
            false => None,
        };
        let disk = Disk::make(folder.path());
        let setting = plan::Setting::of(options, executor, folder.path(), &disk, network.is_some());
        let (mut parts, mut routers) = (Vec::new(), Vec::new());
        for (plan, url) in setting.plans(network.as_mut()) {
            let killed = Arc::default();
            if let Some(url) = url {
                routers.push(Address { url, killed: Arc::clone(&killed) });
            }
            parts.push(Part::start(&options.host, plan, folder.path(), killed));
        }
        Self {
            host: options.host.clone(),
            parts,
            routers,
            disk,
            network,
            switched: setting.transfer == "corrupting",
            clocks: setting.clock.is_some(),
            unasked: Vec::new(),
            ended: BTreeMap::new(),
            trend: Trend::new(),
            folder: Some(folder),
            _plugins: setting.plugins,
        }
    }

    pub fn routers(&self) -> &[Address] {
        &self.routers
    }

    /// Whether links can be cut, and whether they can lose packets.
    pub fn links(&self) -> (bool, bool) {
        (self.network.is_some(), self.network.as_ref().is_some_and(Network::drops))
    }

    /// Processes that ended although nothing was done to them.
    pub fn unasked(&self) -> &Vec<String> {
        &self.unasked
    }

    /// Processes that ended because they were made to hang or to panic, or got no memory.
    pub fn ended(&self) -> &BTreeMap<&'static str, u32> {
        &self.ended
    }

    /// Ends faults whose time is over, and starts ended processes again.
    fn look(&mut self) {
        self.disk.look();
        for part in &mut self.parts {
            part.look();
            let Ok(Some(status)) = part.child.try_wait() else { continue };
            // The kernel may kill a process shortly before its memory bound is lifted. The end is then seen in another state.
            let kills = memory::kills(&part.name);
            let is_starved = std::mem::replace(&mut part.memory_kills, kills) < kills;
            let why = match part.state {
                State::Hangs | State::MayHang => Some("did not return from a call"),
                State::Panics | State::MayHavePanicked => Some("had a plugin that panicked"),
                State::Starves => Some("got no more memory"),
                _ if is_starved => Some("got no more memory"),
                // A library of a plugin may abort later because it could not start a thread.
                _ if part.was_starved && status.signal() == Some(SIGABRT) => {
                    Some("had got no more memory before")
                }
                _ => None,
            };
            if let Some(why) = why {
                *self.ended.entry(why).or_default() += 1;
            } else if !part.may_end() {
                let log = std::fs::read_to_string(&part.log).unwrap_or_default();
                let last = log.lines().last().unwrap_or_default().to_owned();
                self.unasked.push(format!("{} in {:?} with {status}: {last}", part.name, part.state));
                assert!(self.unasked.len() < 20, "processes end by themselves: {:#?}", self.unasked);
            }
            part.again(&self.host);
        }
        if self.trend.is_due() {
            for part in self.parts.iter().filter(|part| part.stays) {
                self.trend.sample(&part.name, part.pid());
            }
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

    /// Picks a process of a role that runs without a fault. None when fewer than two of them run. A process that stays is not
    /// picked for a fault that ends it.
    pub fn victim(&mut self, role: Role, ends: bool, random: &mut fastrand::Rng) -> Option<&mut Part> {
        let runs = |part: &Part| part.role == role && part.state == State::Runs;
        if self.parts.iter().filter(|part| runs(part)).count() < 2 {
            return None;
        }
        let able = |part: &&mut Part| runs(part) && !(ends && part.stays);
        let mut able: Vec<&mut Part> = self.parts.iter_mut().filter(able).collect();
        if able.is_empty() {
            return None;
        }
        let at = random.usize(0..able.len());
        Some(able.swap_remove(at))
    }

    /// Parts a worker that runs without a fault from a router, or from a worker of the other role. Clients still reach the router.
    pub fn part(&mut self, ways: Ways, time: Duration, random: &mut fastrand::Rng) -> bool {
        let (role, other) =
            if random.bool() { (Role::Prefill, Role::Decode) } else { (Role::Decode, Role::Prefill) };
        let other = if random.bool() { Role::Router } else { other };
        let others = self.parts.iter().filter(|part| part.role == other);
        // A process that is parted already could be parted from the same one.
        let free = others.filter(|part| part.state != State::Parted);
        let nodes: Vec<_> = free.filter_map(|part| part.node.clone()).collect();
        let Some(node) = random.choice(nodes) else { return false };
        self.victim(role, false, random).is_some_and(|part| part.part(node, ways, time))
    }

    /// Steps the clock of one process that runs under libfaketime.
    pub fn step_a_clock(&mut self, seconds: i64, random: &mut fastrand::Rng) -> bool {
        let able: Vec<&Part> = self.parts.iter().filter(|part| part.switches.clock.is_some()).collect();
        random.choice(able).is_some_and(|part| part.step_clock(seconds))
    }

    /// Asks one router to empty all radix caches. Workers that are down at that time miss it.
    pub fn flush(&mut self, random: &mut fastrand::Rng) -> bool {
        let routers = self.parts.iter().filter(|part| part.role == Role::Router).zip(&self.routers);
        // A frozen router does not answer, and only this thread can let it continue.
        let able: Vec<_> = routers.filter(|(part, _)| part.state == State::Runs).collect();
        let Some((part, router)) = random.choice(able) else { return false };
        let Some(node) = &part.node else {
            let request = agent().post(format!("{}/flush_cache", router.url));
            return request.config().timeout_global(Some(FLUSH)).build().send_empty().is_ok();
        };
        // The router takes this call only from its own machine, so the command runs inside its node.
        let port = router.url.rsplit(':').next().unwrap_or_default();
        let ask = "POST /flush_cache HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\nContent-Length: 0\\r\\n\\r\\n";
        let talk =
            format!("exec 3<>/dev/tcp/127.0.0.1/{port}; printf '{ask}' >&3; head -1 <&3 | grep -q 200");
        let mut command = node.command(Path::new("timeout"));
        command.args(["10", "bash", "-c", &talk]).stderr(std::process::Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }

    /// Ends all faults.
    pub fn heal(&mut self) {
        self.disk.heal();
        for part in &mut self.parts {
            part.end_early();
        }
        self.look();
    }

    fn health(url: &str) -> Value {
        let text = held::get(&format!("{url}/health"));
        text.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default()
    }

    /// Waits until every router sees every worker live.
    pub fn wait_until_ready(&mut self) {
        let workers = self.parts.iter().filter(|part| part.role != Role::Router).count();
        let routers = self.routers.clone();
        until("all workers to be live", || {
            self.look();
            for router in &routers {
                let health = Self::health(&router.url);
                let all = health["workers"].as_array().cloned().unwrap_or_default();
                let live = all.iter().filter(|worker| worker["state"] == "live").count();
                if live != workers {
                    return Err(health);
                }
            }
            Ok(())
        });
        // Waits until processes that may hang or may have panicked have ended, or have outlived the time for it.
        until("nothing to be done to any process", || {
            self.look();
            match self.parts.iter().find(|part| part.state != State::Runs) {
                None => Ok(()),
                Some(part) => Err(format!("{} is {:?}", part.name, part.state)),
            }
        });
    }

    /// Resumed answers, as counted by the routers that run now.
    pub fn resumed(&self) -> u64 {
        let of = |router: &Address| {
            let text = held::get(&format!("{}/metrics", router.url))?;
            let line = text.lines().find(|line| line.starts_with("host_resumed_total "))?;
            line.rsplit(' ').next()?.parse::<u64>().ok()
        };
        self.routers.iter().filter_map(of).sum()
    }

    pub fn footprints(&self) -> BTreeMap<String, Footprint> {
        self.parts.iter().map(|part| (part.name.clone(), Footprint::of(part.pid()))).collect()
    }

    /// Finds leaks: what workers and routers hold although no request runs, and processes that have grown.
    pub fn leaks(&mut self, before: &BTreeMap<String, Footprint>) -> Vec<String> {
        let routers = self.routers.clone();
        let idle = host_tests::wait::try_until(|| {
            let mut busy = Vec::new();
            for router in &routers {
                // A router may list a dead worker until it hears of the successor.
                let workers = Self::health(&router.url)["workers"].as_array().cloned().unwrap_or_default();
                if workers.is_empty() {
                    busy.push(format!("{} knows no worker", router.url));
                }
                let addresses = workers.iter().filter_map(|worker| worker["metrics"].as_str());
                busy.extend(addresses.flat_map(held::of_worker));
                busy.extend(held::of_router(&router.url));
            }
            if busy.is_empty() { Ok(()) } else { Err(busy) }
        });
        let mut leaks = idle.err().unwrap_or_default();
        println!("\nprocesses that nothing ended, with all requests answered:");
        let growth = self.trend.growth();
        for part in &self.parts {
            let (mut now, before) = (Footprint::default(), before[&part.name]);
            // Threads without work end after ten seconds.
            let rests = host_tests::wait::try_until(|| {
                now = Footprint::of(part.pid());
                if now.outgrew(&before) { Err(now.to_string()) } else { Ok(()) }
            });
            if let Some((bytes, seconds)) = growth.get(part.name.as_str()) {
                println!("  {}: {before} before", part.name);
                println!("  {}: {now} after; {:+.2} MiB in {seconds:.0} s", part.name, bytes / 1_048_576.0);
            }
            if let Err(now) = rests {
                leaks.push(format!("{} went from {before} to {now}", part.name));
            }
        }
        leaks.extend(self.trend.leaks());
        leaks
    }

    /// Keeps the folder with the logs, and returns its path.
    pub fn keep_logs(&mut self) -> PathBuf {
        self.folder.take().map(tempfile::TempDir::keep).unwrap_or_default()
    }
}

impl Drop for Cast {
    fn drop(&mut self) {
        for part in &mut self.parts {
            // SIGKILL also ends a frozen process.
            let _ended = part.child.kill();
            let _status = part.child.wait();
        }
    }
}
