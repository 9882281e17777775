//! Suggests a setting for an unknown key in the file.

use clap::{Args, Command};

use super::Settings;

/// Keys for tables. They have no flags.
const TABLES: [&str; 4] = ["hicache", "synthetic", "plugin", "companion"];
/// The least likeness of two names for a suggestion. Clap uses the same for flags.
const LEAST_ALIKE: f64 = 0.7;

/// A sentence for the first unknown key of a file, if a setting has a similar name.
pub(super) fn hint(file: &str) -> Option<String> {
    let file: toml::Table = toml::from_str(file).ok()?;
    if file.get("plugins").is_some_and(toml::Value::is_table) {
        return Some(
            "plugins is a list of names; did you mean [plugin.NAME], a plugin's own table?".to_owned(),
        );
    }
    let flags = Settings::augment_args(Command::new("host"));
    let known = flags.get_arguments().filter(|flag| !flag.is_hide_set()).filter_map(clap::Arg::get_long);
    let known: Vec<&str> = known.filter(|name| *name != "config").chain(TABLES).collect();
    file.keys().filter(|key| !known.contains(&key.as_str())).find_map(|key| {
        let written = key.replace('_', "-").to_lowercase();
        let alike = known.iter().map(|name| (strsim::jaro(&written, name), name));
        let (likeness, name) = alike.max_by(|(left, _), (right, _)| left.total_cmp(right))?;
        (likeness >= LEAST_ALIKE).then(|| format!("{key} is not a setting; did you mean {name}?"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_nearly_a_setting_is_answered_with_it() {
        for (file, suggested) in [
            ("port = 1\nkv_memory = \"1GiB\"", "kv_memory is not a setting; did you mean kv-memory?"),
            ("prot = 1", "did you mean port?"),
            ("[hicahce]\nwait-ms = 1", "did you mean hicache?"),
            ("[plugins.shm]\nrails = 2", "did you mean [plugin.NAME]"),
        ] {
            assert!(hint(file).unwrap().contains(suggested), "{file}: {:?}", hint(file));
        }
        for file in ["xyzzy = 1", "port = \"one\"", "port = ", "plugins = [\"shm\"]"] {
            assert_eq!(hint(file), None, "{file}");
        }
    }
}
