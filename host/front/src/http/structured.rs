//! Fields that limit an answer to a schema, an expression or rules: those of OpenAI, vLLM and SGLang, old spellings included.

use std::sync::Arc;

use futures_util::future::try_join_all;
use host_grammar::{Asked, GrammarError, Kind, Source, ebnf};
use host_wire::shares::Client;
use serde_json::{Map, Value};

use super::App;
use super::error::ApiError;
use super::fields::{Fields, echo, empty};
use crate::audit::Refusal;
use crate::identity::number;

/// A grammar, and the name of its field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub name: String,
    pub source: Source,
}

/// Grammars of a request that are being compiled, or wait for their turn.
pub(super) struct Compiling(Vec<(String, Asked)>);

/// Old names of vLLM's fields, from before `structured_outputs`, with their new kinds.
const GUIDED: [(&str, &str); 5] = [
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
    ("guided_json_object", "json_object"),
];

/// Takes all fields of structure. At most one may limit the answer.
///
/// An empty value is no value only where clients send it for none. Elsewhere it would be a limit that is dropped silently, so it is
/// refused, as vLLM and OpenAI refuse it. The schema `{}` allows any JSON, and nothing else.
///
/// # Errors
/// When a field is wrong, or when a second field has a value.
pub(super) fn take(fields: &mut Fields) -> Result<Option<Named>, ApiError> {
    let mut found: Option<(String, Source)> = None;
    let mut add = |name: &str, source: Option<Source>| {
        let Some(source) = source else { return Ok(()) };
        if let Some((first, _)) = &found {
            return Err(ApiError::field(name, format!("{name} and {first} both limit the answer: give one")));
        }
        found = Some((name.to_owned(), source));
        Ok(())
    };
    let given = fields.take("response_format");
    add("response_format", response_format("response_format", given)?)?;
    let given = fields.take("structured_outputs");
    add("structured_outputs", structured_outputs(fields, given)?)?;
    for (name, kind) in GUIDED {
        let given = fields.take(name).filter(|value| kind != "json_object" || value != &Value::Bool(false));
        add(name, given.map(|value| of_kind(name, kind, &value)).transpose()?)?;
    }
    for (name, kind) in [("json_schema", "json"), ("regex", "regex"), ("ebnf", "grammar")] {
        // SGLang's clients send an empty text for none.
        let given = fields.take(name).filter(|value| value != "");
        add(name, given.map(|value| of_kind(name, kind, &value)).transpose()?)?;
    }
    for name in ["guided_whitespace_pattern", "structural_tag"] {
        fields.refuse_unless(name, empty)?;
    }
    // The field selects a library of another server. The grammar means the same without it.
    fields.take("guided_decoding_backend");
    found.map(|(name, source)| checked(&name, source)).transpose()
}

/// Checks a grammar before it is compiled.
fn checked(name: &str, source: Source) -> Result<Named, ApiError> {
    source.check().map_err(|error| refusal(name, &error))?;
    Ok(Named { name: name.to_owned(), source })
}

/// The format of an answer in the field of another endpoint.
///
/// # Errors
/// When it is wrong.
pub(super) fn format(name: &str, given: Option<Value>) -> Result<Option<Named>, ApiError> {
    response_format(name, given)?.map(|source| checked(name, source)).transpose()
}

/// Starts to compile all grammars of a request, those of each prompt, over bytes. This happens before a worker is called, so that
/// a grammar that cannot be carried out is refused with the name of its field.
///
/// # Errors
/// When a grammar is too large, or when too many grammars of the client wait.
pub(super) fn ask<'a>(
    app: &App,
    client: &Client,
    of_prompts: impl IntoIterator<Item = &'a Arc<Vec<Named>>>,
) -> Result<Compiling, ApiError> {
    let mut compiling = Vec::new();
    let mut last = None;
    for all in of_prompts {
        // Prompts of one request may share one list of grammars.
        if last.replace(all).is_some_and(|last| Arc::ptr_eq(last, all)) {
            continue;
        }
        // Rules may name special tokens, which only the model's vocabulary has, so they are not compiled over bytes.
        for Named { name, source } in all.iter().filter(|named| named.source.kind != Kind::Lark) {
            let asked = app.grammars.ask(number(client), source).map_err(|error| refusal(name, &error))?;
            compiling.push((name.clone(), asked));
        }
    }
    Ok(Compiling(compiling))
}

impl Compiling {
    /// Waits until all are compiled.
    ///
    /// # Errors
    /// When a grammar cannot be carried out, or takes too long.
    pub async fn done(self) -> Result<(), ApiError> {
        // All at once, so that none that has compiled stays in memory until the one before it has.
        let all = self.0.into_iter().map(|(name, asked)| async move {
            asked.outcome().await.map(drop).map_err(|error| refusal(&name, &error))
        });
        try_join_all(all).await.map(drop)
    }
}

