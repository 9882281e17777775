//! What processes hold although they should be idle, as their metrics tell.

use host_tests::cluster::agent;

const OF_WORKER: &[&str] = &[
    "host_kv_pages{state=\"held\"}",
    "host_kv_pages{state=\"quarantined\"}",
    "host_kv_pages_locked",
    "host_cache_locks",
    "host_requests_queued",
    "host_requests_active",
    "host_rooms_quarantined",
    "host_peers_unfenced",
    "host_messages_unanswered",
    "host_hicache_slots{state=\"filling\"}",
    "host_hicache_slots{state=\"quarantined\"}",
    "host_hicache_slots_pinned",
    "host_hicache_writing_back_pages",
    "host_hicache_queue_pages{way=\"load\"}",
    "host_hicache_queue_pages{way=\"save\"}",
    "host_staging_waiting",
    "host_staging_bytes_in_use",
];

const OF_ROUTER: &[&str] = &[
    "host_requests_running",
    "host_uploads",
    "host_upload_bytes",
    "host_text_bytes",
    "host_answer_bytes",
    "host_grammars_waiting",
];

/// The connection that reads the metrics is one itself.
const CONNECTIONS: &str = "host_connections";

/// The body at a URL, read on a connection of its own.
pub fn get(url: &str) -> Option<String> {
    agent().get(url).header("connection", "close").call().ok()?.body_mut().read_to_string().ok()
}

/// The lines of a worker's metrics that are not 0.
pub fn of_worker(address: &str) -> Vec<String> {
    unexpected(address, |name| OF_WORKER.contains(&name).then_some("0"), OF_WORKER.len())
}

/// The lines of a router's metrics that tell of a client, or of a connection beside the one that reads them.
pub fn of_router(address: &str) -> Vec<String> {
    let expected = |name: &str| match name {
        CONNECTIONS => Some("1"),
        _ => OF_ROUTER.contains(&name).then_some("0"),
    };
    unexpected(address, expected, OF_ROUTER.len() + 1)
}

/// The lines whose value is not the expected one. All `count` names with an expected value must be there.
fn unexpected(address: &str, expected: impl Fn(&str) -> Option<&'static str>, count: usize) -> Vec<String> {
    let Some(text) = get(&format!("{address}/metrics")) else {
        return vec![format!("{address} does not answer")];
    };
    let pairs = text.lines().filter_map(|line| line.rsplit_once(' '));
    let known: Vec<_> = pairs.filter_map(|(name, value)| Some((name, value, expected(name)?))).collect();
    if known.len() != count {
        return vec![format!("{address} tells {} series of {count}", known.len())];
    }
    let wrong = known.into_iter().filter(|(_, value, expected)| value != expected);
    wrong.map(|(name, value, _)| format!("{address}: {name} {value}")).collect()
}
