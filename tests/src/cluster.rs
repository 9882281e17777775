//! A running `host`: the real program, its real processes, on this machine's loopback.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::cuda;
use crate::lines::Lines;
pub use crate::wait::PATIENCE;
use crate::wait::{try_until, until};

/// A `host` that this test started. It ends when this is dropped.
pub struct Cluster {
    child: Child,
    /// `http://127.0.0.1:…`, or `https://` with a certificate, which this client does not speak.
    pub url: String,
    /// Its first line: where it serves, and where workers register.
    pub greeting: String,
    log: PathBuf,
    _directory: tempfile::TempDir,
}

/// How to start a `host`.
pub struct Start<'a> {
    /// The program.
    pub program: &'a Path,
    /// Its flags, without `--port`.
    pub flags: Vec<String>,
    /// Contents of its configuration file.
    pub config: String,
    /// Number of workers that must be live before it counts as started.
    pub workers: usize,
}

/// A worker, as `/health` describes it.
#[derive(Clone, Debug)]
pub struct Worker {
    /// Its name.
    pub name: String,
    /// Its role.
    pub role: String,
    /// Its control address.
    pub address: String,
    /// Where it answers `/metrics` and `/health`.
    pub metrics: String,
    /// Identifies its process.
    pub instance: String,
}

/// The fields of an answer to `/generate` that tests need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Token ids.
    pub tokens: Vec<u64>,
    /// Bytes of KV that came through a plugin.
    pub transferred_bytes: u64,
}

impl Cluster {
    /// Starts it and waits until it serves. Prefix caches that neither flags nor configuration name are off, and the pool is
    /// small where no size is given: a test names what it is about, and many servers run side by side. No dummy request warms
    /// workers up.
    ///
    /// # Panics
    /// When it does not come up, with its log.
    #[must_use]
    pub fn start(start: &Start<'_>) -> Self {
        Self::start_with(start, &[])
    }

    /// As [`start`](Self::start), with these variables.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    #[must_use]
    pub fn start_with(start: &Start<'_>, environment: &[(&str, &Path)]) -> Self {
        let names = |key: &str| {
            let is_flag = |flag: &String| flag.trim_start_matches("--").trim_start_matches("no-") == key;
            start.flags.iter().any(is_flag) || start.config.contains(key)
        };
        let mut flags = start.flags.clone();
        for cache in ["prefill-radix-cache", "decode-radix-cache"] {
            if !names(cache) {
                flags.push(format!("--no-{cache}"));
            }
        }
        if !names("kv-memory") && !names("pool-pages") {
            flags.extend(["--kv-memory".to_owned(), "256MiB".to_owned()]);
        }
        // A dummy request would be counted among those that tests count.
        flags.push("--no-warm-up".to_owned());
        let config = start.config.clone();
        let start = Start { program: start.program, flags, config, workers: start.workers };
        Self::start_as_given(&start, environment)
    }

