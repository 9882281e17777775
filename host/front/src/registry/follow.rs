//! Keeps the index up to date with one worker's cache, for as long as the worker is registered.

use std::time::Duration;

use host_core::Instance;
use host_core::routing::Applied;
use host_wire::proto::worker_client::WorkerClient;
use host_wire::proto::{CacheNews, FollowCacheRequest};
use host_wire::{cache_news, clock};
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use super::Registry;

/// First wait after a worker could not be reached. The wait doubles up to [`LONGEST_WAIT`].
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// Wait after a worker sent an event that is not possible.
const DISTRUST: Duration = Duration::from_secs(30);
/// Largest message, in bytes: many times that of a batch or a part of a snapshot.
const MAX_NEWS: usize = 1 << 20;

/// Follows until the worker is no longer known.
pub(super) async fn follow(registry: Registry, instance: Instance, channel: Channel) {
    let mut client = WorkerClient::new(channel).max_decoding_message_size(MAX_NEWS);
    let mut wait = FIRST_WAIT;
    loop {
        let Some(after) = registry.lock().resume(instance) else { return };
        let request = FollowCacheRequest { instance: instance.0, after };
        let why = match client.follow_cache(request).await {
            Ok(news) => {
                registry.lock().in_sight(instance, after);
                match hear(&registry, instance, news.into_inner(), &mut wait).await {
                    Ended::Again => continue,
                    Ended::Silent => "it ended the stream without an event".to_owned(),
                    Ended::Gone => return,
                    Ended::Wrong(why) => {
                        wait = DISTRUST;
                        why
                    }
                }
            }
            Err(status) => status.message().to_owned(),
        };
        tracing::debug!(%instance, why, "a worker's cache cannot be followed");
        registry.lock().lost_sight(instance, &why);
        clock::sleep(wait).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

enum Ended {
    /// Events are missing, or the connection broke: connect again at once.
    Again,
    /// The stream ended before any event came: connecting again at once could go on for ever.
    Silent,
    Gone,
    Wrong(String),
}

async fn hear(
    registry: &Registry,
    instance: Instance,
    mut stream: Streaming<CacheNews>,
    wait: &mut Duration,
) -> Ended {
    let mut silent = true;
    loop {
        let news: Result<Option<CacheNews>, Status> = stream.message().await;
        let news = match news {
            Ok(Some(news)) => news,
            Ok(None) | Err(_) if silent => return Ended::Silent,
            Ok(None) | Err(_) => return Ended::Again,
        };
        let Some(news) = cache_news::read(news) else {
            return Ended::Wrong("it said something of an unknown kind".into());
        };
        *wait = FIRST_WAIT;
        silent = false;
        match registry.lock().hear(instance, &news) {
            Applied::Yes | Applied::Repeat => {}
            Applied::Gap => return Ended::Again,
            Applied::Unknown => return Ended::Gone,
            Applied::TooMany => return Ended::Wrong("it claims more cached pages than its pool has".into()),
        }
    }
}
