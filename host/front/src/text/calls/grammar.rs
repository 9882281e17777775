//! Grammars of answers that must call a tool. The reader of the format can read every such answer.

use host_grammar::{GrammarError, MAX_TEXT, Source, json_rule, lark_text};
use serde_json::{Value, json};

use super::CallFormat;
use super::arguments::{Kind, LONGEST_NAME, kind, resolved, values};

/// A tool: the facts that its calls depend on.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// The schema of its arguments, an object.
    pub parameters: Value,
}

/// Which calls an answer must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallRule {
    /// One.
    One,
    /// One or more, where the format has a way to write several.
    Several,
}

/// The grammar of an answer that calls some of these tools.
///
/// # Errors
/// When the format cannot write the arguments of one of them.
pub fn calls(format: CallFormat, functions: &[Function], rule: CallRule) -> Result<Source, GrammarError> {
    let mut lines = vec![match (format, rule) {
        (CallFormat::Hermes | CallFormat::Qwen3Coder, CallRule::Several) => {
            "start: call (\"\\n\" call)*".to_owned()
        }
        (CallFormat::Pythonic, CallRule::Several) => "start: \"[\" call (\", \" call)* \"]\"".to_owned(),
        (CallFormat::Pythonic, CallRule::One) => "start: \"[\" call \"]\"".to_owned(),
        // Llama's models are not trained to write more than one call.
        (CallFormat::Hermes | CallFormat::Qwen3Coder, CallRule::One) | (CallFormat::Llama, _) => {
            "start: call".to_owned()
        }
    }];
    let names: Vec<String> = (0..functions.len()).map(|index| format!("call_{index}")).collect();
    lines.push(format!("call: {}", names.join(" | ")));
    for (index, function) in functions.iter().enumerate() {
        let name = Value::from(function.name.as_str());
        let (before, after) = match format {
            CallFormat::Hermes => {
                (format!("<tool_call>\n{{\"name\": {name}, \"arguments\": "), "}\n</tool_call>")
            }
            CallFormat::Llama => (format!("{{\"name\": {name}, \"parameters\": "), "}"),
            CallFormat::Pythonic => {
                lines.push(format!(
                    "call_{index}: {} {} \")\"",
                    lark_text(&format!("{}(", function.name)),
                    keywords(index, function)?.trim()
                ));
                lines.extend(keyword_rules(index, function));
                continue;
            }
            CallFormat::Qwen3Coder => {
                lines.extend(tags(index, function)?);
                continue;
            }
        };
        lines.push(format!("call_{index}: {} args_{index} {}", lark_text(&before), lark_text(after)));
        lines.push(format!("args_{index}: {}", json_rule(&function.parameters, false)));
    }
    Ok(Source::lark(lines.join("\n")))
}

/// The rules of a call in tags: first its required arguments, then any of the others, each in the schema's order.
fn tags(index: usize, function: &Function) -> Result<Vec<String>, GrammarError> {
    let tool = &function.name;
    let refuse =
        |why: String| Err(GrammarError::Refused(format!("this model writes calls in tags, and {why}")));
    let (required, optional) = properties(function);
    let odd =
        |name: &&String| name.is_empty() || name.len() > LONGEST_NAME || name.contains(['>', '<', '\n']);
    if let Some(name) = required.iter().chain(&optional).find(odd) {
        return refuse(format!("an argument of the tool {tool} is called {name:?}, which no tag can name"));
    }
    let elsewhere = ["$ref", "allOf", "anyOf", "oneOf"];
    if let Some(key) = elsewhere.iter().find(|key| function.parameters.get(**key).is_some()) {
        return refuse(format!(
            "the arguments of the tool {tool} are not listed in its properties alone, but in {key}, too"
        ));
    }
    let must: String = (0..required.len()).map(|at| format!(" arg_{index}_{at}")).collect();
    let may = required.len()..required.len() + optional.len();
    let may: String = may.map(|at| format!(" arg_{index}_{at}?")).collect();
    let before = lark_text(&format!("<tool_call>\n<function={tool}>\n"));
    let after = lark_text("</function>\n</tool_call>");
    let mut lines = vec![format!("call_{index}: {before}{must}{may} {after}")];
    for (at, name) in required.iter().chain(&optional).enumerate() {
        let (rule, before) = (format!("{index}_{at}"), lark_text(&format!("<parameter={name}>\n")));
        lines.push(format!("arg_{rule}: {before} value_{rule} \"\\n\""));
        let after = lark_text("\n</parameter>");
        match kind(&function.parameters, name) {
            Kind::Json(_) => {
                lines.push(format!("value_{rule}: json_{rule} {after}"));
                lines.push(format!("json_{rule}: {}", json_rule(&property(function, name), false)));
            }
            kind => lines.extend(plain(&rule, &function.parameters, name, kind)),
        }
        if lines.iter().map(String::len).sum::<usize>() > MAX_TEXT {
            return refuse(format!(
                "the parameters of the tool {tool} make more than {MAX_TEXT} bytes of rules"
            ));
        }
    }
    Ok(lines)
}

