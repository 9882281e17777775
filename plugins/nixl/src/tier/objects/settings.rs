//! The tier's table when pages are objects in a bucket.

use std::ffi::CString;
use std::time::Duration;

use host_plugin_api::{Error, ErrorCode, Result};

use crate::config::Config;
use crate::library::strings;

/// Parameters that NIXL's OBJ plugin takes. The plugin ignores unknown parameters, which would hide a typing error.
const KNOWN: [&str; 14] = [
    "access_key",
    "secret_key",
    "session_token",
    "bucket",
    "endpoint_override",
    "scheme",
    "region",
    "use_virtual_addressing",
    "req_checksum",
    "resp_checksum",
    "ca_bundle",
    "crtMinLimit",
    "throughput_target_gbps",
    "num_threads",
];
/// Requests at once, each with a thread of NIXL's.
const REQUESTS: usize = 16;
const MOST_REQUESTS: usize = 256;
const DEADLINE_MS: u64 = 5000;
const PREFIX: &str = "nixl-v1";
const LONGEST_PREFIX: usize = 512;

/// The settings of a tier of objects.
pub struct Settings {
    pub parameters: Vec<(CString, CString)>,
    /// The start of all names of objects, with its slash.
    pub prefix: String,
    /// The bucket and its server, for people. No secrets.
    pub place: String,
    pub requests: usize,
    /// How long a page may wait without progress.
    pub deadline: Duration,
    pub read_only: bool,
    /// Whether the keys are known without asking the machine that this runs on.
    pub has_keys: bool,
}

fn wrong(text: String) -> Error {
    Error::new(ErrorCode::CONFIG, text)
}

fn one_of(name: &str, value: &str, allowed: &[&str]) -> Result<()> {
    if allowed.contains(&value) {
        return Ok(());
    }
    Err(wrong(format!("storage.parameters.{name} is {value:?}, it must be {}", allowed.join(" or "))))
}

/// A whole number, with its bounds.
fn number(name: &str, value: &str, most: u64) -> Result<u64> {
    let number = value.parse().ok().filter(|number| (1..=most).contains(number));
    number.ok_or_else(|| wrong(format!("storage.parameters.{name} is {value:?}, it must be 1 to {most}")))
}

