//! `docs/api.md` and `/openapi.json` list every path that is served and every field that is read, and no other.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::fields::{HARMLESS, fields_read};
use super::{fuzzing, openapi, paths};

const PAGE: &str = include_str!("../../../../docs/api.md");

/// The names between backticks in the first cells of the tables under a heading, up to the next heading of its level.
fn listed(heading: &str) -> BTreeSet<String> {
    let level = heading.split(' ').next().unwrap();
    let mut lines = PAGE.lines().skip_while(|line| *line != heading);
    assert!(lines.next().is_some(), "docs/api.md has no {heading:?}");
    let section = lines.take_while(|line| {
        let hashes = line.split(' ').next().unwrap_or_default();
        !(hashes.starts_with('#') && hashes.len() <= level.len())
    });
    let rows = section.filter(|line| !line.starts_with("| Field"));
    let cells = rows.filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2).map(str::to_owned)).collect()
}

/// The fields that are read of a body.
fn read(endpoint: u8, body: &str) -> BTreeSet<String> {
    fields_read::take();
    assert!(fuzzing::body(&[&[endpoint], body.as_bytes()].concat()), "{body} is refused");
    // The page lists the fields of inner objects with these objects, so they are left out here.
    let within = ["stream_options.", "text.", "reasoning.", "thinking."];
    fields_read::take()
        .into_keys()
        .filter(|name| !within.iter().any(|prefix| name.starts_with(prefix)))
        .collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn every_path_is_listed_and_no_other() {
    let served = [paths::of_clients(), paths::of_operators(), paths::of_all()].concat();
    let served: BTreeSet<String> = served.into_iter().map(|(path, _)| path.to_owned()).collect();
    assert_eq!(listed("## Paths"), served);
}

#[test]
fn every_field_of_openais_endpoints_is_listed_and_no_other() {
    let chat = read(1, r#"{"messages": [{"role": "user", "content": "a"}]}"#);
    let completions = read(0, r#"{"prompt": "a"}"#);
    let read: BTreeSet<String> = chat.union(&completions).cloned().collect();
    let mut listed = listed("## Fields");
    assert_eq!(listed.difference(&read).collect::<Vec<_>>(), Vec::<&String>::new(), "listed and not read");
    listed.extend(set(&HARMLESS));
    assert_eq!(read.difference(&listed).collect::<Vec<_>>(), Vec::<&String>::new(), "read and not listed");
    let named = HARMLESS.iter().filter(|name| PAGE.contains(&format!("`{name}`")));
    assert_eq!(named.count(), HARMLESS.len(), "taken and not read: {:?}", HARMLESS);
}

#[test]
fn every_field_of_generate_is_listed_and_no_other() {
    let read = read(2, r#"{"text": "a"}"#);
    let (inner, outer): (BTreeSet<String>, BTreeSet<String>) =
        read.into_iter().partition(|name| name.starts_with("sampling_params."));
    let inner: BTreeSet<String> =
        inner.iter().map(|name| name.trim_start_matches("sampling_params.").to_owned()).collect();
    let mut beside = listed("## Generate");
    beside.extend(listed("### Serving"));
    assert_eq!(outer, beside);
    let of_text = set(&[
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "no_stop_trim",
        "ignore_eos",
        "skip_special_tokens",
        "n",
    ]);
    let mut within = listed("### Sampling");
    within.remove("seed");
    within.extend(of_text);
    within.extend(set(&["sampling_seed", "max_new_tokens"]));
    within.extend(listed("### Structure"));
    within.extend(listed("### Taken only where they change nothing"));
    assert_eq!(inner, within);
}

#[test]
fn every_field_of_responses_is_listed_and_no_other() {
    let mut listed_here = listed("## Responses");
    for heading in ["### Sampling", "### Serving", "### Structure"] {
        listed_here.extend(listed(heading));
    }
    listed_here.extend(set(&["structural_tag", "guided_whitespace_pattern", "return_cached_tokens_details"]));
    let read = read(4, r#"{"input": "a"}"#);
    assert_eq!(
        listed_here.difference(&read).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "listed and not read"
    );
    listed_here.extend(set(&HARMLESS));
    assert_eq!(
        read.difference(&listed_here).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "read and not listed"
    );
}

#[test]
fn every_field_about_tokens_is_listed_and_no_other() {
    let mut read_all = read(3, r#"{"messages": [{"role": "user", "content": "a"}]}"#);
    read_all.extend(read(3, r#"{"tokens": [1]}"#));
    assert_eq!(listed("## Tokens"), read_all);
}

fn document() -> Value {
    openapi::document(fuzzing::app(), true)
}

/// The schema that a schema of the document refers to, or the schema itself.
fn resolved<'a>(document: &'a Value, schema: &'a Value) -> &'a Value {
    match schema["$ref"].as_str() {
        Some(to) => {
            document.pointer(to.trim_start_matches('#')).unwrap_or_else(|| panic!("{to} is not there"))
        }
        None => schema,
    }
}

#[test]
fn the_document_has_every_path_and_no_other() {
    let document = document();
    let described = document["paths"].as_object().unwrap().keys();
    let described: BTreeSet<String> = described.map(|path| path.replace("{model}", "{*model}")).collect();
    assert_eq!(described, listed("## Paths"));
}

#[test]
fn the_document_refers_to_nothing_that_it_has_not() {
    let document = document();
    let text = document.to_string();
    for part in text.split("\"$ref\":\"#").skip(1) {
        let to = part.split('"').next().unwrap();
        assert!(document.pointer(to).is_some(), "{to}");
    }
    let names = document["components"]["schemas"].as_object().unwrap().keys();
    let unused: Vec<_> =
        names.filter(|name| !text.contains(&format!("\"#/components/schemas/{name}\""))).collect();
    assert_eq!(unused, Vec::<&String>::new());
}

/// The fields of a body in the document are those that are read, each with the type and the limits that it is read with.
#[test]
fn the_document_has_every_field_as_it_is_read_and_no_other() {
    let document = document();
    let message = r#"{"messages": [{"role": "user", "content": "a"}], "stream": true, "stream_options": {}}"#;
    for (path, bodies) in [
        ("/v1/chat/completions", &[(1, message)][..]),
        ("/v1/completions", &[(0, r#"{"prompt": "a", "stream": true, "stream_options": {}}"#)]),
        ("/v1/responses", &[(4, r#"{"input": "a", "stream": true, "stream_options": {}}"#)]),
        ("/generate", &[(2, r#"{"text": "a"}"#)]),
        // The other endpoint about tokens is tried, too, and refuses the body.
        ("/tokenize", &[(3, r#"{"messages": [{"role": "user", "content": "a"}]}"#)]),
    ] {
        let body = &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
        let body = resolved(&document, body);
        let mut read = std::collections::BTreeMap::new();
        for (endpoint, text) in bodies {
            fields_read::take();
            assert!(fuzzing::body(&[&[*endpoint], text.as_bytes()].concat()), "{text} is refused");
            read.extend(fields_read::take());
        }
        let mut described: BTreeSet<String> = HARMLESS.iter().map(|name| (*name).to_owned()).collect();
        describe(&document, body, "", &mut described);
        let mut names: BTreeSet<String> = read.keys().cloned().collect();
        names.extend(HARMLESS.iter().map(|name| (*name).to_owned()));
        if path == "/generate" {
            // Beside sampling_params, the document has these fields only to refuse them with a message.
            described.retain(|name| names.contains(name) || !super::generate::SAMPLING.contains(&&**name));
        }
        assert_eq!(described, names, "{path}");
        for (name, kind) in read.iter().filter(|(_, kind)| !kind.is_null()) {
            let schema = schema_of(&document, body, name);
            for (key, value) in kind.as_object().unwrap() {
                let same = match (key.as_str(), &schema[key], value) {
                    // Numbers are equal whether they are written as floats or not.
                    (_, Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
                    (_, a, b) => a == b,
                };
                assert!(same, "{path}: {name} has {key} {}, and is read with {value}", schema[key]);
            }
        }
    }
}

/// Objects within a body whose fields are read one by one.
const INNER: [&str; 5] = ["sampling_params", "stream_options", "text", "reasoning", "thinking"];

/// The names of an object's fields, and of those within it.
fn describe(document: &Value, body: &Value, prefix: &str, names: &mut BTreeSet<String>) {
    for (name, schema) in body["properties"].as_object().unwrap() {
        let harmless = !prefix.is_empty() && HARMLESS.contains(&&**name);
        if !harmless {
            names.insert(format!("{prefix}{name}"));
        }
        let inner = resolved(document, schema.pointer("/anyOf/0").unwrap_or(schema));
        if INNER.contains(&&**name) && inner["properties"].is_object() {
            describe(document, inner, &format!("{name}."), names);
        }
    }
}

/// The schema of a field.
fn schema_of<'a>(document: &'a Value, body: &'a Value, name: &str) -> &'a Value {
    match name.split_once('.') {
        None => &body["properties"][name],
        Some((outer, inner)) => {
            let schema = &body["properties"][outer];
            let schema = resolved(document, schema.pointer("/anyOf/0").unwrap_or(schema));
            &schema["properties"][inner]
        }
    }
}

#[test]
fn an_object_without_a_listed_field_asks_for_nothing() {
    let document = document();
    let nothing = &document["components"]["schemas"]["Nothing"]["enum"];
    assert_eq!(nothing, &json!([null, false, 0, "", [], {}]));
    for value in nothing.as_array().unwrap() {
        let body = json!({"prompt": "a", "some_other_field": value});
        assert!(fuzzing::body(&[&[0][..], body.to_string().as_bytes()].concat()), "{body}");
    }
}

#[test]
fn the_document_names_every_field_that_limits_an_answer() {
    let document = document();
    let rule = &document["components"]["schemas"]["OneStructure"]["anyOf"];
    let named: BTreeSet<String> = rule
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|others| others["properties"].as_object().unwrap().keys().cloned())
        .collect();
    let mut structure = listed("### Structure");
    // This field does not limit the answer.
    structure.remove("guided_decoding_backend");
    assert_eq!(named, structure);
}
