//! The real registry, router and HTTP API in front of FAKE workers that echo the prompt. For trying clients without a model:
//!
//!     cargo run -p host-front --example front_on_fakes -- 127.0.0.1:8000
//!
//! Prints the address it serves on and runs until it is interrupted.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "shares its fake workers with tests"
)]

#[allow(dead_code, reason = "tests use more of it")]
#[path = "../tests/api/fake_worker.rs"]
mod fake_worker;

use std::sync::Arc;

use anyhow::Context;
use host_front::front::{FrontConfig, serve};
use host_front::text::{ChatTemplate, TextModel};
use host_wire::proto::registry_client::RegistryClient;
use host_wire::proto::{HeartbeatRequest, RegisterRequest};
use tokio::net::TcpListener;

const TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}";

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env()).init();
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:0".into());
    let http = TcpListener::bind(&address).await.with_context(|| format!("cannot listen on {address}"))?;
    let control = TcpListener::bind("127.0.0.1:0").await?;
    let registry = format!("http://{}", control.local_addr()?);
    println!("http://{}", http.local_addr()?);

    let mut text = TextModel::bytes(0);
    text.template = Some(Arc::new(ChatTemplate::new(TEMPLATE.into(), String::new(), String::new())?));
    let workers = [
        fake_worker::FakeWorker::start("prefill-0", "prefill", 1, fake_worker::prefills()),
        fake_worker::FakeWorker::start("decode-0", "decode", 2, fake_worker::echoes()),
    ];
    let infos: Vec<_> = workers.iter().map(|worker| worker.info.clone()).collect();
    tokio::spawn(async move {
        let mut registry = RegistryClient::connect(registry).await?;
        for info in &infos {
            registry.register(RegisterRequest { worker: Some(info.clone()), load: None }).await?;
        }
        loop {
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            for info in &infos {
                registry.heartbeat(HeartbeatRequest { instance: info.instance, load: None }).await?;
            }
        }
        #[allow(unreachable_code, reason = "names the error type")]
        anyhow::Ok(())
    });
    let ended = serve(FrontConfig::new("fake".into(), text), http, control, async {
        drop(tokio::signal::ctrl_c().await);
    });
    ended.await?;
    drop(workers);
    // Exits without waiting for the runtimes of the fake workers.
    std::process::exit(0)
}
