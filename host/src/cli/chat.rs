//! `host chat`: a conversation with a server, in the terminal or over pipes.
//!
//! Answers go to standard output as they come. Prompts, figures and errors go to standard error. So `host chat < questions` prints
//! only answers.

mod input;
mod turn;

use std::ffi::OsString;
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use serde_json::{Value, json};

use super::Refused;
use super::output::harmless;
use super::server::started::{describe, serving_flags, shown};
use super::server::{Address, Client, Started, Stop};
use super::settings::{RoleName, Settings};
use input::Input;
use turn::{End, Turn};

/// Limit of a conversation before `/reset`, in bytes: the longest body that a server may be sent.
const LONGEST: usize = 16 << 20;

/// Options of the conversation, each with a value. All other options are for a server.
const OWN: [&str; 4] = ["--system", "--max-tokens", "--temperature", "--ca"];

/// A conversation with a server.
#[derive(Args, Debug)]
pub struct Chat {
    /// The server, for example http://127.0.0.1:8000 [default: the one on this machine's port 8000, or with flags of a server,
    /// one that is started with them and ended with the conversation]
    url: Option<String>,

    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,

    /// Most tokens of an answer [default: the server's]
    #[arg(long, value_name = "TOKENS")]
    max_tokens: Option<u32>,

    /// How freely tokens are chosen. 0 always takes the likeliest [default: 0, which suits small models]
    #[arg(long)]
    temperature: Option<f64>,

    /// PEM file with the authorities of an https:// server's certificate [default: those that this machine trusts]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,

    #[command(flatten)]
    settings: Settings,
}

impl Chat {
    /// Talks until the input ends, `/quit`, or Ctrl-C at the prompt.
    ///
    /// # Errors
    /// [`Refused`] for a wrong URL or wrong flags. Another error when no server answers, or when turns failed without a terminal.
    pub fn run(self) -> anyhow::Result<()> {
        // Runs on one thread, the first of the process: the system ends a started server with the thread that started it.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("no runtime for the conversation")?;
        let ended = runtime.block_on(self.talk());
        // Does not wait for a read of standard input.
        runtime.shutdown_background();
        ended
    }

    async fn talk(self) -> anyhow::Result<()> {
        let mut stop = Stop::listen()?;
        let flags = serving_flags(std::env::args_os().skip(1), &["chat"], &OWN);
        let (address, mut started) = match &self.url {
            Some(url) if flags.is_empty() => (Address::parse(url).map_err(Refused)?, None),
            Some(url) => {
                let flags = shown(&flags);
                let message =
                    format!("{url} and {flags}: give the URL of a server, or flags to start one with");
                return Err(Refused(message).into());
            }
            None if flags.is_empty() => (Address::of(self.settings.http_address()), None),
            None => {
                let Some(started) = self.start(&flags, &mut stop).await? else { return Ok(()) };
                (started.address.clone(), Some(started))
            }
        };
        let ended = match Client::new(address, self.ca.as_deref()) {
            Ok(client) => self.converse(&client, &mut stop, started.as_mut()).await,
            Err(refused) => Err(refused.into()),
        };
        if let Some(started) = started {
            started.end().await?;
        }
        ended
    }

    /// Starts a server for this conversation. `None` if a signal came meanwhile.
    async fn start(&self, flags: &[OsString], stop: &mut Stop) -> anyhow::Result<Option<Started>> {
        if let Some(role) = self.settings.role.filter(|role| *role != RoleName::Aggregated) {
            let role = role.as_str();
            let message =
                format!("--role {role} answers no requests alone: leave it out, or give a server's URL");
            return Err(Refused(message).into());
        }
        let mut flags = flags.to_vec();
        if self.settings.port.is_none() {
            flags.extend(["--port".into(), "0".into()]);
        }
        if self.settings.log_level.is_none() {
            flags.extend(["--log-level".into(), "warn".into()]);
        }
        let mut started = Started::spawn(&flags)?;
        tell(&format!("starting host {}", shown(&flags)));
        let ready = tokio::select! {
            ready = started.until_ready(self.ca.as_deref()) => Some(ready),
            () = stop.requested() => None,
        };
        match ready {
            Some(Ok(())) => Ok(Some(started)),
            Some(Err(error)) => {
                started.end().await?;
                Err(error)
            }
            None => started.end().await.map(|()| None),
        }
    }

