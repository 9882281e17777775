//! The flags that each process is started with.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use host_tests::mixed_load::Model;
use host_tests::{cuda, mooncake, nixl, plugin_files, ports};

use super::part::{Plan, Role, Switches};
use crate::Options;
use crate::disk::Disk;
use crate::network::{Network, Node};
use crate::sandbox::is_inside;

/// Steps take a while, so that faults strike answers in the middle.
const SYNTHETIC: &str = "[synthetic]\nstep-us = 1000\nprefill-token-us = 20\n";
const WORKER: &str = "--pool-pages 256 --hicache-memory 1MiB --chunk-tokens 64 --max-batch 16 --layer-groups 4 \
    --drain-timeout 2 --plugin-call-timeout 5 --hicache-storage faulty-tier,hicache-file";
/// The segments take less than the small disk has.
const TIER: &str = "size_limit_mib=64 segment_mib=2 free_floor_mib=0";

/// Settings that all processes share.
pub struct Setting {
    pub transfer: String,
    pub plugins: tempfile::TempDir,
    /// The library that steps clocks.
    pub clock: Option<PathBuf>,
    config: PathBuf,
    folder: PathBuf,
    tier: PathBuf,
    secret: Option<PathBuf>,
    /// Flags that name what computes the answers.
    executor: Vec<String>,
    /// Variables with which workers have a GPU.
    gpu: Vec<(&'static str, PathBuf)>,
    /// No fault ends any process.
    all_stay: bool,
}

impl Setting {
    pub fn of(options: &Options, executor: &[String], folder: &Path, disk: &Disk, network: bool) -> Self {
        let own = if network { "remote-wire" } else { "corrupting" };
        let transfer = options.transfer.clone().unwrap_or_else(|| own.to_owned());
        let between = ["remote-wire", "nixl", "mooncake"];
        let named = between.join(", ");
        assert!(
            !network || between.contains(&transfer.as_str()),
            "{transfer} carries pages within one machine: --network needs one of {named}"
        );
        let table = match transfer.as_str() {
            "nixl" => nixl::config().map(|keys| format!("[plugin.nixl]\n{keys}")),
            "mooncake" => mooncake::config().map(|keys| format!("[plugin.mooncake]\n{keys}")),
            "corrupting" => Some("[plugin.corrupting]\nflip_write = 0\n".to_owned()),
            _ => Some(String::new()),
        };
        let table = table.unwrap_or_else(|| panic!("{transfer} is not installed"));
        let config = folder.join("host.toml");
        std::fs::write(&config, format!("{SYNTHETIC}{table}")).expect("the configuration is written");
        let secret = network.then(|| {
            let file = folder.join("secret");
            let made = Command::new(&options.host).args(["certs", "secret"]).arg(&file).output();
            assert!(made.is_ok_and(|output| output.status.success()), "no secret was made");
            file
        });
        let clock = match is_inside() {
            true => library(),
            false => Err("its files would outlive this run"),
        };
        if let Err(why) = clock {
            println!("no clock is stepped: {why}");
        }
        Self {
            plugins: plugin_files::directory(&[&transfer, "faulty-tier", "hicache-file"]),
            transfer,
            clock: clock.ok(),
            config,
            folder: folder.to_owned(),
            tier: disk.tier(),
            secret,
            executor: executor.to_vec(),
            gpu: (options.model == Model::Cuda).then(cuda::environment).unwrap_or_default(),
            all_stay: options.faults == 0,
        }
    }

    /// Plans for all processes. Those of routers come with a URL.
    pub fn plans(&self, mut network: Option<&mut Network>) -> Vec<(Plan, Option<String>)> {
        let (mut plans, mut controls) = (Vec::new(), Vec::new());
        for at in 0..2 {
            let node = network.as_mut().map(|network| network.node());
            let (http, control) = match &node {
                Some(node) => ((node.address, 8000).into(), (node.address, 8001).into()),
                None => (ports::unused(), ports::unused()),
            };
            let scheme = if node.is_some() { "https" } else { "http" };
            controls.push(format!("{scheme}://{control}"));
            let mut plan = self.plan(Role::Router, at, at == 1, node);
            let listens: SocketAddr = http;
            let any = if plan.node.is_some() { "0.0.0.0" } else { "127.0.0.1" };
            plan.arguments.extend(["--host".into(), any.into(), "--port".into(), listens.port().to_string()]);
            plan.arguments.push("--insecure-api".into());
            plan.arguments.extend(["--control".into(), control.to_string()]);
            plans.push((plan, Some(format!("http://{http}"))));
        }
        for (role, count) in [(Role::Prefill, 2), (Role::Decode, 3)] {
            for at in 0..count {
                let node = network.as_mut().map(|network| network.node());
                let mut plan = self.plan(role, at, at == count - 1, node);
                self.make_worker(&mut plan, &controls.join(","));
                plans.push((plan, None));
            }
        }
        plans
    }

