//! Checks names of new crates and plugins.

const LONGEST: usize = 64;

/// Keywords of Rust, and names of crates that a plugin's crate would hide.
const TAKEN: &[&str] = &[
    "abi-stable",
    "abstract",
    "alloc",
    "as",
    "async",
    "await",
    "become",
    "box",
    "break",
    "const",
    "continue",
    "core",
    "crate",
    "do",
    "dyn",
    "else",
    "enum",
    "extern",
    "false",
    "final",
    "fn",
    "for",
    "gen",
    "host",
    "host-plugin-api",
    "if",
    "impl",
    "in",
    "let",
    "loop",
    "macro",
    "match",
    "mod",
    "move",
    "mut",
    "override",
    "priv",
    "proc-macro",
    "pub",
    "ref",
    "return",
    "self",
    "static",
    "std",
    "struct",
    "super",
    "test",
    "trait",
    "true",
    "try",
    "type",
    "typeof",
    "union",
    "unsafe",
    "unsized",
    "use",
    "virtual",
    "where",
    "while",
    "yield",
];

/// Whether a crate, a file and a plugin can have this name.
///
/// # Errors
/// A sentence that says what is allowed.
pub fn check(name: &str) -> Result<(), String> {
    let letters = name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_');
    if !letters || name.len() > LONGEST || !name.starts_with(|c: char| c.is_ascii_lowercase()) {
        return Err(format!(
            "{name:?} cannot be a plugin's name: use a lower-case letter, then lower-case letters, digits, - and _, \
             {LONGEST} at most"
        ));
    }
    if TAKEN.contains(&name.replace('_', "-").as_str()) {
        return Err(format!("{name:?} means something else in Rust: take another name"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_a_crate_a_file_and_a_flag_can_carry() {
        for good in ["wire", "acme-rdma", "a", "nixl_2"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        let long = "x".repeat(LONGEST + 1);
        for bad in ["", "Wire", "2wire", "-a", "a/b", "../a", "a b", "a,b", "a.b", "dü", "\"", &long] {
            assert!(check(bad).is_err_and(|text| text.contains("lower-case letter")), "{bad}");
        }
        for taken in ["fn", "test", "host_plugin_api", "host-plugin-api", "std"] {
            assert!(check(taken).is_err_and(|text| text.contains("something else")), "{taken}");
        }
    }
}
