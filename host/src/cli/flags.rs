//! Writes the page of the documentation about flags, from the program's own definitions.

use clap::{Arg, Args as _};

use super::settings::Settings;

/// `docs/flags.md`: a row for each flag, in the order of `host --help`.
#[must_use]
pub fn markdown() -> String {
    let mut command = Settings::augment_args(clap::Command::new("host").disable_help_flag(true));
    // Only after this call the command knows which flags take values.
    command.build();
    let rows: Vec<String> = command.get_arguments().filter(|flag| !flag.is_hide_set()).map(row).collect();
    format!(
        "# Flags\n\nWhat `host` serves with. Each is also a key of the file that `--config` names, without the dashes; flags win \
         over the file. `--no-decode-radix-cache`, `--no-prefill-radix-cache` and `--no-hierarchical-cache` are `NAME = false` \
         there, and `--set PLUGIN.KEY=VALUE` is `KEY = VALUE` in `[plugin.PLUGIN]`.\n\n| Flag | |\n| --- | --- |\n{}",
        rows.concat()
    )
}

fn row(flag: &Arg) -> String {
    let name = flag.get_long().unwrap_or_default();
    let takes_value = flag.get_num_args().is_none_or(|count| count.takes_values());
    let values = flag.get_value_names().filter(|_| takes_value).unwrap_or_default();
    let value = values.first().map(|value| format!(" {value}")).unwrap_or_default();
    let help = flag.get_long_help().or_else(|| flag.get_help()).map(ToString::to_string).unwrap_or_default();
    // clap gives a flag without a value the values true and false, which the page leaves out.
    let possible = if takes_value { flag.get_possible_values() } else { Vec::new() };
    let words: Vec<String> = possible
        .iter()
        .filter_map(|value| Some(format!("`{}` ({})", value.get_name(), value.get_help()?)))
        .collect();
    let possible = if words.is_empty() { String::new() } else { format!(": {}", words.join(", ")) };
    let text = format!("{help}{possible}").replace('\n', " ").replace('|', "\\|");
    format!("| `--{name}{}` | {text} |\n", value.replace('|', "\\|"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_flags_is_what_the_program_says() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/flags.md");
        let markdown = markdown();
        if std::env::var_os("WRITE_DOCS").is_some() {
            std::fs::write(page, &markdown).unwrap();
        }
        let written = std::fs::read_to_string(page).unwrap_or_default();
        assert!(
            written == markdown,
            "docs/flags.md is not what the program says; write it anew: WRITE_DOCS=1 cargo test -p host --lib flags"
        );
        assert!(markdown.contains("| `--kv-memory BYTES` |") && markdown.contains("`aggregated`"));
        assert!(!markdown.contains("listen-fds"), "a hidden flag");
    }
}
