//! Describes how two layouts differ, in one line: the place, what the host has there, and what the plugin has there.
//!
//! The layout check itself prints whole types, a thousand lines of them, with the cause in the last three.

use std::fmt::Display;

use abi_stable::abi_stability::abi_checking::{
    AbiInstability, AbiInstabilityError, AbiInstabilityErrors, ExpectedFound,
};
use abi_stable::type_layout::TLFieldOrFunction;

/// Describes the deepest difference and the path to it.
///
/// `host_is_found` says that the host's layout was the second of the two that were compared.
pub(super) fn one_line(errors: &AbiInstabilityErrors, host_is_found: bool) -> String {
    let Some(deepest) = errors.errors.iter().max_by_key(|error| error.stack_trace.len()) else {
        return "no reason given".to_owned();
    };
    // An inserted field moves all fields after it. The first two causes are enough to tell which field it is.
    let mut causes: Vec<String> =
        deepest.errs.iter().take(2).map(|cause| describe(cause, host_is_found)).collect();
    if let Some(more) = deepest.errs.len().checked_sub(2).filter(|more| *more > 0) {
        causes.push(format!("and {more} more differences"));
    }
    shortened(&format!("{}: {}", path(deepest), causes.join("; ")), 600)
}

/// Describes what two plugins have in the same place. The host has neither.
pub(super) fn between_plugins(errors: &AbiInstabilityErrors) -> String {
    let causes = errors.errors.iter().flat_map(|error| error.errs.iter());
    let both: Vec<String> = causes
        .take(2)
        .map(|cause| match cause {
            AbiInstability::UnexpectedField(pair) => {
                format!("{} in one, {} in the other", pair.found.name(), pair.expected.name())
            }
            other => format!("{other:?}"),
        })
        .collect();
    shortened(&both.join("; "), 300)
}

/// Names of the types, methods and fields from the root to the difference, without the names that every path has.
fn path(error: &AbiInstabilityError) -> String {
    let mut names: Vec<String> = Vec::new();
    for step in &error.stack_trace {
        let name = match &step.found {
            TLFieldOrFunction::Field(field) => {
                let of = field.layout().name();
                let own = field.name();
                // Numbered fields belong to containers. The name of the contained type says more.
                if own.starts_with("field_") || own.parse::<u32>().is_ok() {
                    of.to_owned()
                } else {
                    own.to_owned()
                }
            }
            TLFieldOrFunction::Function(function) => function.name.as_str().to_owned(),
        };
        let dull = [
            "RSome",
            "ROption",
            "call",
            "AFunctionPointer",
            "ROk",
            "RErr",
            "PrefixRef",
            "__returns",
            "obj",
            "vtable",
            "VTable",
        ];
        if !name.is_empty() && !dull.contains(&name.as_str()) && names.last() != Some(&name) {
            names.push(name);
        }
    }
    names.join(" > ")
}

fn describe(cause: &AbiInstability, host_is_found: bool) -> String {
    fn sides<T: Display>(pair: &ExpectedFound<T>, host_is_found: bool, what: &str) -> String {
        let (host, plugin) = match host_is_found {
            true => (&pair.found, &pair.expected),
            false => (&pair.expected, &pair.found),
        };
        let (host, plugin) = (shortened(&host.to_string(), 120), shortened(&plugin.to_string(), 120));
        format!("the host has {what} {host}, the plugin {plugin}")
    }
    match cause {
        AbiInstability::Name(pair) => sides(pair, host_is_found, "type"),
        AbiInstability::Size(pair) => sides(pair, host_is_found, "size"),
        AbiInstability::Alignment(pair) => sides(pair, host_is_found, "alignment"),
        AbiInstability::FieldCountMismatch(pair) => sides(pair, host_is_found, "fields:"),
        AbiInstability::MismatchedPrefixSize(pair) => sides(pair, host_is_found, "frozen fields:"),
        AbiInstability::TooManyVariants(pair) => sides(pair, host_is_found, "variants:"),
        AbiInstability::UnexpectedField(pair) => {
            let names = ExpectedFound { expected: pair.expected.name(), found: pair.found.name() };
            sides(&names, host_is_found, "field")
        }
        AbiInstability::Package(pair) => sides(pair, host_is_found, "package"),
        AbiInstability::PackageVersion(pair) => sides(pair, host_is_found, "version"),
        other => shortened(&format!("{other:?}"), 300),
    }
}

/// Joins a text into one line and cuts it after `most` characters.
pub(super) fn shortened(text: &str, most: usize) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