fn refusal(name: &str, error: &GrammarError) -> ApiError {
    match error {
        GrammarError::Busy(_) => ApiError::over_share("grammars that wait to be compiled", Refusal::Grammars),
        GrammarError::Waited { .. } | GrammarError::Unable { .. } => {
            ApiError::full(format!("{name}: {error}"), Refusal::AllGrammars)
        }
        _ => ApiError::field(name, format!("{name}: {error}")),
    }
}

/// OpenAI's format: `{"type": "json_schema", "json_schema": {"name", "schema", "strict"}}`, or without the inner object. The
/// answer follows the schema whether or not it is strict.
fn response_format(name: &str, given: Option<Value>) -> Result<Option<Source>, ApiError> {
    let Some(given) = given else { return Ok(None) };
    let wrong = || {
        let schema = match name {
            "response_format" => "{\"type\": \"json_schema\", \"json_schema\": {\"schema\": …}}",
            _ => "{\"type\": \"json_schema\", \"name\": …, \"schema\": …}",
        };
        let message = format!(
            "{name} must be {{\"type\": \"text\"}}, {{\"type\": \"json_object\"}} or {schema}, got {}",
            echo(&given)
        );
        ApiError::field(name, message)
    };
    match given.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        // Some servers take a schema here.
        Some("json_object") => match given.get("schema").filter(|schema| !schema.is_null()) {
            Some(schema) => Ok(Some(Source::json_schema(schema))),
            None => Ok(Some(Source::json_object())),
        },
        Some("json_schema") => {
            let format = given.get("json_schema").unwrap_or(&given);
            let schema = format.get("schema").filter(|schema| !schema.is_null());
            Ok(Some(Source::json_schema(schema.ok_or_else(wrong)?)))
        }
        _ => Err(wrong()),
    }
}

/// vLLM's field: exactly one of its kinds, and options.
fn structured_outputs(fields: &Fields, given: Option<Value>) -> Result<Option<Source>, ApiError> {
    let name = "structured_outputs";
    let mut given = match given {
        None => return Ok(None),
        Some(Value::Object(given)) => given,
        Some(other) => return Err(fields.wrong(name, "a JSON object", &other)),
    };
    given.retain(|_, value| !value.is_null());
    let compact = option(&mut given, "disable_any_whitespace")?;
    for field in ["disable_additional_properties", "disable_fallback"] {
        // `disable_fallback` has no effect: this server has no fallback.
        if option(&mut given, field)? && field == "disable_additional_properties" {
            let message =
                format!("{name}.{field} is not supported here; write additionalProperties into the schema");
            return Err(ApiError::unsupported(name, message));
        }
    }
    let mut kinds = given.into_iter();
    let (Some((kind, value)), None) = (kinds.next(), kinds.next()) else {
        let message = format!("{name} must have exactly one of json, regex, choice, grammar and json_object");
        return Err(ApiError::field(name, message));
    };
    let source = of_kind(&format!("{name}.{kind}"), &kind, &value)?;
    Ok(Some(Source { compact, ..source }))
}

fn option(given: &mut Map<String, Value>, name: &str) -> Result<bool, ApiError> {
    match given.remove(name) {
        None => Ok(false),
        Some(Value::Bool(on)) => Ok(on),
        Some(_) => Err(ApiError::field(name, format!("structured_outputs.{name} must be true or false"))),
    }
}

