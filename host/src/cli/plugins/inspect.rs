//! `host plugins inspect`.

use std::path::Path;

use host_plugins::lock::sha256;
use host_plugins::{Policy, PreflightError, needed_libraries, preflight};
use serde_json::json;

use crate::cli::Refused;
use crate::cli::output::{self, say};

/// Prints what a file says of itself. Runs none of it.
pub fn run(file: &Path, as_json: bool) -> anyhow::Result<()> {
    // Everything is said of a file that is a plugin; whether it loads without further flags is the verdict.
    let accepting = Policy { insecure_permissions: true, panic_abort: true };
    let manifest = match preflight(file, accepting) {
        Ok(manifest) => manifest,
        Err(error) if as_json => {
            say!("{}", json!({"usable": false, "reason": error.reason(), "text": error.to_string()}));
            return Err(Refused(format!("{} {error}", file.display())).into());
        }
        Err(error) => return Err(Refused(format!("{} {error}", file.display())).into()),
    };
    let verdict = preflight(file, Policy::default()).err();
    let refused = verdict.as_ref().map(|error| Refused(format!("{} {error}", file.display())));
    let bytes = std::fs::metadata(file)?.len();
    let (hash, needed) = (sha256(file)?, needed_libraries(file));
    if as_json {
        let all = json!({"usable": verdict.is_none(), "reason": verdict.as_ref().map(PreflightError::reason),
            "text": verdict.as_ref().map(ToString::to_string), "path": file, "bytes": bytes, "sha256": hash,
            "needed_libraries": needed, "manifest": manifest});
        output::json(&all)?;
        return refused.map_or(Ok(()), |refused| Err(refused.into()));
    }
    let (plugin, build) = (&manifest.plugin, &manifest.build);
    say!("{} {} ({})", plugin.name, plugin.version, plugin.id);
    if !plugin.description.is_empty() {
        say!("  {}", on_one_line(&plugin.description));
    }
    say!("file       {}, {bytes} bytes", file.display());
    say!("sha256     {hash}");
    say!("api        {}, this host speaks {}", manifest.api.version, host_plugin_api::VERSION);
    match &build.compiler {
        Some(compiler) => say!("built      for {} by {compiler}", build.target),
        None => say!("built      for {} by rustc {}, panic = {}", build.target, build.rustc, build.panic),
    }
    say!("needs      {}", if needed.is_empty() { "no libraries".to_owned() } else { needed.join(", ") });
    if let Some(threads) = &plugin.threads {
        say!("threads    {threads}");
    }
    for role in &manifest.roles {
        say!("role       {}: memory {}", role.kind, role.memory.join(", "));
        say!("           can {}", role.capabilities.join(", "));
    }
    for companion in &manifest.companions {
        let command = [std::slice::from_ref(&companion.program), &companion.arguments].concat().join(" ");
        say!("companion  {}: {}", on_one_line(&companion.name), on_one_line(&command));
    }
    for (key, of) in &manifest.config {
        let default = of
            .default
            .as_ref()
            .map(|value| format!(", default {}", on_one_line(&value.to_string())))
            .unwrap_or_default();
        say!("config     {key}: {}{default}. {}", of.kind, on_one_line(&of.doc));
    }
    match refused {
        None => {
            say!("verdict    usable");
            Ok(())
        }
        Some(refused) => {
            say!("verdict    not usable as it is");
            Err(refused.into())
        }
    }
}

/// Prose of the file on one line.
fn on_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
