//! Warms up new workers: each serves a dummy request before it gets others, which reads its weights and starts its threads and
//! connections.

use std::time::Duration;

use host_core::radix::NamespaceKey;
use host_core::{Instance, Room};
use host_wire::clock;
use host_wire::convert::write_namespace;
use host_wire::proto;
use host_wire::random::random_u64;
use tokio::task::JoinSet;

use super::attempt::{Attempt, Step};
use super::{Registry, Route};

/// Longest time for one dummy request: the first touch of large weights on a slow disk.
const PATIENCE: Duration = Duration::from_secs(120);
/// Wait after a dummy request failed.
const AGAIN: Duration = Duration::from_secs(1);
/// Failed tries that are remembered, with their partners.
const MOST_FAILED: usize = 1000;
/// Tokens of the dummy request's answer: the second one is decoded from KV that was received.
const ANSWER: u32 = 2;

/// Sends dummy requests to new workers, without end. When it is dropped, the requests under way end.
pub async fn warm_up(registry: Registry) {
    let mut under_way = JoinSet::new();
    loop {
        let change = registry.change();
        for instance in registry.take_cold() {
            under_way.spawn(warm(registry.clone(), instance));
        }
        while under_way.try_join_next().is_some() {}
        change.await;
    }
}

/// Sends dummy requests to a worker until it has served one, or is gone.
async fn warm(registry: Registry, instance: Instance) {
    let mut failed = Vec::new();
    loop {
        let change = registry.change();
        let why = match random_u64() {
            Err(error) => format!("no randomness: {error}"),
            Ok(random) => match registry.pick_with(instance, &failed, Room(random >> 1)) {
                Ok(None) => return,
                // The worker's partner has not come yet. This always happens where all workers start together.
                Err(why) => {
                    registry.not_warm(instance, &why);
                    wait(change).await;
                    continue;
                }
                Ok(Some(route)) => {
                    let instances: Vec<Instance> = route.instances().collect();
                    match serve(&registry, route).await {
                        Ok(()) => {
                            tracing::info!(%instance, "a worker has served its first request and is ready");
                            registry.warmed(&instances);
                            return;
                        }
                        Err(why) => {
                            failed.extend(instances.into_iter().filter(|partner| *partner != instance));
                            format!("its first request failed: {why}")
                        }
                    }
                }
            },
        };
        failed.truncate(MOST_FAILED);
        if registry.not_warm(instance, &why) {
            tracing::warn!(%instance, why, "a worker is not ready yet");
        }
        wait(change).await;
    }
}

/// Waits a second, or less if the workers change: a partner may come at any time.
async fn wait(change: impl Future<Output = ()>) {
    tokio::select! {
        () = change => {}
        () = clock::sleep(AGAIN) => {}
    }
}

/// Sends one dummy request, which uses no cached pages and leaves none.
async fn serve(registry: &Registry, route: Route) -> Result<(), String> {
    let page = route.page_tokens();
    let prompt = (page + 1).min(route.max_tokens().saturating_sub(ANSWER)).max(1);
    let room = route.room();
    let request = proto::GenerateRequest {
        room: room.0,
        request_id: format!("warm-up-{room}"),
        // Token 0 is in every vocabulary.
        prompt: vec![0; prompt as usize],
        max_new_tokens: ANSWER.min(route.max_tokens().saturating_sub(prompt)).max(1),
        stop_tokens: Vec::new(),
        ignore_stop: true,
        sampling: Some(proto::Sampling { top_p: 1.0, ..proto::Sampling::default() }),
        prefill: None,
        namespace: Some(write_namespace(&NamespaceKey::default())),
        no_cache: true,
        ..proto::GenerateRequest::default()
    };
    let mut attempt = Attempt::start(registry, route, request);
    let served = clock::timeout(PATIENCE, async {
        loop {
            match attempt.next().await {
                Step::Began(_) | Step::Token(_) | Step::Scores(_) => {}
                Step::Finished(_) => return Ok(()),
                Step::Failed { failure, .. } => return Err(failure.to_string()),
            }
        }
    })
    .await;
    match served {
        Ok(Ok(())) => {
            attempt.settle(PATIENCE);
            Ok(())
        }
        Ok(failed) => failed,
        Err(_elapsed) => Err(format!("no answer within {PATIENCE:?}")),
    }
}