    /// Starts it with only these flags, as an operator does, and with these variables. Waits until it serves. With
    /// `--executor cuda` it has the [stand-in](crate::cuda::stand_in) for a GPU.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    #[must_use]
    pub fn start_as_given(start: &Start<'_>, environment: &[(&str, &Path)]) -> Self {
        let directory = tempfile::tempdir().expect("a directory for the log");
        let log = directory.path().join("log");
        let config = directory.path().join("host.toml");
        std::fs::write(&config, &start.config).expect("the configuration is written");
        let on_gpu = start.flags.windows(2).any(|flags| flags == ["--executor", "cuda"]);
        let gpu = on_gpu.then(cuda::environment).into_iter().flatten();
        let mut child = Command::new(start.program)
            .args(&start.flags)
            .args(["--port", "0", "--log-format", "json", "--config"])
            .arg(&config)
            .envs(gpu)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).expect("the log is created"))
            .spawn()
            .expect("the program starts");
        let stdout = Lines::of(child.stdout.take().expect("a piped stdout"));
        let address = |line: &str| line.starts_with("host: serving").then(|| line.to_owned());
        let line = stdout.find("the address that it serves", address).unwrap_or_else(|missing| {
            let _gone = child.kill().and_then(|()| child.wait()).is_err();
            panic!("{missing}\nlog:\n{}", std::fs::read_to_string(&log).unwrap_or_default())
        });
        let url = line.split([' ', ',']).find(|word| word.starts_with("http"));
        let url = url.expect("an address in the first line").to_owned();
        let cluster = Self { child, url, greeting: line, log, _directory: directory };
        cluster.wait("all workers to be there", || {
            start.workers == 0
                || cluster.health().is_some_and(|health| {
                    let live = |worker: &&Value| worker["state"] == "live";
                    health["status"] == "ok"
                        && health["workers"]
                            .as_array()
                            .map_or(0, |workers| workers.iter().filter(live).count())
                            >= start.workers
                })
        });
        cluster
    }

    /// Waits until `happened` is true.
    ///
    /// # Panics
    /// When it does not become true in time, with the workers' health and metrics, and the log.
    pub fn wait(&self, what: &str, mut happened: impl FnMut() -> bool) {
        until(what, || if happened() { Ok(()) } else { Err(Seen(self)) });
    }

    /// Waits until a worker that was killed was started again.
    pub fn wait_for_another(&self, before: &Worker) {
        let is_another = |worker: &Worker| worker.role == before.role && worker.instance != before.instance;
        self.wait(&format!("another {} worker", before.role), || {
            let workers = self.workers();
            workers.iter().any(is_another) && workers.iter().all(|worker| worker.instance != before.instance)
        });
    }

    /// Its log so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The log's lines as JSON.
    #[must_use]
    pub fn log_lines(&self) -> Vec<Value> {
        self.log().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// `/health`, if it answers.
    #[must_use]
    pub fn health(&self) -> Option<Value> {
        let (_, body) = self.get("/health").ok()?;
        serde_json::from_str(&body).ok()
    }

    /// Live workers.
    #[must_use]
    pub fn workers(&self) -> Vec<Worker> {
        self.listed().into_iter().filter_map(|(worker, is_live)| is_live.then_some(worker)).collect()
    }

    /// The workers that the router knows, and whether each is live. A worker that was silent for a moment becomes live again.
    fn listed(&self) -> Vec<(Worker, bool)> {
        let health = self.health().unwrap_or_default();
        let workers = health["workers"].as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        workers
            .iter()
            .map(|worker| {
                let described = Worker {
                    name: text(&worker["name"]),
                    role: text(&worker["role"]),
                    address: text(&worker["address"]),
                    metrics: text(&worker["metrics"]),
                    instance: text(&worker["instance"]),
                };
                (described, worker["state"] == "live")
            })
            .collect()
    }

    /// Waits for a live worker of a role. A worker that was silent for a moment becomes live again.
    ///
    /// # Panics
    /// When there is none after the time that all tests wait.
    #[must_use]
    pub fn worker(&self, role: &str) -> Worker {
        let mut found = None;
        self.wait(&format!("a live {role} worker"), || {
            found = self.workers().into_iter().find(|worker| worker.role == role);
            found.is_some()
        });
        found.expect("it was found")
    }

    /// A worker's metrics without labels other than `state`, by name or by name and state.
    #[must_use]
    pub fn metrics(&self, worker: &Worker) -> BTreeMap<String, f64> {
        let Ok((_, text)) = fetch(&agent(), &format!("{}/metrics", worker.metrics)) else {
            return BTreeMap::new();
        };
        text.lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| {
                let (name, value) = line.rsplit_once(' ')?;
                Some((name.to_owned(), value.parse().ok()?))
            })
            .collect()
    }

    /// The metrics of the role's worker, once it has counted so many requests as finished and nothing is under way. A worker
    /// counts a request a moment after its answer.
    #[must_use]
    pub fn settled(&self, role: &str, finished: f64) -> BTreeMap<String, f64> {
        let worker = self.worker(role);
        self.wait("all requests to be counted", || {
            let counted = || self.metrics(&worker).get("host_requests_finished_total").copied();
            self.all_free() && counted() >= Some(finished)
        });
        self.metrics(&worker)
    }

    /// Whether all pages of all workers that run are free, and no work is under way.
    #[must_use]
    pub fn all_free(&self) -> bool {
        let workers = self.listed();
        let rest = |(worker, is_live): &(Worker, bool)| {
            let metrics = self.metrics(worker);
            // A worker that has ended has no metrics.
            is_at_rest(&metrics) || (!is_live && metrics.is_empty())
        };
        workers.iter().any(|(_, is_live)| *is_live) && workers.iter().all(rest)
    }

    /// The process id of the role's child, as the supervisor logged it last.
    #[must_use]
    pub fn pid(&self, role: &str) -> Option<u32> {
        let started = self
            .log_lines()
            .into_iter()
            .rfind(|line| line["fields"]["message"] == "started" && line["fields"]["role"] == role)?;
        started["fields"]["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok())
    }

    /// The supervisor's process id.
    #[must_use]
    pub fn supervisor(&self) -> u32 {
        self.child.id()
    }

    /// Sends a GET, and returns status and body.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn get(&self, path: &str) -> Result<(u16, String), String> {
        fetch(&agent(), &format!("{}{path}", self.url))
    }

    /// Sends a POST, and returns status and body.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn post(&self, path: &str, body: &str) -> Result<(u16, String), String> {
        let answer = agent()
            .post(format!("{}{path}", self.url))
            .header("content-type", "application/json")
            .send(body)
            .map_err(|error| error.to_string())?;
        read(answer)
    }

    /// Sends a request with an API key: a POST of `body`, or a GET without one. Returns status and body.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn ask_with_key(&self, key: &str, path: &str, body: Option<&str>) -> Result<(u16, String), String> {
        let (url, bearer) = (format!("{}{path}", self.url), format!("Bearer {key}"));
        let answer = match body {
            None => agent().get(url).header("authorization", bearer).call(),
            Some(body) => agent().post(url).header("authorization", bearer).send(body),
        };
        read(answer.map_err(|error| error.to_string())?)
    }

    /// Generates greedily from token ids.
    ///
    /// # Errors
    /// With status and body when the answer is not 200.
    pub fn generate(&self, prompt: &[u32], count: u32) -> Result<Answer, String> {
        let body = json!({
            "input_ids": prompt,
            "sampling_params": { "max_new_tokens": count, "temperature": 0, "ignore_eos": true },
        });
        let (status, text) = self.post("/generate", &body.to_string())?;
        if status != 200 {
            return Err(format!("{status} {text}"));
        }
        let answer: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let tokens = answer["output_ids"].as_array().ok_or("no output_ids")?;
        Ok(Answer {
            tokens: tokens.iter().filter_map(Value::as_u64).collect(),
            transferred_bytes: answer["meta_info"]["transferred_bytes"].as_u64().unwrap_or(0),
        })
    }

    /// Asks it to end as Ctrl-C does, and waits. Returns the exit code.
    ///
    /// # Panics
    /// When it does not end.
    pub fn interrupt(&mut self) -> Option<i32> {
        signal(self.child.id(), "INT");
        let pid = self.child.id();
        let log = self.log.clone();
        let status = until("the program to end", || match self.child.try_wait() {
            Ok(Some(status)) => Ok(status),
            _ => Err(format!(
                "process {pid} runs; log:\n{}",
                std::fs::read_to_string(&log).unwrap_or_default()
            )),
        });
        status.code()
    }
}

