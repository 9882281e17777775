//! `host tier ls`.

use clap::Args;
use host_plugin_api::Key;
use host_plugin_api::tier::FOUND;
use serde_json::json;

use super::open::Tier;
use super::selected::Prefix;
use crate::cli::output::say;

/// What to list.
#[derive(Args, Debug)]
pub struct List {
    #[command(flatten)]
    tier: Tier,
    /// Only keys that start with these hex digits
    #[arg(long, value_name = "HEX")]
    prefix: Option<Prefix>,
    /// So many keys at most [default: all]
    #[arg(long, value_name = "KEYS")]
    limit: Option<u64>,
    /// One JSON object per line
    #[arg(long)]
    json: bool,
}

impl List {
    /// Prints one line per key.
    pub fn run(self) -> anyhow::Result<()> {
        let prefix = self.prefix.unwrap_or_default();
        let mut left = self.limit.unwrap_or(u64::MAX);
        let mut session = self.tier.find()?.that_lists()?.open_to_read()?;
        session.scan(|session, keys| {
            let keys: Vec<Key> = keys.iter().copied().filter(|key| prefix.has(key)).collect();
            // Keys that are gone meanwhile do not count towards the limit.
            for keys in keys.chunks(session.limits().max_pages as usize) {
                for (key, end) in
                    keys.iter().zip(session.exists(keys)?).filter(|(_, end)| end.status == FOUND)
                {
                    if left == 0 {
                        return Ok(false);
                    }
                    left -= 1;
                    let bytes = Some(end.bytes).filter(|bytes| *bytes > 0);
                    match (self.json, bytes) {
                        (true, bytes) => say!("{}", json!({"key": key.to_string(), "bytes": bytes})),
                        (false, Some(bytes)) => say!("{key} {bytes:>12}"),
                        (false, None) => say!("{key} {:>12}", "-"),
                    }
                }
                if left == 0 {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }
}
