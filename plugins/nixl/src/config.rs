//! The plugin's table of the host's configuration.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use host_plugin_api::{Error, ErrorCode, Result};
use serde::Deserialize;

/// See `plugin.toml` for what each key means.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    pub library: Option<PathBuf>,
    pub backend: String,
    pub transports: String,
    pub devices: String,
    pub parameters: BTreeMap<String, String>,
    pub progress_threads: Threads,
    pub max_writes: u32,
    pub max_submissions: u32,
    pub short_writes: u64,
    pub connect_timeout_ms: u64,
    pub fence_timeout_ms: u64,
    /// A key of the tier. It is here and not in the tier's table, because `host tier` sets a key of this name.
    pub read_only: bool,
    pub storage: Storage,
}

/// The incoming connections of an instance whose progress a thread of NIXL's drives. The driver drives the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Threads {
    None,
    /// The second connection and those after it, up to [`MOST_FURTHER`]: one thread alone reads no faster than one sender writes.
    Further,
    All,
}

/// Most threads of [`Threads::Further`]. Each wakes up now and then, so that a hundred would be felt.
const MOST_FURTHER: usize = 3;

impl Threads {
    /// Whether the next connection has a thread, when `open` connections are open and `with_thread` of them have one.
    pub fn next_has_one(self, open: usize, with_thread: usize) -> bool {
        match self {
            Self::None => false,
            Self::Further => open > with_thread && with_thread < MOST_FURTHER,
            Self::All => true,
        }
    }
}

/// Default of `free_floor_mib`.
const FREE_FLOOR_MIB: u64 = 1024;

/// The tier's table.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Storage {
    /// Required by the role, for files.
    pub directory: Option<PathBuf>,
    pub backend: String,
    pub parameters: BTreeMap<String, String>,
    pub direct: bool,
    /// For files.
    pub free_floor_mib: Option<u64>,
    /// For objects, as the next key.
    pub prefix: Option<String>,
    pub deadline_ms: Option<u64>,
}

/// Leaves out the parameters' values, some of which are secret.
impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { directory, backend, parameters, .. } = self;
        let keys: Vec<_> = parameters.keys().collect();
        let mut shown = f.debug_struct("Storage");
        shown.field("directory", directory).field("backend", backend).field("parameters", &keys);
        shown.finish_non_exhaustive()
    }
}

impl Default for Storage {
    fn default() -> Self {
        Self {
            directory: None,
            backend: "POSIX".into(),
            parameters: BTreeMap::new(),
            direct: false,
            free_floor_mib: None,
            prefix: None,
            deadline_ms: None,
        }
    }
}

impl Storage {
    /// Whether pages are objects in a bucket, not files.
    pub fn keeps_objects(&self) -> bool {
        self.backend == "OBJ"
    }

    /// Bytes of the file system that stay free.
    pub fn free_floor(&self) -> u64 {
        self.free_floor_mib.unwrap_or(FREE_FLOOR_MIB) << 20
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            library: None,
            backend: "UCX".into(),
            transports: "^sm".into(),
            devices: "lo".into(),
            parameters: BTreeMap::new(),
            progress_threads: Threads::None,
            max_writes: 1024,
            max_submissions: 256,
            // Over UCX and TCP writes of 16 KiB reach 1.1 GB/s and of 64 KiB 1.9. Collected into longer writes they
            // reach 2.9 and 2.3 at best.
            short_writes: 64 << 10,
            connect_timeout_ms: 5000,
            fence_timeout_ms: 5000,
            read_only: false,
            storage: Storage::default(),
        }
    }
}

/// UCX's names for transports in which the sending process writes the receiver's memory itself.
const PAST_THE_RECEIVER: [&str; 6] = ["all", "sm", "shm", "cma", "knem", "xpmem"];

/// Parameters of NIXL's plugins that must not appear in a log.
const SECRETS: [&str; 3] = ["secret_key", "session_token", "access_key"];

