//! One key of a plugin's configuration, from the command line.

use host_plugins::Manifest;
use toml::{Table, Value};

use crate::cli::Refused;

/// Sets one key from KEY=VALUE, which is the end of the argument `given` to `--set`. Dots in the key lead into tables. If the
/// manifest declares a string, the value is taken as it is. Any other value is parsed as TOML, and is a string if that fails.
///
/// # Errors
/// When the text is not of the form KEY=VALUE, or a dot leads into something that is no table.
pub fn set_key(
    config: &mut Table,
    manifest: Option<&Manifest>,
    pair: &str,
    given: &str,
) -> Result<(), Refused> {
    let wrong = |why: &str| Refused(format!("--set {given:?} {why}"));
    let (key, text) = pair.split_once('=').ok_or_else(|| wrong("is not of the form KEY=VALUE"))?;
    let mut parts: Vec<&str> = key.trim().split('.').collect();
    let last = parts.pop().filter(|last| !last.is_empty() && !parts.contains(&""));
    let last = last.ok_or_else(|| wrong("names no key before the ="))?;
    let is_string = parts.is_empty()
        && manifest
            .and_then(|manifest| manifest.config.get(last))
            .is_some_and(|known| known.kind == "string");
    let read = || format!("value = {text}").parse::<Table>().ok()?.remove("value");
    let value = if is_string { None } else { read() };
    let mut table = config;
    for part in parts {
        let inner = table.entry(part).or_insert_with(|| Value::Table(Table::new()));
        table =
            inner.as_table_mut().ok_or_else(|| wrong(&format!("leads into {part}, which is no table")))?;
    }
    table.insert(last.to_owned(), value.unwrap_or_else(|| Value::String(text.to_owned())));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_value_has_the_type_that_it_looks_like_unless_the_manifest_wants_a_string() {
        let manifest = Manifest::parse(
            "manifest_version = 1\n[plugin]\nid = \"a.b\"\nname = \"b\"\nversion = \"1.0.0\"\n[api]\nversion = \"1.0.0\"\n\
             [build]\npanic = \"unwind\"\ntarget = \"t\"\nrustc = \"r\"\nsymbol = \"s\"\n\
             [config.dir]\ntype = \"string\"\n[config.threads]\ntype = \"integer\"",
        )
        .unwrap();
        let mut config = Table::new();
        for pair in ["dir=5", "threads=5", "storage.direct=true", "storage.directory=/a=b", "library=/x y"] {
            set_key(&mut config, Some(&manifest), pair, pair).unwrap();
        }
        let expected: Table =
            "dir = \"5\"\nthreads = 5\nlibrary = \"/x y\"\n[storage]\ndirect = true\ndirectory = \"/a=b\""
                .parse()
                .unwrap();
        assert_eq!(config, expected);
        for (pair, why) in [
            ("dir", "KEY=VALUE"),
            ("=3", "names no key"),
            ("a..b=3", "names no key"),
            ("dir.x=1", "no table"),
        ] {
            let said = set_key(&mut config, Some(&manifest), pair, pair).unwrap_err().to_string();
            assert!(said.contains(why), "{pair}: {said}");
        }
    }
}
