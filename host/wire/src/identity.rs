//! The digest of a [`KvIdentity`], from which the names of a worker's pages are derived.

use host_core::radix::PageHash;
use sha2::{Digest, Sha256};

use crate::proto::KvIdentity;

/// Computes SHA-256 over the fields in the order of the schema. Texts follow their length in bytes, and all numbers are u64 LE.
/// Layout and ranks are left out, and the fields of sliding layers where there are none. So the same page has the same name in
/// every memory layout and on any number of ranks. Router and workers must compute the same digest: a router whose version
/// computes another one finds nothing cached.
#[must_use]
pub fn digest(identity: &KvIdentity) -> PageHash {
    let KvIdentity {
        model,
        weights,
        executor,
        dtype,
        layout: _,
        page_tokens,
        layers,
        kv_heads,
        head_dim,
        ranks: _,
        sliding_layers,
        window,
    } = identity;
    let mut hasher = Sha256::new();
    for text in [model, weights, executor, dtype] {
        hasher.update((text.len() as u64).to_le_bytes());
        hasher.update(text);
    }
    for number in [page_tokens, layers, kv_heads, head_dim] {
        hasher.update(u64::from(*number).to_le_bytes());
    }
    // Pages of models without sliding layers had names before there were sliding layers. These names must not change.
    for number in [sliding_layers, window].into_iter().filter(|_| *sliding_layers > 0) {
        hasher.update(u64::from(*number).to_le_bytes());
    }
    PageHash(hasher.finalize().into())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_field_counts_but_layout_and_ranks() {
        let changes: [fn(&mut KvIdentity); 12] = [
            |_| {},
            |id| id.model = "m".into(),
            |id| id.weights = "m".into(),
            |id| id.executor = "m".into(),
            |id| id.dtype = "m".into(),
            |id| id.page_tokens = 1,
            |id| id.layers = 1,
            |id| id.kv_heads = 1,
            |id| id.head_dim = 1,
            |id| id.sliding_layers = 1,
            |id| (id.sliding_layers, id.window) = (1, 1),
            |id| (id.sliding_layers, id.window) = (1, 2),
        ];
        let digests: BTreeSet<PageHash> = changes
            .iter()
            .map(|change| {
                let mut identity = KvIdentity::default();
                change(&mut identity);
                digest(&identity)
            })
            .collect();
        assert_eq!(digests.len(), changes.len());
        let elsewhere = KvIdentity { layout: "m".into(), ranks: 4, ..KvIdentity::default() };
        assert_eq!(digest(&elsewhere), digest(&KvIdentity::default()));
    }
}