impl Config {
    pub fn parse(text: &str) -> Result<Self> {
        let config: Self = toml::from_str(text).map_err(|e| wrong(unreadable(&e)))?;
        let within = |key: &str, value: u64, most: u64| match value {
            0 => Err(wrong(format!("{key} is 0, it must be 1 to {most}"))),
            v if v > most => Err(wrong(format!("{key} is {v}, it must be 1 to {most}"))),
            _ => Ok(()),
        };
        within("max_writes", config.max_writes.into(), 65_536)?;
        within("max_submissions", config.max_submissions.into(), 4096)?;
        within("short_writes", config.short_writes, 1 << 30)?;
        within("connect_timeout_ms", config.connect_timeout_ms, 600_000)?;
        within("fence_timeout_ms", config.fence_timeout_ms, 600_000)?;
        let name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        for (backend, such) in [(&config.backend, "UCX"), (&config.storage.backend, "POSIX")] {
            if backend.is_empty() || !backend.chars().all(name) {
                return Err(wrong(format!("backend {backend:?} is not a name such as {such}")));
            }
        }
        if !["POSIX", "OBJ"].contains(&config.storage.backend.as_str()) {
            let text = format!(
                "storage.backend is {:?}: pages are files, which POSIX moves, or objects in a bucket, which OBJ moves; no \
                 other was tried",
                config.storage.backend
            );
            return Err(wrong(text));
        }
        let of_objects = [
            ("prefix", config.storage.prefix.is_some()),
            ("deadline_ms", config.storage.deadline_ms.is_some()),
        ];
        if let Some((key, _)) =
            of_objects.into_iter().find(|(_, set)| *set && !config.storage.keeps_objects())
        {
            return Err(wrong(format!(
                "storage.{key} is for objects: set backend = \"OBJ\", too, or leave it out"
            )));
        }
        if config.storage.free_floor_mib.is_some_and(|floor| floor > 1 << 30) {
            return Err(wrong("storage.free_floor_mib must be 0 to 1073741824".into()));
        }
        if config.storage.free_floor_mib.is_some() && config.storage.keeps_objects() {
            return Err(wrong(
                "storage.free_floor_mib is for files: leave it out with backend = \"OBJ\"".into(),
            ));
        }
        // With NIXL's default, Linux AIO, ending an agent waits for work that the kernel still does.
        let on = |key: &&str| {
            let value = config.storage.parameters.get(*key).map_or("false", String::as_str);
            !["false", "0"].contains(&value)
        };
        if let Some(key) = ["use_uring", "use_posix_aio"].into_iter().find(on) {
            let text = format!(
                "storage.parameters sets {key}: NIXL then ends without waiting for what it has started, so that a read \
                 that failed may write to memory later; leave it out, NIXL takes Linux AIO"
            );
            return Err(wrong(text));
        }
        let values = [&config.transports, &config.devices];
        if config.parameters.values().chain(values).any(|value| value.contains('\0')) {
            return Err(wrong("a value contains a zero byte".into()));
        }
        // NIXL splits its list of settings at commas, so it would also split a list here.
        if config.transports.contains([',', '=']) {
            let text = format!(
                "transports {:?} is not one name: give a list in UCX_TLS, in the environment",
                config.transports
            );
            return Err(wrong(text));
        }
        Ok(config)
    }