    async fn converse(
        &self,
        client: &Client,
        stop: &mut Stop,
        mut started: Option<&mut Started>,
    ) -> anyhow::Result<()> {
        let model = match client.model().await {
            Ok(model) => model,
            Err(error) if self.url.is_none() && started.is_none() => {
                let message = format!(
                    "{error}: give the URL of a server, or flags to start one with, such as --model DIR; see host chat --help"
                );
                return Err(anyhow::Error::msg(message));
            }
            Err(error) => return Err(anyhow::Error::msg(error)),
        };
        let at_terminal = std::io::stdin().is_terminal();
        if at_terminal {
            tell(&format!("{model} at {}", client.address()));
            tell("/reset begins anew, /quit or Ctrl-D ends, Ctrl-C stops an answer");
        }
        let mut input = Input::read();
        let mut conversation = Conversation::new(self.system.as_deref());
        let (mut turns, mut failures) = (0_u32, 0_u32);
        loop {
            if at_terminal {
                prompt();
            }
            let line = tokio::select! {
                line = input.line() => line?,
                () = stop.requested() => None,
            };
            let Some(line) = line else { break };
            match line.trim() {
                "" => continue,
                "/quit" => break,
                "/reset" => {
                    conversation = Conversation::new(self.system.as_deref());
                    continue;
                }
                command if command.starts_with('/') && !command.contains(char::is_whitespace) => {
                    tell(&format!("there is no {command}; there are /reset and /quit"));
                    continue;
                }
                said => conversation.add("user", said),
            }
            turns += 1;
            let turn = if conversation.bytes > LONGEST {
                let text =
                    format!("the conversation is longer than {} MiB: /reset begins anew", LONGEST >> 20);
                Turn { text: String::new(), end: End::Failed(text), figures: None }
            } else {
                turn::take(client, &self.request(&model, &conversation), stop.requested()).await?
            };
            if let Some(figures) = &turn.figures {
                tell(&figures.to_string());
            }
            match turn.end {
                End::Whole => conversation.add("assistant", &turn.text),
                End::Stopped => {
                    tell("stopped");
                    conversation.add("assistant", &turn.text);
                }
                End::Failed(why) => {
                    failures += 1;
                    conversation.forget_last();
                    error(&why);
                }
            }
            if stop.for_good {
                break;
            }
            if let Some(status) = started.as_mut().and_then(|started| started.ended()) {
                anyhow::bail!("the server that was started here has ended: {}", describe(status));
            }
        }
        if failures > 0 && !at_terminal {
            anyhow::bail!("{failures} of {turns} turns failed; see above");
        }
        Ok(())
    }

    fn request(&self, model: &str, conversation: &Conversation) -> Value {
        let mut request = json!({
            "model": model,
            "messages": conversation.messages,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if let Some(tokens) = self.max_tokens {
            request["max_tokens"] = json!(tokens);
        }
        request["temperature"] = json!(self.temperature.unwrap_or_default());
        request
    }
}

/// The messages of the conversation so far.
struct Conversation {
    messages: Vec<Value>,
    bytes: usize,
}

impl Conversation {
    fn new(system: Option<&str>) -> Self {
        let mut conversation = Self { messages: Vec::new(), bytes: 0 };
        if let Some(text) = system {
            conversation.add("system", text);
        }
        conversation
    }

    fn add(&mut self, role: &str, text: &str) {
        self.bytes += text.len();
        self.messages.push(json!({"role": role, "content": text}));
    }

    /// Removes the last message, which got no answer.
    fn forget_last(&mut self) {
        if let Some(message) = self.messages.pop() {
            self.bytes -= message["content"].as_str().map_or(0, str::len);
        }
    }
}

/// Writes a line to standard error, dim at a terminal.
fn tell(text: &str) {
    write_beside("\x1b[2m", text);
}

fn error(text: &str) {
    write_beside("\x1b[31m", &format!("error: {}", text.replace('\n', " ")));
}

fn write_beside(colour: &str, text: &str) {
    let mut output = std::io::stderr().lock();
    let text = harmless(text);
    // A failure is ignored: the conversation goes on when standard error is closed.
    let _unread = match output.is_terminal() {
        true => writeln!(output, "{colour}{text}\x1b[0m"),
        false => writeln!(output, "{text}"),
    };
}

fn prompt() {
    let mut output = std::io::stderr().lock();
    let _unread = write!(output, "> ").and_then(|()| output.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_answered_is_forgotten() {
        let mut conversation = Conversation::new(Some("be brief"));
        conversation.add("user", "hello");
        assert_eq!(conversation.bytes, 13);
        conversation.forget_last();
        assert_eq!((conversation.bytes, conversation.messages.len()), (8, 1));
    }
}
