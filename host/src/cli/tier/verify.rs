//! `host tier verify`.

use anyhow::bail;
use clap::Args;
use host_plugin_api::tier::{FOUND, MISSING};
use host_plugin_api::{ErrorCode, Key};
use serde::Serialize;

use super::open::Tier;
use super::selected::{Prefix, hex};
use super::session::Session;
use crate::cli::output::{self, say};
use crate::cli::settings::Bytes;

/// What to read.
#[derive(Args, Debug)]
pub struct Verify {
    #[command(flatten)]
    tier: Tier,
    /// Only keys that start with these hex digits
    #[arg(long, value_name = "HEX")]
    prefix: Option<Prefix>,
    /// Bytes of every value, for a plugin that does not tell them
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..))]
    value_bytes: Option<u32>,
    /// One JSON document
    #[arg(long)]
    json: bool,
}

/// Values by how their reading ended.
#[derive(Default, Serialize)]
struct Counts {
    /// Values that came back whole.
    good: u64,
    good_bytes: u64,
    /// Removed or evicted between the listing and the reading.
    missing: u64,
    /// Values that did not come back whole.
    damaged: u64,
    /// What the plugin found damaged by itself, beside those: an index or a record that names no value any more.
    damaged_elsewhere: u64,
    /// Values that could not be read for another reason.
    unread: u64,
    #[serde(skip)]
    json: bool,
    damaged_keys: Vec<String>,
}

/// Most keys that a JSON document names.
const NAMED: usize = 10_000;

impl Verify {
    /// Reads everything and prints the counts.
    pub fn run(self) -> anyhow::Result<()> {
        let prefix = self.prefix.unwrap_or_default();
        let mut session = self.tier.find()?.that_lists()?.open_to_read()?;
        let mut counts = Counts { json: self.json, ..Counts::default() };
        session.scan(|session, keys| {
            let keys: Vec<Key> = keys.iter().copied().filter(|key| prefix.has(key)).collect();
            counts.read(session, &keys, self.value_bytes)?;
            Ok(true)
        })?;
        counts.damaged_elsewhere = session.counted_damaged().saturating_sub(counts.damaged);
        drop(session);
        if self.json {
            output::json(&counts)?;
        } else {
            say!("good       {} values, {}", counts.good, Bytes(counts.good_bytes).rounded());
            say!("missing    {}, removed or evicted meanwhile", counts.missing);
            say!("damaged    {}", counts.damaged);
            if counts.damaged_elsewhere > 0 {
                say!("           and {} records or files that name no whole value", counts.damaged_elsewhere);
            }
            if counts.unread > 0 {
                say!("unread     {}", counts.unread);
            }
        }
        let damaged = counts.damaged + counts.damaged_elsewhere;
        match (damaged, counts.unread) {
            (0, 0) => Ok(()),
            (0, unread) => bail!("{unread} values could not be read"),
            (damaged, 0) => bail!("{damaged} damaged: workers take each for missing, and compute it again"),
            (damaged, unread) => bail!("{damaged} damaged, and {unread} values could not be read"),
        }
    }
}

impl Counts {
    fn read(&mut self, session: &mut Session, keys: &[Key], value_bytes: Option<u32>) -> anyhow::Result<()> {
        let mut values = Vec::with_capacity(keys.len());
        for (key, end) in keys.iter().zip(session.exists(keys)?) {
            let told = Some(end.bytes).filter(|bytes| *bytes > 0);
            match (end.status, told.or(value_bytes.map(u64::from))) {
                (MISSING, _) => self.missing += 1,
                // There, and so broken that it has no length.
                (code, _) if code == ErrorCode::IO.0 => self.damaged(key, 0)?,
                (FOUND, Some(bytes)) => values.push((*key, bytes)),
                (FOUND, None) => {
                    bail!(
                        "the plugin does not tell how long its values are: give --value-bytes if all are of one length"
                    )
                }
                (code, _) => self.unread(key, code)?,
            }
        }
        let ends = session.get(&values)?;
        for ((key, bytes), end) in values.iter().zip(ends) {
            match end.status {
                FOUND => {
                    self.good += 1;
                    self.good_bytes += bytes;
                }
                MISSING => self.missing += 1,
                code if code == ErrorCode::IO.0 => self.damaged(key, *bytes)?,
                code => self.unread(key, code)?,
            }
        }
        Ok(())
    }

    fn damaged(&mut self, key: &Key, bytes: u64) -> anyhow::Result<()> {
        self.damaged += 1;
        if self.damaged_keys.len() < NAMED {
            self.damaged_keys.push(hex(key));
        }
        if !self.json {
            say!("damaged    {} {bytes:>12}", hex(key));
        }
        Ok(())
    }

    fn unread(&mut self, key: &Key, code: i32) -> anyhow::Result<()> {
        self.unread += 1;
        if !self.json {
            say!("unread     {}: {:?}", hex(key), ErrorCode(code));
        }
        Ok(())
    }
}
