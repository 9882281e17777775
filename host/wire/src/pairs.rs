//! Decides which prefill worker may send KV pages to which decode worker: workers of the same model, math and page size, whatever
//! their layouts and numbers of ranks are.

use std::collections::BTreeSet;

use host_core::layout::KvOrder;

use crate::proto::{KvIdentity, WorkerInfo};

/// Checks whether this prefill worker and this decode worker can work together.
///
/// # Errors
/// A sentence with both values of everything that differs.
pub fn compatible(prefill: &WorkerInfo, decode: &WorkerInfo) -> Result<(), String> {
    let (none, other_none) = (KvIdentity::default(), KvIdentity::default());
    let left = prefill.identity.as_ref().unwrap_or(&none);
    let right = decode.identity.as_ref().unwrap_or(&other_none);
    let names = format!("prefill {:?} and decode {:?}", prefill.name, decode.name);
    let differences = differences(left, right);
    if !differences.is_empty() {
        return Err(format!("{names} cannot share KV pages: {differences}"));
    }
    let shared =
        prefill.transfer.iter().any(|way| decode.transfer.iter().any(|other| other.plugin == way.plugin));
    if shared {
        return Ok(());
    }
    Err(format!(
        "{names} have no transfer plugin in common: {} and {}; load one of them on both",
        plugins(prefill),
        plugins(decode)
    ))
}

fn plugins(worker: &WorkerInfo) -> String {
    let names: BTreeSet<&str> = worker.transfer.iter().map(|way| way.plugin.as_str()).collect();
    if names.is_empty() { "none".into() } else { names.into_iter().collect::<Vec<_>>().join(" + ") }
}

/// All differences except ranks and known layouts, because the sender converts between those.
fn differences(left: &KvIdentity, right: &KvIdentity) -> String {
    let text = |name: &str, left: &str, right: &str| {
        (left != right).then(|| format!("{name} is {left:?} on prefill and {right:?} on decode"))
    };
    let number = |name: &str, left: u32, right: u32| {
        (left != right).then(|| format!("{name} is {left} on prefill and {right} on decode"))
    };
    let known = |layout: &str| layout.parse::<KvOrder>().is_ok();
    let layout = text("layout", &left.layout, &right.layout);
    [
        text("model", &left.model, &right.model),
        text("weights", &left.weights, &right.weights),
        text("executor", &left.executor, &right.executor),
        text("dtype", &left.dtype, &right.dtype),
        layout.filter(|_| !known(&left.layout) || !known(&right.layout)),
        number("page_tokens", left.page_tokens, right.page_tokens),
        number("layers", left.layers, right.layers),
        number("kv_heads", left.kv_heads, right.kv_heads),
        number("head_dim", left.head_dim, right.head_dim),
        number("sliding_layers", left.sliding_layers, right.sliding_layers),
        number("window", left.window, right.window),
    ]
    .into_iter()
    .flatten()
    .collect::<Vec<String>>()
    .join(", ")
}