    /// Parameters of the backend. `environment` is the value of `UCX_TLS`, which wins over the configuration.
    pub fn backend_parameters(&self, environment: Option<&str>) -> Result<BTreeMap<String, String>> {
        let mut all = self.parameters.clone();
        if self.backend != "UCX" {
            return Ok(all);
        }
        for key in ["engine_config", "device_list"] {
            if all.contains_key(key) {
                let text = format!("[parameters] {key} is made from transports and devices, set those");
                return Err(wrong(text));
            }
        }
        let transports = environment.unwrap_or(&self.transports);
        if let Some(name) = past_the_receiver(transports) {
            let from = if environment.is_some() { "UCX_TLS in the environment" } else { "transports" };
            let text = format!(
                "{from} is {transports:?}, which allows {name}: over it peers write past this process, and no fence \
                 could be proven; use ^sm or name others, for example tcp or rc"
            );
            return Err(wrong(text));
        }
        let mut engine = format!("TLS={}", self.transports);
        match self.devices.as_str() {
            "all" => {}
            list if list.contains(',') => {
                all.insert("device_list".into(), list.into());
            }
            one => engine.push_str(&format!(",NET_DEVICES={one}")),
        }
        all.insert("engine_config".into(), engine);
        Ok(all)
    }

    /// Whether memory of devices may be registered. `environment` is the value of `UCX_TLS`.
    ///
    /// # Errors
    /// When a peer could write such memory past this process.
    pub fn allows_devices(&self, environment: Option<&str>) -> Result<()> {
        let transports = environment.unwrap_or(&self.transports);
        if self.backend != "UCX" || !takes_cuda_ipc(transports) {
            return Ok(());
        }
        let text = format!(
            "the transports {transports:?} allow cuda_ipc, over which peers write past this process, and no fence could \
             be proven: set UCX_TLS=^sm,cuda_ipc in the environment"
        );
        Err(Error::new(ErrorCode::UNSUPPORTED, text))
    }

    /// Whether the end of a request proves that all requests before it on the connection are done. UCX flushes the
    /// connection before NIXL reports the end, unless several of its workers share the work.
    pub fn finishes_in_order(&self) -> bool {
        let alone = |key| self.parameters.get(key).is_none_or(|many| matches!(many.as_str(), "0" | "1"));
        self.backend == "UCX" && alone("num_workers") && alone("num_threads")
    }

    pub fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms)
    }

    pub fn fence_timeout(&self) -> Duration {
        Duration::from_millis(self.fence_timeout_ms)
    }
}

/// The error for a text that cannot be read. The text is shown unless it has secrets.
fn unreadable(error: &toml::de::Error) -> String {
    let shown = error.to_string();
    match SECRETS.iter().find(|key| shown.contains(*key)) {
        None => shown.trim_end().to_owned(),
        Some(key) => format!(
            "a line with {key} cannot be read, and is not shown: parameters are strings, each is given once"
        ),
    }
}

fn wrong(message: String) -> Error {
    Error::new(ErrorCode::CONFIG, message)
}

/// The first transport in a list of UCX's that closing an inbound endpoint does not stop.
fn past_the_receiver(list: &str) -> Option<&'static str> {
    let (excluded, list) = match list.strip_prefix('^') {
        Some(rest) => (true, rest),
        None => (false, list),
    };
    let named: Vec<&str> = list.split(',').map(str::trim).collect();
    if !excluded {
        return PAST_THE_RECEIVER.into_iter().find(|name| named.contains(name));
    }
    if named.contains(&"sm") || named.contains(&"shm") {
        return None;
    }
    ["cma", "knem", "xpmem"].into_iter().find(|name| !named.contains(name))
}

