//! `host tier prune`.

use anyhow::bail;
use clap::Args;
use host_plugin_api::tier::{FOUND, MISSING};
use host_plugin_api::{ErrorCode, Key};

use super::open::{Found, Tier};
use super::selected::{Prefix, hex};
use super::session::Session;
use super::shown;
use crate::cli::Refused;
use crate::cli::output::say;

/// What `--help` says below the flags.
pub const ABOUT: &str = "Without --yes it says what would go, and removes nothing. It may run beside workers, which compute again \
    what they miss. Give it the workers' own configuration (--config): limits smaller than theirs would evict more than was \
    asked for. Tiers do not tell how old a value is, so that values cannot be chosen by age.";

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
    /// Removes, or says what would go.
    pub fn run(self) -> anyhow::Result<()> {
        let found = self.tier.find()?.that_lists()?;
        let prefix = self.prefix.unwrap_or_default();
        let (values, bytes) = look(&found, &prefix)?;
        if !self.yes {
            let text = format!("{values} values of {} would be removed: say --yes to do it", shown(bytes));
            return Err(Refused(text).into());
        }
        let mut session = found.open_to_write()?;
        let (mut removed, mut freed, mut refused) = (0_u64, 0_u64, None);
        session.scan(|session, keys| {
            let keys: Vec<Key> = keys.iter().copied().filter(|key| prefix.has(key)).collect();
            for (key, end) in keys.iter().zip(session.delete(&keys)?) {
                match end.status {
                    FOUND => (removed, freed) = (removed + 1, freed + end.bytes),
                    MISSING => {}
                    code => refused = Some((*key, code)),
                }
            }
            Ok(refused.is_none())
        })?;
        drop(session);
        say!("removed {removed} values, {}", shown(freed));
        if let Some((key, code)) = refused {
            bail!("value {} cannot be removed: {:?}", hex(&key), ErrorCode(code));
        }
        let (left, _) = look(&found, &prefix)?;
        if left > 0 {
            say!(
                "{left} are there: a worker stored them meanwhile, or is writing where they lie, and then they go with a later prune"
            );
        }
        Ok(())
    }
}

/// How many values are meant, and their bytes. Refuses a configuration under which opening to write would evict.
fn look(found: &Found, prefix: &Prefix) -> anyhow::Result<(u64, u64)> {
    let mut session: Session = found.open_to_read()?;
    let usage = session.usage()?;
    if usage.capacity > 0 && usage.bytes > usage.capacity {
        let (bytes, capacity) = (shown(usage.bytes), shown(usage.capacity));
        let text = format!(
            "there are {bytes}, and this configuration allows {capacity}: values that you did not name would be evicted; give \
             the workers' configuration with --config"
        );
        return Err(Refused(text).into());
    }
    let (mut values, mut bytes) = (0, 0);
    session.scan(|session, keys| {
        let keys: Vec<Key> = keys.iter().copied().filter(|key| prefix.has(key)).collect();
        for end in session.exists(&keys)?.iter().filter(|end| end.status == FOUND) {
            (values, bytes) = (values + 1, bytes + end.bytes);
        }
        Ok(true)
    })?;
    Ok((values, bytes))
}
