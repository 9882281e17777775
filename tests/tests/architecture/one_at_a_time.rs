//! Where tests start libraries and programs of other projects, and which of these places `cargo xtask test` runs one at a time.

use std::path::Path;

use proc_macro2::{TokenStream, TokenTree};

/// The name of modules whose tests run one at a time. The names of such test programs begin with it.
const EXTERNAL: &str = "external";
/// Fixtures of `host_tests` for NIXL, Mooncake, a pool of Mooncake's store, and moto.
const FIXTURES: [&str; 4] = ["nixl", "mooncake", "Pool", "Bucket"];

/// Whether all tests of a file run one at a time. `path` begins in the folder `tests` of a crate.
pub fn is_external(path: &Path) -> bool {
    let path = path.with_extension("");
    let names: Vec<_> = path.iter().map(|name| name.to_string_lossy()).collect();
    let program = names.first().is_some_and(|program| program.starts_with(EXTERNAL));
    program || names.iter().any(|module| module == EXTERNAL)
}

/// The lines of calls into the fixtures, such as `nixl::config()`: those outside of modules named `external`, and those in them.
pub fn calls(tokens: &TokenStream) -> (Vec<usize>, Vec<usize>) {
    let (mut outside, mut inside) = (Vec::new(), Vec::new());
    look(tokens, &mut outside, &mut inside);
    (outside, inside)
}

/// Adds the lines of calls to `here`, and of those in modules named `external` to `there`.
fn look(tokens: &TokenStream, here: &mut Vec<usize>, there: &mut Vec<usize>) {
    let tokens: Vec<TokenTree> = tokens.clone().into_iter().collect();
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Group(group) => {
                if at >= 2 && is_word(&tokens[at - 2], "mod") && is_word(&tokens[at - 1], EXTERNAL) {
                    let mut all = Vec::new();
                    look(&group.stream(), &mut all, there);
                    there.extend(all);
                } else {
                    look(&group.stream(), here, there);
                }
            }
            TokenTree::Ident(word) => {
                let is_call = match &tokens[at + 1..] {
                    [TokenTree::Punct(one), TokenTree::Punct(two), TokenTree::Ident(_), next, ..] => {
                        one.as_char() == ':' && two.as_char() == ':' && matches!(next, TokenTree::Group(_))
                    }
                    _ => false,
                };
                if is_call && FIXTURES.iter().any(|fixture| word == fixture) {
                    here.push(word.span().start().line);
                }
            }
            _ => {}
        }
    }
}

fn is_word(token: &TokenTree, wanted: &str) -> bool {
    matches!(token, TokenTree::Ident(word) if word == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_told_apart_by_the_module_around_them() {
        let text = "use host_tests::{mooncake, nixl};\nfn f() {\n let a = nixl::config()?;\n host_tests::s3::Bucket::new();\n}\n\
                    mod external {\n fn g() { mooncake::config(); }\n mod h { fn i() { Pool::new() } }\n}\n\
                    mod externals { fn j() { (nixl::library(), PagePool::new()) } }";
        assert_eq!(calls(&text.parse().unwrap()), (vec![3, 4, 10], vec![7, 8]));
    }

    #[test]
    fn files_run_one_at_a_time_as_a_program_or_as_a_module() {
        for path in ["external/checks.rs", "external_nixl/main.rs", "external.rs", "walk/external.rs"] {
            assert!(is_external(Path::new(path)), "{path}");
        }
        for path in ["walk/main.rs", "walk/externals.rs", "walk/external_nixl.rs"] {
            assert!(!is_external(Path::new(path)), "{path}");
        }
    }
}
