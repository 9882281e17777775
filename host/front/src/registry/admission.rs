//! Checks the description that a worker registers with.

use std::collections::BTreeSet;

use host_core::notice::MAX_RANKS;
use host_wire::proto::WorkerInfo;
use host_wire::protocol::{self, Version};

use super::Role;

const MAX_NAME: usize = 256;
/// Longest name of a model, address or similar text, in bytes.
pub const MAX_TEXT: usize = 1024;
/// Most transfer endpoints for each rank.
const MAX_TRANSFERS: usize = 16;
const MAX_ENDPOINT: usize = 64 << 10;
/// Most pages of a worker's pool: 256 million tokens in pages of 16. The router stores the name of each cached page.
const MAX_PAGES: u32 = 1 << 24;

/// Checks a worker's description. Returns the worker's role and the protocol version to speak with it.
///
/// # Errors
/// The rule that the description breaks, as a sentence.
pub(super) fn check(info: &WorkerInfo, model: &str) -> Result<(Role, Version), String> {
    let role = Role::parse(&info.role)
        .ok_or_else(|| format!("unknown role {:?}: use prefill, decode or aggregated", info.role))?;
    let bounded = |what: &str, text: &str, limit: usize| {
        if text.is_empty() {
            Err(format!("the worker's {what} is empty"))
        } else if text.len() > limit {
            Err(format!("the worker's {what} has {} bytes; at most {limit} are allowed", text.len()))
        } else {
            Ok(())
        }
    };
    bounded("name", &info.name, MAX_NAME)?;
    let version = protocol::agree(info)?;
    bounded("address", &info.address, MAX_TEXT)?;
    if info.instance == 0 {
        return Err("the worker's instance is 0, which stands for none".into());
    }
    let identity = info.identity.as_ref().ok_or("the worker gives no KV identity")?;
    for (what, text) in [
        ("model", &identity.model),
        ("weights digest", &identity.weights),
        ("executor", &identity.executor),
        ("KV element type", &identity.dtype),
        ("KV layout", &identity.layout),
    ] {
        bounded(what, text, MAX_TEXT)?;
    }
    for (what, number) in [
        ("max_tokens", info.max_tokens),
        ("page_tokens", identity.page_tokens),
        ("layers", identity.layers),
        ("kv_heads", identity.kv_heads),
        ("head_dim", identity.head_dim),
        ("ranks", identity.ranks),
    ] {
        if number == 0 {
            return Err(format!("the worker's {what} is 0"));
        }
    }
    if info.pages > MAX_PAGES {
        let pages = info.pages;
        return Err(format!(
            "the worker has {pages} pages; at most {MAX_PAGES} are allowed: use larger ones (--page-size)"
        ));
    }
    if identity.model != model {
        return Err(format!("the worker serves model {:?} and this router {:?}", identity.model, model));
    }
    let ranks = identity.ranks as usize;
    if ranks > MAX_RANKS {
        return Err(format!("the worker's ranks is {ranks}; at most {MAX_RANKS} are allowed"));
    }
    let (count, most) = (info.transfer.len(), MAX_TRANSFERS * ranks);
    if count > most {
        return Err(format!("the worker offers {count} transfer endpoints; at most {most} are allowed"));
    }
    let mut offered = BTreeSet::new();
    for way in &info.transfer {
        let (plugin, rank) = (&way.plugin, way.rank);
        if rank >= identity.ranks {
            return Err(format!("the worker offers plugin {plugin:?} on rank {rank}, but has {ranks}"));
        }
        if !offered.insert((plugin, rank)) {
            return Err(format!("the worker offers plugin {plugin:?} on rank {rank} twice"));
        }
        bounded("transfer plugin name", &way.plugin, MAX_NAME)?;
        if way.endpoint.len() > MAX_ENDPOINT {
            return Err(format!(
                "the endpoint of transfer plugin {:?} has {} bytes; at most {MAX_ENDPOINT} are allowed",
                way.plugin,
                way.endpoint.len()
            ));
        }
    }
    Ok((role, version))
}
