//! Applies the limits of `[hicache]` and checks their bounds.

use std::time::Duration;

use host_core::hierarchy::{CostModel, HierarchyConfig};

use crate::cli::Refused;
use crate::cli::settings::HicacheSettings;

/// Longest wait that can be set, in milliseconds: longer than any request lasts.
const LONGEST_MS: u64 = 600_000;
/// Longest time in `[hicache.costs]`, in microseconds: an hour.
const LONGEST_COST_US: u64 = 3_600_000_000;
/// Limit of the pages in one batch.
const MOST_BATCH: u64 = 1 << 16;

/// `config` with the limits that are set.
///
/// # Errors
/// When a value is out of its bounds. The error has the key and the bounds.
pub fn apply(set: &HicacheSettings, mut config: HierarchyConfig) -> Result<HierarchyConfig, Refused> {
    let counts = u64::from(u32::MAX);
    for (key, value, least, most, limit) in [
        ("fewest-pages", set.fewest_pages, 1, counts, &mut config.fewest_pages),
        ("write-after-hits", set.write_after_hits, 1, counts, &mut config.write_after_hits),
        ("write-back-ahead-pages", set.write_back_ahead_pages, 0, counts, &mut config.write_back_ahead),
        ("batch-pages", set.batch_pages, 1, MOST_BATCH, &mut config.batch_pages),
        ("queued-write-pages", set.queued_write_pages, 0, counts, &mut config.queued_writes),
    ] {
        if let Some(value) = within(key, value, least, most)? {
            *limit = u32::try_from(value).unwrap_or(u32::MAX);
        }
    }
    for (key, value, least, limit) in [
        ("wait-ms", set.wait_ms, 0, &mut config.wait_base),
        ("wait-ms-per-1024-tokens", set.wait_ms_per_1024_tokens, 0, &mut config.wait_per_1024_tokens),
        ("longest-wait-ms", set.longest_wait_ms, 1, &mut config.longest_wait),
    ] {
        if let Some(value) = within(key, value, least, LONGEST_MS)? {
            *limit = Duration::from_millis(value);
        }
    }
    for (key, value, limit) in [
        ("read-bytes", set.read_bytes, &mut config.read_bytes),
        ("write-bytes", set.write_bytes, &mut config.write_bytes),
        ("copy-bytes", set.copy_bytes, &mut config.copy_bytes),
    ] {
        if let Some(value) = within(key, value.map(|value| value.0), 1, u64::MAX)? {
            *limit = value;
        }
    }
    if let Some(costs) = &set.costs {
        let time = |key, value| {
            let value = within(key, Some(value), 0, LONGEST_COST_US)?;
            Ok::<_, Refused>(Duration::from_micros(value.unwrap_or_default()))
        };
        config.costs = Some(CostModel {
            compute_token: time("costs.compute-token-us", costs.compute_token_us)?,
            send_page: time("costs.send-page-us", costs.send_page_us)?,
            copy_page: time("costs.copy-page-us", costs.copy_page_us)?,
            read: time("costs.read-us", costs.read_us)?,
            read_page: time("costs.read-page-us", costs.read_page_us)?,
        });
    }
    Ok(config)
}

fn within(key: &str, value: Option<u64>, least: u64, most: u64) -> Result<Option<u64>, Refused> {
    match value {
        Some(value) if value < least || value > most => {
            Err(Refused(format!("[hicache] {key} is {value}: it must be {least} to {most}")))
        }
        value => Ok(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_names_the_defaults() {
        let page = include_str!("../../../../docs/serving.md");
        let table = page.split("    [hicache]\n").nth(1).unwrap().split("\n\n").next().unwrap();
        let standard = HierarchyConfig::new(8, 1000, Vec::new());
        let set: HicacheSettings = toml::from_str(table).unwrap();
        assert!(set.wait_ms.is_some() && set.queued_write_pages.is_some());
        assert_eq!(apply(&set, standard.clone()).unwrap(), standard);
    }

    #[test]
    fn what_is_set_is_taken_with_its_unit_and_nonsense_is_refused_by_its_key() {
        let standard = HierarchyConfig::new(8, 1000, Vec::new());
        let parse = |text: &str| toml::from_str::<HicacheSettings>(text).unwrap();
        assert_eq!(apply(&HicacheSettings::default(), standard.clone()).unwrap(), standard);
        let set = parse("wait-ms = 5\nlongest-wait-ms = 70\nbatch-pages = 9\nread-bytes = \"2MiB\"\n");
        let expected = HierarchyConfig {
            wait_base: Duration::from_millis(5),
            longest_wait: Duration::from_millis(70),
            batch_pages: 9,
            read_bytes: 2 << 20,
            ..standard.clone()
        };
        assert_eq!(apply(&set, standard.clone()).unwrap(), expected);
        let costs = |read: u64| {
            format!(
                "costs = {{ compute-token-us = 7, send-page-us = 6, copy-page-us = 5, read-us = {read}, read-page-us = 3 }}"
            )
        };
        let given = apply(&parse(&costs(4)), standard.clone()).unwrap().costs.unwrap();
        let micros = [given.compute_token, given.send_page, given.copy_page, given.read, given.read_page];
        assert_eq!(micros.map(|time| time.as_micros()), [7, 6, 5, 4, 3]);
        assert!(toml::from_str::<HicacheSettings>("costs = { read-us = 4 }").is_err(), "all or none");
        for (text, says) in [
            (costs(3_600_000_001).as_str(), "costs.read-us is 3600000001: it must be 0 to 3600000000"),
            ("batch-pages = 0", "batch-pages is 0: it must be 1 to 65536"),
            ("write-after-hits = 5000000000", "write-after-hits"),
            ("wait-ms = 600001", "it must be 0 to 600000"),
            ("copy-bytes = \"0\"", "copy-bytes is 0"),
        ] {
            let refused = apply(&parse(text), standard.clone()).unwrap_err().to_string();
            assert!(refused.contains(says) && refused.contains("[hicache]"), "{text}: {refused}");
        }
        let refused = toml::from_str::<HicacheSettings>("write-bytes = \"much\"").unwrap_err().to_string();
        assert!(refused.contains("write-bytes") && refused.contains("\"much\" is not a size"), "{refused}");
        assert!(toml::from_str::<HicacheSettings>("wait-s = 1").is_err());
    }
}
