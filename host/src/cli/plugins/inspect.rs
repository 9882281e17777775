//! `host plugins inspect`.

use std::path::Path;

use host_plugins::lock::sha256;
use host_plugins::{
    Glibc, NeededVersion, Policy, PreflightError, describe, needed_libraries, needed_versions, preflight,
};
use serde_json::json;

use crate::cli::Refused;
use crate::cli::output::{self, say};

/// Prints what a file says about itself. Runs none of its code.
pub fn run(file: &Path, as_json: bool) -> anyhow::Result<()> {
    // A file that is a plugin is described completely. The verdict says whether it loads here without further flags.
    let manifest = match describe(file) {
        Ok(manifest) => manifest,
        Err(error) if as_json => {
            say!("{}", json!({"usable": false, "reason": error.reason(), "text": error.to_string()}));
            return Err(Refused(format!("{} {error}", file.display())).into());
        }
        Err(error) => return Err(Refused(format!("{} {error}", file.display())).into()),
    };
    let verdict = preflight(file, &Policy::default()).err();
    let refused = verdict.as_ref().map(|error| Refused(format!("{} {error}", file.display())));
    let bytes = std::fs::metadata(file)?.len();
    let (hash, needed, versions) = (sha256(file)?, needed_libraries(file), needed_versions(file));
    let (glibc, here) = (Glibc::needed(&versions), Glibc::here());
    if as_json {
        let all = json!({"usable": verdict.is_none(), "reason": verdict.as_ref().map(PreflightError::reason),
            "text": verdict.as_ref().map(ToString::to_string), "path": file, "bytes": bytes, "sha256": hash,
            "needed_libraries": needed, "needed_versions": versions,
            "glibc": {"needed": glibc.map(|version| version.to_string()), "here": here.map(|version| version.to_string())},
            "manifest": manifest});
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
    if let Some(glibc) = glibc {
        let here = here.map_or_else(|| "has none".to_owned(), |here| format!("has {here}"));
        say!("glibc      {glibc} or newer, this machine {here}");
    }
    for (library, newest) in newest_of_others(&versions) {
        say!("versions   {newest} of {library}");
    }
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

/// For each library other than glibc's, the newest version of each kind that the file needs, for instance `GLIBCXX_3.4.32` of
/// `libstdc++.so.6`. The libraries are not searched: only the system's loader knows which files it takes.
fn newest_of_others(versions: &[NeededVersion]) -> Vec<(String, String)> {
    let numbers = |version: &str| -> Vec<u64> {
        version.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
    };
    let mut newest = std::collections::BTreeMap::new();
    for NeededVersion { library, version } in versions {
        let kind = version.split('_').next().unwrap_or_default();
        if kind == "GLIBC" {
            continue;
        }
        let known = newest.entry((library, kind)).or_insert(version);
        if numbers(version) > numbers(known) {
            *known = version;
        }
    }
    newest.into_iter().map(|((library, _), version)| (on_one_line(library), on_one_line(version))).collect()
}

/// A free text of the file on one line.
fn on_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