/// Whether a list of UCX's allows the transport with which a process writes into another's device memory.
fn takes_cuda_ipc(list: &str) -> bool {
    let (excluded, list) = match list.strip_prefix('^') {
        Some(rest) => (true, rest),
        None => (false, list),
    };
    let named = list.split(',').any(|name| ["cuda_ipc", "cuda", "all"].contains(&name.trim()));
    named != excluded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transports_that_no_closed_endpoint_stops_are_refused_wherever_they_are_set() {
        let config = Config::default();
        for (list, allowed) in [
            ("^sm", true),
            ("^shm,self", true),
            ("tcp", true),
            ("rc,ud,tcp,self", true),
            ("^cma,knem,xpmem", true),
            ("all", false),
            ("tcp,cma", false),
            ("tcp,sm", false),
            ("^cma", false),
            ("^tcp", false),
        ] {
            assert_eq!(config.backend_parameters(Some(list)).is_ok(), allowed, "{list}");
            let ours = Config { transports: list.into(), ..Config::default() };
            assert_eq!(ours.backend_parameters(None).is_ok(), allowed, "{list}");
        }
    }

    #[test]
    fn a_thread_is_behind_further_connections_only_and_behind_few() {
        let next = |threads: Threads| {
            let step = move |with: usize, open: usize| with + usize::from(threads.next_has_one(open, with));
            (0..6).scan(0, move |with, open| {
                *with = step(*with, open);
                Some(*with)
            })
        };
        assert_eq!(next(Threads::None).collect::<Vec<_>>(), [0; 6]);
        assert_eq!(next(Threads::Further).collect::<Vec<_>>(), [0, 1, 2, 3, 3, 3]);
        assert_eq!(next(Threads::All).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
        // The driver drives no connection once the first one is gone, so it takes the next one.
        assert!(!Threads::Further.next_has_one(2, 2));
    }

    #[test]
    fn device_memory_is_for_transports_that_end_with_the_endpoint() {
        for (list, allowed) in [
            ("^sm", false),
            ("^sm,cuda_ipc", true),
            ("^cuda", true),
            ("tcp,cuda", false),
            ("rc,cuda_copy", true),
        ] {
            assert_eq!(Config::default().allows_devices(Some(list)).is_ok(), allowed, "{list}");
        }
    }

    #[test]
    fn devices_and_transports_become_parameters_of_the_backend() {
        let engine = |config: &Config| config.backend_parameters(None).unwrap()["engine_config"].clone();
        assert_eq!(engine(&Config::default()), "TLS=^sm,NET_DEVICES=lo");
        assert_eq!(engine(&Config { devices: "all".into(), ..Config::default() }), "TLS=^sm");
        let two = Config { devices: "mlx5_0,mlx5_1".into(), ..Config::default() };
        assert_eq!(two.backend_parameters(None).unwrap()["device_list"], "mlx5_0,mlx5_1");
    }

    #[test]
    fn nonsense_is_refused_with_the_key_in_the_message() {
        for (text, says) in [
            ("max_writes = 0", "max_writes"),
            ("fence_timeout_ms = 9999999", "fence_timeout_ms"),
            ("backend = \"../x\"", "backend"),
            ("transports = \"tcp,rc\"", "UCX_TLS"),
            ("no_such = 1", "no_such"),
            ("progress_threads = true", "progress_threads"),
            ("progress_threads = \"many\"", "further"),
            ("[storage.parameters]\nuse_uring = 'true'", "use_uring"),
            ("[storage.parameters]\nuse_posix_aio = '1'", "use_posix_aio"),
            ("[storage]\nbackend = 'GDS'", "GDS"),
            ("[storage]\nprefix = 'a'", "storage.prefix"),
            ("[storage]\ndeadline_ms = 5", "storage.deadline_ms"),
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.code == ErrorCode::CONFIG && error.message.contains(says), "{text}: {error}");
        }
        assert!(Config::parse("[storage.parameters]\nuse_uring = 'false'").is_ok());
    }

    #[test]
    fn no_secret_is_in_a_message_or_a_debug_line() {
        let secret = "[storage]\nbackend = 'OBJ'\nparameters = { bucket = 'b', secret_key = 'hush' }";
        assert!(!format!("{:?}", Config::parse(secret).unwrap()).contains("hush"));
        for line in ["secret_key = 4711", "session_token = hush", "bucket = 1, access_key = '4711hush'"] {
            let text = format!("[storage]\nparameters = {{ {line} }}");
            let error = Config::parse(&text).unwrap_err();
            assert!(!error.message.contains("hush") && !error.message.contains("4711"), "{error}");
            assert!(error.message.contains("_key") || error.message.contains("session_token"), "{error}");
        }
    }
}