impl Settings {
    /// Reads the settings. `environment` looks a variable up.
    ///
    /// # Errors
    /// `CONFIG` for an invalid setting, with the key and without secrets.
    pub fn of(config: &Config, environment: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let storage = &config.storage;
        if storage.directory.is_some() || storage.direct {
            let key = if storage.directory.is_some() { "directory" } else { "direct" };
            let text = format!(
                "storage.{key} is for files: with backend = \"OBJ\" pages are objects in the bucket that \
                 storage.parameters names, under storage.prefix; leave it out, or leave backend out"
            );
            return Err(wrong(text));
        }
        let prefix = storage.prefix.as_deref().unwrap_or(PREFIX);
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=".contains(c);
        let empty = !prefix.is_empty() && prefix.split('/').any(|part| matches!(part, "" | "." | ".."));
        if prefix.len() > LONGEST_PREFIX || !prefix.chars().all(plain) || empty {
            let text = format!(
                "storage.prefix is {prefix:?}, it must be at most {LONGEST_PREFIX} letters, digits and -_.=, in parts \
                 separated by one slash, with none at the ends"
            );
            return Err(wrong(text));
        }
        let deadline = storage.deadline_ms.unwrap_or(DEADLINE_MS);
        if !(1..=600_000).contains(&deadline) {
            return Err(wrong(format!("storage.deadline_ms is {deadline}, it must be 1 to 600000")));
        }
        let mut parameters = storage.parameters.clone();
        if let Some(key) = parameters.keys().find(|key| !KNOWN.contains(&key.as_str())) {
            let text = format!(
                "storage.parameters has {key:?}, which NIXL's OBJ plugin does not take or was not tried with; there are \
                 {}",
                KNOWN.join(", ")
            );
            return Err(wrong(text));
        }
        let given = |name: &str| parameters.get(name).map(String::as_str).filter(|value| !value.is_empty());
        for (name, allowed) in [
            ("scheme", ["http", "https"]),
            ("use_virtual_addressing", ["true", "false"]),
            ("req_checksum", ["required", "supported"]),
            ("resp_checksum", ["required", "supported"]),
        ] {
            given(name).map_or(Ok(()), |value| one_of(name, value, &allowed))?;
        }
        for (name, most) in [("crtMinLimit", 1 << 40), ("throughput_target_gbps", 10_000)] {
            given(name).map_or(Ok(()), |value| number(name, value, most).map(drop))?;
        }
        let requests = match given("num_threads") {
            None => REQUESTS,
            Some(value) => number("num_threads", value, MOST_REQUESTS as u64)? as usize,
        };
        let (access, secret) = (given("access_key").is_some(), given("secret_key").is_some());
        if access != secret || (given("session_token").is_some() && !access) {
            let text = "storage.parameters has one of access_key, secret_key and session_token without what it goes with: \
                give access_key and secret_key, or leave all out and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY";
            return Err(wrong(text.to_owned()));
        }
        let bucket = given("bucket").map(str::to_owned).or_else(|| environment("AWS_DEFAULT_BUCKET"));
        let bucket = bucket.filter(|name| !name.is_empty()).ok_or_else(|| {
            let text = "backend = \"OBJ\" needs a bucket: set bucket in [plugin.nixl.storage.parameters], or \
                AWS_DEFAULT_BUCKET in the environment";
            wrong(text.to_owned())
        })?;
        let endpoint = given("endpoint_override").map(str::to_owned);
        let endpoint = endpoint.or_else(|| environment("AWS_ENDPOINT_OVERRIDE")).filter(|at| !at.is_empty());
        // The setting may contain user:password@, which S3 does not know.
        let shown = endpoint.as_deref().map_or("AWS", |at| at.rsplit('@').next().unwrap_or(at));
        let place = format!("bucket {bucket:?} at {shown}");
        let has_keys = access || environment("AWS_ACCESS_KEY_ID").is_some();
        parameters.insert("num_threads".into(), requests.to_string());
        Ok(Self {
            parameters: strings(parameters)?,
            prefix: if prefix.is_empty() { String::new() } else { format!("{prefix}/") },
            place,
            requests,
            deadline: Duration::from_millis(deadline),
            read_only: config.read_only,
            has_keys,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(storage: &str) -> Result<Settings> {
        Settings::of(&Config::parse(&format!("[storage]\nbackend = 'OBJ'\n{storage}"))?, |_| None)
    }

    #[test]
    fn nonsense_is_refused_with_the_key_in_the_message_and_no_secret() {
        let bucket = "parameters.bucket = 'b'\n";
        for (text, says) in [
            ("", "AWS_DEFAULT_BUCKET"),
            ("directory = '/tmp'\n", "storage.directory"),
            ("direct = true\n", "storage.direct"),
            ("prefix = '/a'\n", "prefix"),
            ("prefix = 'a//b'\n", "prefix"),
            ("prefix = 'a/../b'\n", "prefix"),
            ("prefix = 'a b'\n", "prefix"),
            ("deadline_ms = 0\n", "deadline_ms"),
            ("parameters.bukcet = 'b'\n", "bukcet"),
            ("parameters.accelerated = 'true'\n", "accelerated"),
            ("parameters.scheme = 'ftp'\n", "http or https"),
            ("parameters.num_threads = '0'\n", "num_threads"),
            ("parameters.num_threads = 'many'\n", "num_threads"),
            ("parameters.crtMinLimit = '-1'\n", "crtMinLimit"),
            ("parameters.access_key = 'hush'\n", "secret_key"),
            ("parameters.secret_key = 'hush'\n", "access_key"),
            ("parameters.session_token = 'hush'\n", "access_key"),
            ("parameters.secret_key = 4711\n", "secret_key"),
        ] {
            let all = if text.is_empty() { String::new() } else { format!("{bucket}{text}") };
            let error = settings(&all).err().unwrap_or_else(|| panic!("{text} was taken"));
            assert!(error.code == ErrorCode::CONFIG && error.message.contains(says), "{text}: {error}");
            assert!(!error.message.contains("hush") && !error.message.contains("4711"), "{error}");
        }
    }

    #[test]
    fn what_is_left_out_has_a_default_and_the_environment_names_the_bucket() {
        let found = settings("parameters.bucket = 'b'\n").unwrap();
        assert_eq!((found.prefix.as_str(), found.requests), ("nixl-v1/", 16));
        assert_eq!((found.place.as_str(), found.has_keys), ("bucket \"b\" at AWS", false));
        let config = Config::parse("[storage]\nbackend = 'OBJ'\nprefix = ''").unwrap();
        let environment = |name: &str| (name == "AWS_DEFAULT_BUCKET").then(|| "c".to_owned());
        let found = Settings::of(&config, environment).unwrap();
        assert_eq!((found.prefix.as_str(), found.place.as_str()), ("", "bucket \"c\" at AWS"));
        let found = settings(
            "parameters = { bucket = 'b', endpoint_override = 'http://me:hush@x:9000', access_key = 'a', secret_key = 's' }",
        );
        let found = found.unwrap();
        assert_eq!((found.place.as_str(), found.has_keys), ("bucket \"b\" at x:9000", true));
    }
}
