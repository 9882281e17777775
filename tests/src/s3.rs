//! An S3 server on 127.0.0.1: moto, an implementation of S3 that is independent of ours and of NIXL.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use crate::built::target;
use crate::cluster::signal;
use crate::ports::unused;
use crate::program::{Program, take_turn};
use crate::skip::skipped;
use crate::wait::PATIENCE;

/// The deadline of a tier that must not reach it, in milliseconds. The server answers each request in tens of milliseconds, and
/// beside other work in seconds.
pub const PATIENT_MS: u64 = 60_000;

/// The secret key for the server. It must not appear in any log.
pub const SECRET: &str = "hush-hush-4711";

/// A server with one bucket, `pages`. It is killed when this is dropped.
pub struct Bucket {
    /// Where it listens.
    pub address: SocketAddr,
    server: Program,
}

/// The interpreter with moto that `MOTO_PYTHON` names, or that `cargo xtask test` installs in the target folder. Without one the
/// test is reported as skipped, with the reason.
fn python() -> Option<PathBuf> {
    static FOUND: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let find = || {
        let named = std::env::var_os("MOTO_PYTHON").filter(|path| !path.is_empty()).map(PathBuf::from);
        let python = named.unwrap_or_else(|| target().join("python/bin/python"));
        let imported = Command::new(&python).args(["-c", "import moto.server, moto.s3"]).output();
        let imported = imported.map_err(|error| format!("{}: {error}", python.display()))?;
        let said = String::from_utf8_lossy(&imported.stderr);
        let last = said.lines().last().unwrap_or_default().to_owned();
        imported.status.success().then_some(python).ok_or(last)
    };
    match FOUND.get_or_init(find) {
        Ok(python) => Some(python.clone()),
        Err(reason) => {
            skipped(&format!("there is no S3 server ({reason}); `cargo xtask test` installs moto"));
            None
        }
    }
}

impl Bucket {
    /// Starts a bucket. `None` where moto is not installed: then the test is reported as skipped.
    pub fn new() -> Option<Self> {
        let python = python()?;
        take_turn();
        let address = unused();
        let mut command = Command::new(python);
        command.args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &address.port().to_string()]);
        let mut server = Program::start("moto", &mut command);
        server.wait_listening(address);
        let bucket = Self { address, server };
        let (status, said) = bucket.ask("PUT", "", b"");
        assert_eq!(status, 200, "{}", String::from_utf8_lossy(&said));
        Some(bucket)
    }

    /// Replaces a bucket by a new, empty one.
    pub fn new_after(before: Self) -> Option<Self> {
        drop(before);
        Self::new()
    }

    /// The tier's table, without its header. `deadline_ms` is the tier's deadline for a page, in milliseconds.
    pub fn storage(&self, deadline_ms: u64) -> String {
        format!(
            "backend = \"OBJ\"\nprefix = \"some/where\"\ndeadline_ms = {deadline_ms}\nparameters = {{ bucket = \"pages\", \
             endpoint_override = \"http://{}\", scheme = \"http\", region = \"us-east-1\", access_key = \"me\", secret_key = \
             \"{SECRET}\" }}\n",
            self.address
        )
    }

    /// Makes the server hang, so that it answers nothing, or lets it continue.
    pub fn hang(&self, hang: bool) {
        signal(self.server.pid(), if hang { "STOP" } else { "CONT" });
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.server.pid()
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        self.server.kill();
    }

    /// Names of all pages' objects, and of tombstones.
    pub fn names(&self) -> Vec<String> {
        let (mut names, mut after) = (Vec::new(), String::new());
        loop {
            let (status, text) = self.ask("GET", &format!("?list-type=2&start-after={after}"), b"");
            assert_eq!(status, 200);
            let text = String::from_utf8(text).unwrap();
            let some = text.split("<Key>").skip(1).map(|rest| rest.split('<').next().unwrap().to_owned());
            let before = names.len();
            names.extend(some);
            match names.last().filter(|_| names.len() > before) {
                Some(last) => after = last.replace('/', "%2F"),
                None => break,
            }
        }
        names.retain(|name| name.starts_with("some/where/") && name.len() == "some/where/".len() + 64);
        names
    }

    /// The content of an object, if there is one of this name.
    #[must_use]
    pub fn object(&self, name: &str) -> Option<Vec<u8>> {
        let (status, bytes) = self.ask("GET", &format!("/{name}"), b"");
        (status == 200).then_some(bytes)
    }

    /// Writes an object.
    pub fn put(&self, name: &str, bytes: &[u8]) {
        assert_eq!(self.ask("PUT", &format!("/{name}"), bytes).0, 200);
    }

    /// Removes an object.
    pub fn remove(&self, name: &str) {
        assert_eq!(self.ask("DELETE", &format!("/{name}"), b"").0, 204);
    }

    /// Reads an object, changes it and writes it.
    pub fn edit(&self, name: &str, edit: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = self.object(name).unwrap();
        edit(&mut bytes);
        self.put(name, &bytes);
    }

    /// Sends one request, and returns its status and the body of its answer.
    fn ask(&self, method: &str, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let length = body.len();
        let head = format!(
            "{method} /pages{path} HTTP/1.0\r\nHost: {}\r\nAuthorization: AWS4-HMAC-SHA256 Credential=me/20260101/us-east-1/s3/\
             aws4_request, SignedHeaders=host, Signature=0\r\nContent-Length: {length}\r\n\r\n",
            self.address
        );
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let end = answer.windows(4).position(|four| four == b"\r\n\r\n").expect("a header");
        let head = String::from_utf8_lossy(&answer[..end]).into_owned();
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        (status, answer.split_off(end + 4))
    }
}
