//! `host tier stat`.

use clap::Args;
use serde_json::json;

use super::open::Tier;
use crate::cli::output::{self, say};
use crate::cli::settings::Bytes;

/// What to look at.
#[derive(Args, Debug)]
pub struct Stat {
    #[command(flatten)]
    tier: Tier,
    /// One JSON document
    #[arg(long)]
    json: bool,
}

impl Stat {
    /// Prints the usage and limits of the tier.
    pub fn run(self) -> anyhow::Result<()> {
        let found = self.tier.find()?;
        let session = found.open_to_read()?;
        let (usage, limits, damaged) = (session.usage()?, session.limits(), session.counted_damaged());
        let plugin = &found.plugin().plugin;
        let capacity = Some(usage.capacity).filter(|capacity| *capacity > 0);
        if self.json {
            let all = json!({"plugin": plugin.name, "values": usage.values, "bytes": usage.bytes,
                "capacity": capacity, "largest_value": limits.max_value, "damaged": damaged});
            output::json(&all)?;
            return Ok(());
        }
        say!("plugin     {} {} ({})", plugin.name, plugin.version, plugin.id);
        say!("values     {}", usage.values);
        say!("bytes      {} ({})", usage.bytes, Bytes(usage.bytes).rounded());
        match capacity {
            Some(capacity) => {
                let used = usage.bytes as f64 * 100.0 / capacity as f64;
                say!("capacity   {capacity} ({}), {used:.1} % of it used", Bytes(capacity).rounded());
            }
            None => say!("capacity   the plugin knows no bound"),
        }
        say!("largest    a value may have {}", Bytes(limits.max_value).rounded());
        if damaged > 0 {
            say!(
                "damaged    {damaged}, found while the tier was opened; host tier verify reads the values, too"
            );
        }
        Ok(())
    }
}
