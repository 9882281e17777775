//! `host plugins inspect`.

use std::path::Path;

use serde_json::json;

use crate::cli::Refused;
use crate::plugins::lock::sha256;
use crate::plugins::{needed_libraries, preflight};

/// Prints what a file says of itself. Runs none of it.
pub fn run(file: &Path, as_json: bool) -> anyhow::Result<()> {
    let manifest = match preflight(file) {
        Ok(manifest) => manifest,
        Err(error) if as_json => {
            println!("{}", json!({"usable": false, "reason": error.reason(), "text": error.to_string()}));
            return Err(Refused(format!("{} {error}", file.display())).into());
        }
        Err(error) => return Err(Refused(format!("{} {error}", file.display())).into()),
    };
    let bytes = std::fs::metadata(file)?.len();
    let (hash, needed) = (sha256(file)?, needed_libraries(file));
    if as_json {
        let all = json!({"usable": true, "path": file, "bytes": bytes, "sha256": hash,
            "needed_libraries": needed, "manifest": manifest});
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(());
    }
    let (plugin, build) = (&manifest.plugin, &manifest.build);
    println!("{} {} ({})", plugin.name, plugin.version, plugin.id);
    if !plugin.description.is_empty() {
        println!("  {}", plugin.description);
    }
    println!("file       {}, {bytes} bytes", file.display());
    println!("sha256     {hash}");
    println!("api        {}, this host speaks {}", manifest.api.version, host_plugin_api::VERSION);
    println!("built      for {} by rustc {}, panic = {}", build.target, build.rustc, build.panic);
    println!("needs      {}", if needed.is_empty() { "no libraries".to_owned() } else { needed.join(", ") });
    if let Some(threads) = &plugin.threads {
        println!("threads    {threads}");
    }
    for role in &manifest.roles {
        println!("role       {}: memory {}", role.kind, role.memory.join(", "));
        println!("           can {}", role.capabilities.join(", "));
    }
    for (key, of) in &manifest.config {
        let default = of.default.as_ref().map(|value| format!(", default {value}")).unwrap_or_default();
        println!("config     {key}: {}{default}. {}", of.kind, of.doc);
    }
    println!("verdict    usable");
    Ok(())
}