/// The state of a running `host`, read when it is printed.
struct Seen<'a>(&'a Cluster);

impl std::fmt::Display for Seen<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "\nhealth: {}", self.0.health().unwrap_or_default())?;
        for worker in self.0.workers() {
            writeln!(f, "metrics of {} that are not 0:", worker.name)?;
            let metrics = self.0.metrics(&worker);
            let told = metrics.iter().filter(|(name, value)| **value != 0.0 && !name.contains("_bucket{"));
            for (name, value) in told {
                writeln!(f, "  {name} {value}")?;
            }
        }
        writeln!(f, "log:\n{}", self.0.log())
    }
}

/// Sends a signal to a process that a test started.
///
/// # Panics
/// When `kill` cannot be run.
pub fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status();
    assert!(status.expect("kill runs").success(), "kill -{name} {pid} failed");
}

/// Whether a process runs (a zombie does not).
#[must_use]
pub fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next()).is_some_and(|state| state != "Z")
}

/// An HTTP client with a deadline.
#[must_use]
pub fn agent() -> ureq::Agent {
    ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false).build().into()
}

fn fetch(agent: &ureq::Agent, url: &str) -> Result<(u16, String), String> {
    read(agent.get(url).call().map_err(|error| error.to_string())?)
}

fn read(mut answer: ureq::http::Response<ureq::Body>) -> Result<(u16, String), String> {
    let text = answer.body_mut().read_to_string().map_err(|error| error.to_string())?;
    Ok((answer.status().as_u16(), text))
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            signal(self.child.id(), "TERM");
            let ended = try_until(|| match self.child.try_wait() {
                Ok(None) => Err(()),
                _ => Ok(()),
            });
            // Its children end with their standard input.
            if ended.is_err() {
                self.child.kill().expect("the child can be killed");
                self.child.wait().expect("the child can be waited for");
                assert!(std::thread::panicking(), "it did not end after the signal; log:\n{}", self.log());
            }
        }
        if std::thread::panicking() {
            eprintln!("log of {}:\n{}", self.url, self.log());
        }
    }
}

/// Whether a worker's metrics say that all of its pages are free, and nothing is under way.
fn is_at_rest(metrics: &BTreeMap<String, f64>) -> bool {
    let zero = |name: &str| metrics.get(name) == Some(&0.0);
    zero("host_kv_pages{state=\"held\"}")
        && zero("host_kv_pages{state=\"quarantined\"}")
        && zero("host_requests_queued")
        && zero("host_requests_active")
        && zero("host_rooms_quarantined")
        && zero("host_messages_unanswered")
}