    fn plan(&self, role: Role, at: usize, stays: bool, node: Option<Node>) -> Plan {
        let word = match role {
            Role::Router => "router",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        };
        let name = format!("{word}-{at}");
        let mut arguments: Vec<String> =
            ["--role", word, "--log-format", "json", "--config"].map(str::to_owned).to_vec();
        arguments.push(self.config.display().to_string());
        arguments.extend(self.executor.iter().cloned());
        if let Some(secret) = &self.secret {
            arguments.extend(["--cluster-secret".into(), secret.display().to_string()]);
        }
        let file = |what: &str| self.folder.join(format!("{name}.{what}"));
        let clock = self.clock.as_ref().filter(|_| at == 0).map(|_| file("clock"));
        let mut environment: Vec<(String, String)> =
            self.gpu.iter().map(|(key, value)| ((*key).to_owned(), value.display().to_string())).collect();
        if let (Some(library), Some(file)) = (&self.clock, &clock) {
            std::fs::write(file, "+0\n").unwrap();
            for (key, value) in [
                ("LD_PRELOAD", library.display().to_string()),
                ("FAKETIME_TIMESTAMP_FILE", file.display().to_string()),
                ("FAKETIME_CACHE_DURATION", "1".into()),
                ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
            ] {
                environment.push((key.to_owned(), value));
            }
        }
        let [tier, hang, mix, panic] = ["tier", "hang", "mix", "panic"].map(file);
        let switches = Switches { tier, hang, mix, panic, clock };
        let stays = stays || self.all_stay;
        Plan { role, name, stays, arguments, environment, node, switches }
    }

    fn make_worker(&self, plan: &mut Plan, routers: &str) {
        let arguments = &mut plan.arguments;
        arguments.extend(WORKER.split_whitespace().map(str::to_owned));
        let own = match &plan.node {
            Some(node) => format!("{}:0", node.address),
            None => "127.0.0.1:0".to_owned(),
        };
        arguments.extend(["--control".into(), own.clone()]);
        let plugins = format!("{},faulty-tier,hicache-file", self.transfer);
        arguments.extend(["--plugins".into(), plugins, "--transfer".into(), self.transfer.clone()]);
        arguments.extend(["--plugins-dir".into(), self.plugins.path().display().to_string()]);
        let mut set = |key: &str, value: &str| arguments.extend(["--set".into(), format!("{key}={value}")]);
        set("hicache-file.dir", &self.tier.display().to_string());
        for pair in TIER.split_whitespace() {
            let (key, value) = pair.split_once('=').unwrap_or_default();
            set(&format!("hicache-file.{key}"), value);
        }
        set("faulty-tier.control_file", &plan.switches.tier.display().to_string());
        if self.transfer == "corrupting" {
            set("corrupting.hang_file", &plan.switches.hang.display().to_string());
            set("corrupting.mix_file", &plan.switches.mix.display().to_string());
            set("corrupting.panic_file", &plan.switches.panic.display().to_string());
        }
        if let Some(node) = &plan.node {
            let address = node.address.to_string();
            match self.transfer.as_str() {
                // UCX is told the node's link: without `devices` the plugin stays on the loopback device.
                "nixl" => set("nixl.devices", "eth0"),
                "mooncake" => set("mooncake.local_hostname", &address),
                _ => set("remote-wire.address", &address),
            }
            arguments.extend(["--metrics".into(), own]);
        }
        arguments.extend(["--router".into(), routers.to_owned(), "--name".into(), plan.name.clone()]);
    }
}

/// Debian's libfaketime.
fn library() -> Result<PathBuf, &'static str> {
    let folders = std::fs::read_dir("/usr/lib").ok().into_iter().flatten().flatten();
    let found = folders.map(|folder| folder.path().join("faketime/libfaketimeMT.so.1"));
    found
        .into_iter()
        .find(|library| library.exists())
        .ok_or("libfaketime is not installed (apt-get install faketime)")
}