/// Longest text whose length a grammar of tags can limit, in characters.
const LONGEST_COUNTED: u64 = 1000;

/// The rules of an argument that may be plain text, including the tag that ends it.
fn plain(rule: &str, parameters: &Value, name: &str, kind: Kind) -> Vec<String> {
    let schema = &parameters["properties"][name];
    if let Some(values) = values(schema, parameters) {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let texts: Vec<String> = values.iter().map(|value| lark_text(&text(value))).collect();
        return vec![format!("value_{rule}: ({}) {}", texts.join(" | "), lark_text("\n</parameter>"))];
    }
    let schema = resolved(schema, parameters);
    let bound = |key: &str| schema.get(key).and_then(Value::as_u64).filter(|_| kind == Kind::Text);
    let least = bound("minLength").unwrap_or(0).min(LONGEST_COUNTED);
    let most = bound("maxLength").filter(|most| (least..=LONGEST_COUNTED).contains(most));
    let most = most.map_or(String::new(), |most| most.to_string());
    vec![
        // Any text that does not contain the end tag, and the end of a line.
        format!("TEXT_{rule}: /(?s:.{{{least},{most}}})\\n/ & ~/(?s:.*)<\\/parameter>(?s:.*)/"),
        format!("value_{rule}[suffix=\"</parameter>\"]: TEXT_{rule}"),
    ]
}

/// The schema of an argument, together with the definitions that it refers to.
fn property(function: &Function, name: &str) -> Value {
    let mut schema = function.parameters["properties"][name].clone();
    let refers = schema.to_string().contains("\"$ref\"");
    for key in ["$defs", "definitions"].into_iter().filter(|_| refers) {
        if let (Some(definitions), Value::Object(fields)) = (function.parameters.get(key), &mut schema) {
            fields.insert(key.to_owned(), definitions.clone());
        }
    }
    if schema == Value::Bool(true) { json!({}) } else { schema }
}

/// The names of a tool's arguments: the required ones and the others.
fn properties(function: &Function) -> (Vec<String>, Vec<String>) {
    let required = function.parameters.get("required").and_then(Value::as_array);
    let required: Vec<&str> = required.into_iter().flatten().filter_map(Value::as_str).collect();
    let all = function.parameters.get("properties").and_then(Value::as_object);
    let all = all.into_iter().flat_map(|all| all.keys().cloned());
    all.partition(|name| required.contains(&name.as_str()))
}

fn keywords(index: usize, function: &Function) -> Result<String, GrammarError> {
    let (required, optional) = properties(function);
    let odd = |name: &&String| !name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
    if let Some(name) = required.iter().chain(&optional).find(odd) {
        let tool = &function.name;
        return Err(GrammarError::Refused(format!(
            "this model writes calls in Python's notation, and an argument of the tool {tool} is called {name:?}, which is no name there"
        )));
    }
    let rule = |at: usize| format!("arg_{index}_{at}");
    let count = required.len();
    let must: Vec<String> = (0..count).map(rule).collect();
    let may = |from: usize| -> String {
        (from..count + optional.len()).map(|at| format!(" (\", \" {})?", rule(at))).collect()
    };
    Ok(match (must.is_empty(), optional.is_empty()) {
        (true, true) => String::new(),
        (false, _) => format!("{}{}", must.join(" \", \" "), may(count)),
        (true, false) => {
            let firsts: Vec<String> =
                (0..optional.len()).map(|first| format!("{}{}", rule(first), may(first + 1))).collect();
            format!("({})?", firsts.join(" | "))
        }
    })
}

/// One rule for each argument. Its value is JSON, which the reader accepts like a literal of Python.
fn keyword_rules(index: usize, function: &Function) -> Vec<String> {
    let (required, optional) = properties(function);
    let rule = |(at, name): (usize, &String)| {
        let schema = property(function, name);
        format!(
            "arg_{index}_{at}: {} value_{index}_{at}\nvalue_{index}_{at}: {}",
            lark_text(&format!("{name}=")),
            json_rule(&schema, false)
        )
    };
    required.iter().chain(&optional).enumerate().map(rule).collect()
}
