//! A server that a command starts for itself. It ends with the command.

use std::ffi::OsString;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use hyper::StatusCode;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use super::{Address, Client, NoAnswer};
use crate::cli::Refused;

/// Limit of the time for the server's end. It includes the times of all its parts, which end one after the other.
const GRACE: Duration = Duration::from_secs(40);
/// Pause between two checks whether the server is ready.
const PAUSE: Duration = Duration::from_millis(50);
/// The exit code of a server whose flags cannot work.
const REFUSED: i32 = 2;

/// The flags of a command that its server is started with: all but the command's `own`, each of which has a value. `arguments` are
/// those of this program, without its name, and `words` are the command's name.
pub fn serving_flags(
    arguments: impl IntoIterator<Item = OsString>,
    words: &[&str],
    own: &[&str],
) -> Vec<OsString> {
    let mut flags = Vec::new();
    let is_word = |argument: &OsString| words.iter().any(|word| argument == word);
    let mut rest = arguments.into_iter().skip_while(is_word);
    while let Some(argument) = rest.next() {
        let text = argument.to_string_lossy();
        let name = text.split('=').next().unwrap_or_default();
        if own.contains(&name) {
            if name.len() == text.len() {
                // Skips the value of the flag.
                rest.next();
            }
        } else if text.starts_with('-') || !flags.is_empty() {
            flags.push(argument);
        }
    }
    flags
}

/// Flags on one line.
pub fn shown(flags: &[OsString]) -> String {
    flags.iter().map(|flag| flag.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// The end of a server that nothing asked to end.
pub fn describe(status: ExitStatus) -> String {
    format!("{status}; what it said stands above")
}

/// The started server. The system sends it SIGTERM if this process is killed.
pub struct Started {
    /// Its URL. Valid after [`until_ready`](Self::until_ready).
    pub address: Address,
    child: Child,
    output: Lines<BufReader<ChildStdout>>,
}

impl Started {
    /// Starts this program with these flags. Must be called on the first thread of the process, because the server ends with the
    /// thread.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(flags: &[OsString]) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("the program does not know its own file")?;
        let parent = std::process::id().to_string();
        let mut command = Command::new(&program);
        // `host companion` starts a server that ends with its parent, in a process group of its own, which gets no Ctrl-C.
        command.args(["companion", "--parent", &parent, "--"]).arg(&program).args(flags);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0).kill_on_drop(true);
        let mut child = command.spawn().context("the server cannot be started")?;
        let output = child.stdout.take().context("the server's output cannot be read")?;
        let nowhere = Address::of(([127, 0, 0, 1], 0).into());
        Ok(Self { address: nowhere, child, output: BufReader::new(output).lines() })
    }

    /// Waits until the server is ready. There is no limit, because a model may take long to load.
    ///
    /// # Errors
    /// [`Refused`] when the server refuses its flags. Another error when it ends, prints no URL, or shows a certificate that no
    /// authority in the file `ca` has signed.
    pub async fn until_ready(&mut self, ca: Option<&Path>) -> anyhow::Result<()> {
        self.address = loop {
            let line = self.output.next_line().await.context("the server's output cannot be read")?;
            let Some(line) = line else { return self.gone().await };
            let is_url = |word: &&str| word.starts_with("http://") || word.starts_with("https://");
            let url = line.split_whitespace().find(is_url);
            if let Some(url) = url.filter(|_url| line.starts_with("host: serving")) {
                break Address::parse(url.trim_end_matches(',')).map_err(anyhow::Error::msg)?;
            }
        };
        let client = Client::new(self.address.clone(), ca)?;
        loop {
            match client.get("/health").await {
                Ok(answer) if answer.status == StatusCode::OK => return Ok(()),
                Err(untrusted @ NoAnswer::Untrusted(_)) => return Err(untrusted.into()),
                _ => {}
            }
            tokio::select! {
                _ended = self.child.wait() => return self.gone().await,
                () = tokio::time::sleep(PAUSE) => {}
            }
        }
    }

    async fn gone(&mut self) -> anyhow::Result<()> {
        let status = self.child.wait().await.context("the server cannot be waited for")?;
        if status.code() == Some(REFUSED) {
            return Err(Refused("the server refused its flags; see above".to_owned()).into());
        }
        bail!("the server ended before it served: {}", describe(status))
    }

    /// The server's exit status, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Sends SIGTERM to the server and waits for its end.
    ///
    /// # Errors
    /// When the server did not end in time and was killed.
    pub async fn end(mut self) -> anyhow::Result<()> {
        let pid = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        // There is no id if the server has ended and was waited for.
        if let Some(pid) = pid {
            kill_process(pid, Signal::TERM).context("the server cannot be sent SIGTERM")?;
            let ended = async {
                // Its further output is read and dropped, so that the pipe never fills.
                while let Ok(Some(_line)) = self.output.next_line().await {}
                self.child.wait().await
            };
            match tokio::time::timeout(GRACE, ended).await {
                Ok(ended) => drop(ended.context("the server cannot be waited for")?),
                Err(_elapsed) => {
                    self.child.kill().await.context("the server cannot be killed")?;
                    bail!("the server did not end within {} s and was killed", GRACE.as_secs());
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_started_with_all_flags_but_the_commands_own() {
        let own = ["--system", "--max-tokens", "--temperature"];
        let flags = |line: &str| {
            let all = serving_flags(line.split(' ').map(OsString::from), &["chat"], &own);
            shown(&all)
        };
        assert_eq!(flags("chat"), "");
        assert_eq!(flags("chat http://127.0.0.1:8000"), "");
        assert_eq!(flags("chat http://127.0.0.1:8000 --max-tokens 5"), "");
        assert_eq!(flags("chat --model chat --plugins shm"), "--model chat --plugins shm");
        assert_eq!(flags("chat --system=x --model=M --temperature 0 --tp 2"), "--model=M --tp 2");
    }
}