/// A grammar of one of vLLM's kinds.
fn of_kind(name: &str, kind: &str, value: &Value) -> Result<Source, ApiError> {
    let wrong = |expected: &str| ApiError::field(name, format!("{name} must be {expected}"));
    let text = |expected: &str| value.as_str().ok_or_else(|| wrong(expected));
    match kind {
        "json" => match value {
            Value::Object(_) | Value::Bool(true) => Ok(Source::json_schema(value)),
            Value::String(schema) => Ok(Source { text: schema.clone(), ..Source::json_object() }),
            _ => Err(wrong("a JSON schema, or one as text")),
        },
        "regex" => Ok(Source::regex(text("a regular expression as text")?)),
        "choice" => {
            let texts = value.as_array().and_then(|texts| {
                texts.iter().map(|text| text.as_str().map(str::to_owned)).collect::<Option<Vec<String>>>()
            });
            let texts = texts.ok_or_else(|| wrong("a list of texts"))?;
            Source::choice(&texts).map_err(|error| ApiError::field(name, format!("{name}: {error}")))
        }
        "grammar" => {
            let rules = text("rules as text, in the notation of GBNF or of Lark")?;
            if ebnf::is_ebnf(rules) {
                ebnf::source(rules).map_err(|error| ApiError::field(name, format!("{name}: {error}")))
            } else {
                Ok(Source::lark(rules))
            }
        }
        "json_object" if *value == Value::Bool(true) => Ok(Source::json_object()),
        "json_object" => Err(wrong("true, or left out")),
        _ => Err(ApiError::unsupported(
            name,
            format!("{name} is not known here: give json, regex, choice, grammar or json_object"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(body: &str) -> Result<Option<Source>, String> {
        take(&mut Fields::parse(body.as_bytes()).unwrap())
            .map(|named| named.map(|named| named.source))
            .map_err(|error| error.json()["error"]["message"].to_string())
    }

    #[test]
    fn each_spelling_gives_its_grammar() {
        let schema = r#"{"type":"integer"}"#;
        let json = || Source::json_schema(&serde_json::from_str(schema).unwrap());
        for (body, source) in [
            ("{}".to_owned(), None),
            (r#"{"response_format":{"type":"text"},"regex":"","guided_json":null}"#.into(), None),
            (
                r#"{"json_schema":"","ebnf":"","guided_json_object":false,"structured_outputs":null}"#.into(),
                None,
            ),
            (r#"{"guided_json":{}}"#.into(), Some(Source::json_schema(&Value::Object(Map::new())))),
            (r#"{"json_schema":{}}"#.into(), Some(Source::json_schema(&Value::Object(Map::new())))),
            (r#"{"response_format":{"type":"json_object"}}"#.into(), Some(Source::json_object())),
            (
                format!(
                    r#"{{"response_format":{{"type":"json_schema","json_schema":{{"name":"x","strict":true,"schema":{schema}}}}}}}"#
                ),
                Some(json()),
            ),
            (format!(r#"{{"structured_outputs":{{"json":{schema},"regex":null}}}}"#), Some(json())),
            (
                format!(r#"{{"structured_outputs":{{"json":{schema},"disable_any_whitespace":true}}}}"#),
                Some(Source { compact: true, ..json() }),
            ),
            (format!(r#"{{"guided_json":{schema},"guided_decoding_backend":"xgrammar"}}"#), Some(json())),
            (r#"{"json_schema":"{\"type\":\"integer\"}"}"#.into(), Some(json())),
            (r#"{"guided_choice":["a","b"]}"#.into(), Some(Source::lark("start: \"a\" | \"b\""))),
            (r#"{"regex":"a+"}"#.into(), Some(Source::regex("a+"))),
            (r#"{"ebnf":"root ::= \"a\""}"#.into(), Some(Source::lark("start: r_root\nr_root: \"a\""))),
            (r#"{"guided_grammar":"start: \"a\""}"#.into(), Some(Source::lark("start: \"a\""))),
        ] {
            assert_eq!(taken(&body), Ok(source), "{body}");
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_field() {
        for (body, words) in [
            (r#"{"regex":"a","response_format":{"type":"json_object"}}"#, "both limit the answer"),
            (r#"{"response_format":{"type":"json"}}"#, "response_format must be"),
            (
                r#"{"response_format":{"type":"json_schema","json_schema":{"name":"x"}}}"#,
                "response_format must be",
            ),
            (r#"{"structured_outputs":{"json":{},"regex":"a"}}"#, "exactly one of"),
            (r#"{"structured_outputs":{}}"#, "exactly one of"),
            (r#"{"structured_outputs":{"choice":[]}}"#, "needs at least one text"),
            (r#"{"response_format":{}}"#, "response_format must be"),
            (r#"{"response_format":[]}"#, "response_format must be"),
            (r#"{"guided_choice":[]}"#, "needs at least one text"),
            (r#"{"guided_grammar":""}"#, "the grammar is empty"),
            (r#"{"guided_regex":""}"#, "the regular expression is empty"),
            (r#"{"guided_json":""}"#, "the JSON schema is empty"),
            (r#"{"guided_json":{},"regex":"a"}"#, "both limit the answer"),
            (r#"{"structured_outputs":{"json_object":false}}"#, "must be true"),
            (r#"{"structured_outputs":{"structural_tag":"x"}}"#, "not known here"),
            (r#"{"guided_choice":["a",1]}"#, "a list of texts"),
            (r#"{"json_schema":"{"}"#, "not JSON"),
            (r#"{"guided_whitespace_pattern":" "}"#, "guided_whitespace_pattern is not supported"),
            (r#"{"json_schema":{"type":"object","x-guidance":{}}}"#, "x-guidance"),
        ] {
            let error = taken(body).unwrap_err();
            assert!(error.contains(words), "{body}: {error}");
        }
    }
}
