//! `host tier verify`.

use anyhow::bail;
use clap::Args;
use host_plugin_api::tier::{FOUND, MISSING};
use host_plugin_api::{ErrorCode, Key};
use serde::Serialize;

use super::last_warning;
use super::open::Tier;
use super::selected::Prefix;
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

/// Counts of values by the result of reading them.
#[derive(Default, Serialize)]
struct Counts {
    /// Values that were read completely and match their seal.
    good: u64,
    good_bytes: u64,
    /// Removed or evicted between the listing and the reading.
    missing: u64,
    /// Values that differ from what a worker stored.
    damaged: u64,
    /// Damage that the plugin found in other places: an index, or a record that belongs to no value any more.
    damaged_elsewhere: u64,
    /// Values that could not be read.
    unread: u64,
    /// Number of `damaged` values that the plugin found by itself.
    #[serde(skip)]
    counted: u64,
    #[serde(skip)]
    json: bool,
    damaged_keys: Vec<String>,
    unread_keys: Vec<Unread>,
}

/// A value that could not be read.
#[derive(Serialize)]
struct Unread {
    key: String,
    code: String,
    /// The plugin's last warning.
    text: Option<String>,
}

/// A value whose reading ended with an error code.
struct Failed {
    key: Key,
    /// Length of the value, or 0 if it is unknown.
    bytes: u64,
    code: i32,
}

/// Limit of the keys that a list in a JSON document names.
const NAMED: usize = 10_000;
/// Limit of the values of one scan step that are read again to find out why they could not be read.
const READ_AGAIN: usize = 100;

impl Verify {
    /// Reads all selected values and prints the counts.
    pub fn run(self) -> anyhow::Result<()> {
        let prefix = self.prefix.unwrap_or_default();
        let mut session = self.tier.find()?.that_lists()?.open_to_read()?;
        let mut counts = Counts { json: self.json, ..Counts::default() };
        session.scan(|session, keys| {
            let keys: Vec<Key> = keys.iter().copied().filter(|key| prefix.has(key)).collect();
            counts.read(session, &keys, self.value_bytes)?;
            Ok(true)
        })?;
        counts.damaged_elsewhere = session.counted_damaged().saturating_sub(counts.counted);
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
        let (mut values, mut failed) = (Vec::with_capacity(keys.len()), Vec::new());
        let before = session.counted_damaged();
        for (key, end) in keys.iter().zip(session.exists(keys)?) {
            let told = Some(end.bytes).filter(|bytes| *bytes > 0);
            match (end.status, told.or(value_bytes.map(u64::from))) {
                (MISSING, _) => self.missing += 1,
                (FOUND, Some(bytes)) => values.push((*key, bytes)),
                (FOUND, None) => {
                    bail!(
                        "the plugin does not tell how long its values are: give --value-bytes if all are of one length"
                    )
                }
                (code, bytes) => failed.push(Failed { key: *key, bytes: bytes.unwrap_or(0), code }),
            }
        }
        let ends = session.get(&values)?;
        for ((key, bytes), end) in values.iter().zip(ends) {
            match (end.status, end.damage) {
                (FOUND, None) => self.good(*bytes),
                (FOUND, Some(damage)) => self.damaged(key, *bytes, &damage.to_string())?,
                (MISSING, _) => self.missing += 1,
                (code, _) => failed.push(Failed { key: *key, bytes: *bytes, code }),
            }
        }
        let counted = session.counted_damaged().saturating_sub(before);
        self.tell_apart(session, &failed, counted)
    }

    /// Decides for values that ended with error codes whether they are damaged or could not be read. The plugin counted `counted`
    /// of them as damaged.
    fn tell_apart(&mut self, session: &mut Session, failed: &[Failed], counted: u64) -> anyhow::Result<()> {
        let is_all = counted >= failed.len() as u64;
        for (place, of) in failed.iter().enumerate() {
            if is_all {
                self.found_by_plugin(of)?;
            } else if place < READ_AGAIN && of.bytes > 0 {
                self.read_again(session, of, counted > 0)?;
            } else {
                self.unread(&of.key, of.code, last_warning::take())?;
            }
        }
        Ok(())
    }

    /// Reads a value again, alone, so that the plugin's counter and warnings refer to it. `some` is true if some values of the
    /// first reading were damaged. A plugin may have removed them then.
    fn read_again(&mut self, session: &mut Session, of: &Failed, some: bool) -> anyhow::Result<()> {
        let _earlier = last_warning::take();
        let before = session.counted_damaged();
        let end = session.get(&[(of.key, of.bytes)])?.first().copied().unwrap_or_default();
        match (end.status, end.damage) {
            (FOUND, None) => self.good(of.bytes),
            (FOUND, Some(damage)) => self.damaged(&of.key, of.bytes, &damage.to_string())?,
            (MISSING, _) if some => self.found_by_plugin(of)?,
            (MISSING, _) => self.missing += 1,
            _ if session.counted_damaged() > before => {
                // The plugin has counted this value twice now.
                self.counted += 1;
                self.found_by_plugin(of)?;
            }
            (code, _) => self.unread(&of.key, code, last_warning::take())?,
        }
        Ok(())
    }

    fn good(&mut self, bytes: u64) {
        self.good += 1;
        self.good_bytes += bytes;
    }

    fn found_by_plugin(&mut self, of: &Failed) -> anyhow::Result<()> {
        self.counted += 1;
        self.damaged(&of.key, of.bytes, "the plugin counts it as damaged")
    }

    fn damaged(&mut self, key: &Key, bytes: u64, why: &str) -> anyhow::Result<()> {
        self.damaged += 1;
        if self.damaged_keys.len() < NAMED {
            self.damaged_keys.push(key.to_string());
        }
        if !self.json {
            say!("damaged    {key} {bytes:>12}: {why}");
        }
        Ok(())
    }

    fn unread(&mut self, key: &Key, code: i32, text: Option<String>) -> anyhow::Result<()> {
        self.unread += 1;
        let code = ErrorCode(code).name().to_owned();
        if !self.json {
            let said = text.as_deref().map(|text| format!(": {text}")).unwrap_or_default();
            say!("unread     {key} {code}{said}");
        }
        if self.unread_keys.len() < NAMED {
            self.unread_keys.push(Unread { key: key.to_string(), code, text });
        }
        Ok(())
    }
}
