//! A worker keeps the router informed that it is there, and how busy.

use std::time::Duration;

use host_wire::endpoint::{Address, Credentials, channel, reason};
use host_wire::proto::registry_client::RegistryClient;
use host_wire::proto::{HeartbeatRequest, Load, RegisterRequest, WorkerInfo};
use tokio::time::timeout;
use tonic::transport::Channel;

use crate::Handle;

/// Between two heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// How long one call may take.
const CALL: Duration = Duration::from_secs(2);

/// Registers with the router at `address` and keeps the registration alive, for ever.
///
/// # Errors
/// When the credentials are not for its address.
pub async fn keep_registered(
    worker: Handle,
    info: WorkerInfo,
    address: Address,
    credentials: Credentials,
) -> anyhow::Result<()> {
    let mut client = RegistryClient::new(channel(&address, &credentials)?);
    // What was logged last: the same trouble is told once.
    let mut known = String::new();
    loop {
        match session(&worker, &info, &mut client, &mut known).await {
            Ok(never) => match never {},
            Err(trouble) if trouble != known => {
                tracing::warn!(router = %address, %trouble, "not registered with the router; trying again");
                known = trouble;
            }
            Err(_told) => {}
        }
        tokio::time::sleep(HEARTBEAT).await;
    }
}

async fn session(
    worker: &Handle,
    info: &WorkerInfo,
    client: &mut RegistryClient<Channel>,
    trouble: &mut String,
) -> Result<std::convert::Infallible, String> {
    let request = RegisterRequest { worker: Some(info.clone()) };
    let reply = timeout(CALL, client.register(request)).await.map_err(|elapsed| elapsed.to_string())?;
    let reply = reply.map_err(|status| reason(&status))?.into_inner();
    if !reply.accepted {
        return Err(reply.message);
    }
    trouble.clear();
    match reply.message.as_str() {
        "" => tracing::info!("registered with the router"),
        note => tracing::warn!(note, "registered with the router"),
    }
    loop {
        tokio::time::sleep(HEARTBEAT).await;
        let request = HeartbeatRequest { instance: info.instance, load: Some(load(worker)) };
        let reply = timeout(CALL, client.heartbeat(request)).await.map_err(|elapsed| elapsed.to_string())?;
        let reply = reply.map_err(|status| reason(&status))?.into_inner();
        if !reply.known {
            return Err("the router does not know this worker any more".into());
        }
    }
}

fn load(worker: &Handle) -> Load {
    let stats = worker.stats();
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Load {
        queued: count(stats.queued),
        running: count(stats.active),
        pages_free: count(stats.pool.free),
        pages_held: count(stats.pool.held),
        pages_quarantined: count(stats.pool.quarantined),
        pages_cached: count(stats.pool.cached),
    }
}
