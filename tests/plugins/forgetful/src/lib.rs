//! A fake for tests: the tier in memory, with a wrong manifest that says that values outlive the process.

use host_plugin_api::{Opening, Result};
use host_plugin_memory::MemoryTier;

/// Opens an instance.
///
/// # Errors
/// Those of the tier in memory.
pub fn open(opening: &Opening) -> Result<MemoryTier> {
    host_plugin_memory::open(opening)
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    tier: open,
}
