//! A fake for tests: the tier in memory, whose manifest says that values outlive the process.

use host_plugin_api::{Opening, Result};
use host_plugin_memory::MemoryTier;

/// Opens an instance.
///
/// # Errors
/// As the tier in memory does.
pub fn open(opening: &Opening) -> Result<MemoryTier> {
    host_plugin_memory::open(opening)
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    tier: open,
}
