//! Grammars of answers that must call a tool: what a reader of the format reads without fail.

use host_grammar::{GrammarError, Source, json_rule, lark_text};
use serde_json::{Value, json};

use super::CallFormat;

/// A tool, as far as its calls go.
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
        (CallFormat::Hermes, CallRule::Several) => "start: call (\"\\n\" call)*".to_owned(),
        (CallFormat::Pythonic, CallRule::Several) => "start: \"[\" call (\", \" call)* \"]\"".to_owned(),
        (CallFormat::Pythonic, CallRule::One) => "start: \"[\" call \"]\"".to_owned(),
        // These models are not trained to call more than one.
        (CallFormat::Hermes, CallRule::One) | (CallFormat::Llama, _) => "start: call".to_owned(),
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
        };
        lines.push(format!("call_{index}: {} args_{index} {}", lark_text(&before), lark_text(after)));
        lines.push(format!("args_{index}: {}", json_rule(&function.parameters, false)));
    }
    Ok(Source::lark(lines.join("\n")))
}

/// The names of a tool's arguments, those that a call must have first.
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

/// A rule for each argument. Its value is JSON, which a reader takes for what Python would write.
fn keyword_rules(index: usize, function: &Function) -> Vec<String> {
    let (required, optional) = properties(function);
    let rule = |(at, name): (usize, &String)| {
        let mut schema = function.parameters["properties"][name.as_str()].clone();
        for key in ["$defs", "definitions"] {
            if let (Some(definitions), Value::Object(fields)) = (function.parameters.get(key), &mut schema) {
                fields.insert(key.to_owned(), definitions.clone());
            }
        }
        if schema == Value::Bool(true) {
            schema = json!({});
        }
        format!(
            "arg_{index}_{at}: {} value_{index}_{at}\nvalue_{index}_{at}: {}",
            lark_text(&format!("{name}=")),
            json_rule(&schema, false)
        )
    };
    required.iter().chain(&optional).enumerate().map(rule).collect()
}
