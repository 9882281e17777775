//! `host drain NAME`: takes a worker out of service without losing a request.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use hyper::StatusCode;
use serde_json::Value;

use super::Refused;
use super::output::say;
use super::server::{Address, Client};

/// Time in seconds without a heartbeat after which a router gives a worker up.
const LOST: f64 = 10.0;
/// Interval between two queries of the requests that the worker still has.
const LOOK: Duration = Duration::from_millis(300);

/// Which worker of which server.
#[derive(Args, Debug)]
pub struct Drain {
    /// The worker's name or instance, as /health shows them
    worker: String,

    /// The server, for example http://127.0.0.1:8000. Where it has --admin, that address, or unix:PATH
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    url: String,

    /// PEM file with the authorities of an https:// server's certificate [default: those that this machine trusts]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,

    /// Return as soon as the worker drains, without waiting for its end
    #[arg(long)]
    no_wait: bool,
}

impl Drain {
    /// Runs the command.
    ///
    /// # Errors
    /// [`Refused`] for a wrong URL. Another error when the server does not answer or the worker cannot be drained.
    pub fn run(self) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.context("no runtime for the command")?.block_on(self.drain())
    }

    async fn drain(self) -> anyhow::Result<()> {
        let client = Client::new(Address::parse(&self.url).map_err(Refused)?, self.ca.as_deref())?;
        let path = format!("/drain?worker={}", query_value(&self.worker));
        let mut answer = client.post(&path, &Value::Null).await.map_err(anyhow::Error::msg)?;
        if answer.status != StatusCode::ACCEPTED {
            anyhow::bail!("{} does not drain the worker: {}", client.address(), answer.error().await);
        }
        let told: Value = read(answer.rest().await)?;
        let (name, instance) = (text(&told, "draining"), text(&told, "instance"));
        say!("{name} drains: it takes no more requests");
        if self.no_wait {
            return Ok(());
        }
        let mut shown = None;
        loop {
            tokio::time::sleep(LOOK).await;
            let mut answer = client.get("/health").await.map_err(anyhow::Error::msg)?;
            let health: Value = read(answer.rest().await)?;
            let Some(workers) = health["workers"].as_array() else {
                anyhow::bail!("the server does not show its workers: set HOST_API_KEY to an operator's key");
            };
            let Some(worker) = workers.iter().find(|worker| worker["instance"] == instance.as_str()) else {
                say!("{name} has ended");
                return Ok(());
            };
            let silent = worker["silent_seconds"].as_f64().unwrap_or_default();
            if worker["state"] == "suspected" && silent > LOST {
                anyhow::bail!("{name} does not answer any more: {}", text(worker, "why"));
            }
            let left = worker["in_flight"].as_u64().unwrap_or_default();
            if shown.replace(left) != Some(left) {
                say!("{left} requests of this router run on it");
            }
        }
    }
}

fn read(body: Result<String, String>) -> anyhow::Result<Value> {
    let body = body.map_err(anyhow::Error::msg)?;
    serde_json::from_str(&body).context("the server's answer is no JSON: is it a host server?")
}

fn text(value: &Value, key: &str) -> String {
    value[key].as_str().unwrap_or_default().to_owned()
}

/// Percent-encodes all characters except unreserved ones.
fn query_value(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_workers_survive_the_query() {
        assert_eq!(query_value("decode-0"), "decode-0");
        assert_eq!(query_value("a b&c=\u{e9}"), "a%20b%26c%3D%C3%A9");
    }
}
