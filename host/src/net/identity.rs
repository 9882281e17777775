//! Whether two workers mean the same by a KV page.

use super::proto::KvIdentity;

/// The fields in which two identities differ, each as "name: left on one side, right on the other".
#[must_use]
pub fn differences(left: (&str, &KvIdentity), right: (&str, &KvIdentity)) -> Vec<String> {
    let fields = |identity: &KvIdentity| {
        [
            ("model", identity.model.clone()),
            ("weights", identity.weights.clone()),
            ("executor", identity.executor.clone()),
            ("KV dtype", identity.dtype.clone()),
            ("KV layout", identity.layout.clone()),
            ("page size", identity.page_tokens.to_string()),
            ("layers", identity.layers.to_string()),
            ("KV heads", identity.kv_heads.to_string()),
            ("head dim", identity.head_dim.to_string()),
            ("ranks", identity.ranks.to_string()),
        ]
    };
    let pairs = fields(left.1).into_iter().zip(fields(right.1));
    pairs
        .filter(|(one, other)| one.1 != other.1)
        .map(|(one, other)| format!("{}: {} on {}, {} on {}", one.0, one.1, left.0, other.1, right.0))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_names_both_values_and_both_workers() {
        let one = KvIdentity { page_tokens: 16, dtype: "f32".into(), ..KvIdentity::default() };
        let other = KvIdentity { page_tokens: 32, ..one.clone() };
        assert_eq!(differences(("p", &one), ("d", &one)), Vec::<String>::new());
        assert_eq!(differences(("p", &one), ("d", &other)), ["page size: 16 on p, 32 on d"]);
    }
}
