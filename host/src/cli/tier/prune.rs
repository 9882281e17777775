//! `host tier prune`.

use anyhow::bail;
use clap::Args;
use host_plugin_api::tier::{FOUND, MISSING};
use host_plugin_api::{ErrorCode, Key};

use super::open::{ConfiguredTier, Tier};
use super::selected::Prefix;
use super::session::Session;
use crate::cli::Refused;
use crate::cli::output::say;
use crate::cli::settings::Bytes;

/// What `--help` says after the flags.
pub const ABOUT: &str = "Without --yes it says what would go, and removes nothing. It may run beside workers, which compute again \
    what they miss. Give it the workers' own configuration (--config): limits smaller than theirs would evict \
    other values too. Tiers do not tell how old a value is, so that values cannot be chosen by age.";

/// What to remove.
#[derive(Args, Debug)]
#[group(id = "what", required = true, multiple = false, args = ["all", "prefix"])]
pub struct Prune {
    #[command(flatten)]
    tier: Tier,
    /// Every value
    #[arg(long)]
    all: bool,
    /// Values whose keys start with these hex digits
    #[arg(long, value_name = "HEX")]
    prefix: Option<Prefix>,
    /// Remove them
    #[arg(long)]
    yes: bool,
}

impl Prune {
    /// Removes the values, or says what it would remove.
    pub fn run(self) -> anyhow::Result<()> {
        let found = self.tier.find()?.that_lists()?;
        let prefix = self.prefix.unwrap_or_default();
        let there = look(&found, &prefix, &[])?;
        if !self.yes {
            let (values, bytes) = (there.values, Bytes(there.bytes).rounded());
            let text = format!("{values} values of {bytes} would be removed: say --yes to do it");
            return Err(Refused(text).into());
        }
        let mut session = found.open_to_write()?;
        let (mut removed, mut freed, mut refused) = (Vec::new(), 0_u64, None);
        session.scan(|session, keys| {
            let keys: Vec<Key> = keys.iter().copied().filter(|key| prefix.has(key)).collect();
            for (key, end) in keys.iter().zip(session.delete(&keys)?) {
                match end.status {
                    FOUND => {
                        removed.push(*key);
                        freed += end.bytes;
                    }
                    MISSING => {}
                    code => refused = Some((*key, code)),
                }
            }
            Ok(refused.is_none())
        })?;
        drop(session);
        // Some tiers only note a removal, and carry it out when a worker has finished with the place of the value.
        removed.sort_unstable();
        let left = look(&found, &prefix, &removed)?;
        let gone = removed.len() as u64 - left.still;
        say!("removed {gone} values, {}", Bytes(freed.saturating_sub(left.still_bytes)).rounded());
        if let Some((key, code)) = refused {
            bail!("value {key} cannot be removed: {:?}", ErrorCode(code));
        }
        if left.still > 0 {
            say!(
                "{} are there still or again: a worker is writing where they lie, and then they go with a later prune, or stored \
                 them once more",
                left.still
            );
        }
        if left.values > left.still {
            say!("{} were stored meanwhile", left.values - left.still);
        }
        Ok(())
    }
}

/// The selected values that the tier holds.
#[derive(Default)]
struct There {
    values: u64,
    bytes: u64,
    /// Those of them that were removed before.
    still: u64,
    still_bytes: u64,
}

/// Looks at the selected values. `removed` is sorted. Refuses a configuration under which opening to write would evict.
fn look(found: &ConfiguredTier, prefix: &Prefix, removed: &[Key]) -> anyhow::Result<There> {
    let mut session: Session = found.open_to_read()?;
    let usage = session.usage()?;
    if usage.capacity > 0 && usage.bytes > usage.capacity {
        let (bytes, capacity) = (Bytes(usage.bytes).rounded(), Bytes(usage.capacity).rounded());
        let text = format!(
            "there are {bytes}, and this configuration allows {capacity}: values that you did not name would be evicted; give \
             the workers' configuration with --config"
        );
        return Err(Refused(text).into());
    }
    let mut there = There::default();
    session.scan(|session, keys| {
        let keys: Vec<Key> = keys.iter().copied().filter(|key| prefix.has(key)).collect();
        for (key, end) in keys.iter().zip(session.exists(&keys)?).filter(|(_, end)| end.status == FOUND) {
            (there.values, there.bytes) = (there.values + 1, there.bytes + end.bytes);
            if removed.binary_search(key).is_ok() {
                (there.still, there.still_bytes) = (there.still + 1, there.still_bytes + end.bytes);
            }
        }
        Ok(true)
    })?;
    Ok(there)
}
