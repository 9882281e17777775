//! Tools of a chat request: the offered tools, the wanted call, and calls in messages.

use std::collections::HashMap;
use std::sync::Arc;

use host_grammar::{Kind, Source};
use serde_json::{Map, Value, json};

use super::App;
use super::error::ApiError;
use super::fields::{Fields, echo, empty};
use super::structured::Named;
use super::values::Nested;
use crate::text::CallFormat;
use crate::text::calls::{CallRule, Function, calls};

/// Most tools of a request: OpenAI's limit.
pub(super) const MAX_TOOLS: usize = 128;
/// Most arguments of a tool. The grammar of its calls has some rules for each.
pub(super) const MAX_PROPERTIES: usize = 512;
/// Most values of JSON in all tools of a request. The tools exist several times while a prompt is made: for its template, as text, for
/// the grammar of calls.
const MAX_VALUES: usize = 1 << 16;
/// Longest name of a tool: OpenAI's limit.
pub(super) const MAX_NAME: usize = 64;

/// The calls that an answer may have or must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// None: the text is not read for calls.
    None,
    /// Any calls: the model decides.
    Auto,
    /// At least one call.
    Required,
    /// One call of this tool.
    Named(String),
}

/// How an endpoint writes tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// The form of chats: `{"type": "function", "function": {"name", …}}`.
    Nested,
    /// The form of `/v1/responses`: `{"type": "function", "name", …}`.
    Flat,
}

/// Names of tools with a namespace, by the name that the model sees. A request that has none has an empty map.
pub(super) type Namespaces = Arc<HashMap<String, InNamespace>>;

/// The name of a tool of a namespace, as clients write it. Codex offers the tools of each MCP server in a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InNamespace {
    pub namespace: String,
    pub name: String,
}

impl InNamespace {
    /// The name that the model sees.
    pub fn joined(&self) -> String {
        let Self { namespace, name } = self;
        let between = if namespace.ends_with("__") { "" } else { "__" };
        format!("{namespace}{between}{name}")
    }
}

/// The tools of a request.
#[derive(Clone, Debug)]
pub(super) struct Tools {
    /// The tools in the form for the template.
    pub given: Value,
    pub namespaces: Namespaces,
    pub functions: Vec<Function>,
    /// The place of each function in the request: `tools[1].tools[0]`.
    places: Vec<String>,
    pub choice: Choice,
    /// Whether an answer may have several calls.
    pub parallel: bool,
    spelling: Spelling,
}

impl Tools {
    /// Takes `tools`, `tool_choice` and `parallel_tool_calls`. Returns `None` if there are no tools.
    ///
    /// # Errors
    /// When one of them is wrong, or the model takes no tools.
    pub fn take(app: &App, fields: &mut Fields, spelling: Spelling) -> Result<Option<Self>, ApiError> {
        let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
        let given = fields.take("tools").filter(|value| !empty(value));
        let choice = fields.take("tool_choice").filter(|value| !empty(value));
        let Some(given) = given else {
            return match choice.as_ref().map(|choice| choice.as_str().unwrap_or("")) {
                // Without tools, "required" asks for nothing: vLLM does the same.
                None | Some("none" | "auto" | "required") => Ok(None),
                Some(_) => {
                    Err(ApiError::field("tool_choice", "tool_choice names a tool, and there are no tools"))
                }
            };
        };
        let Offered { tools, places, namespaces } = Offered::of(fields, given, spelling)?;
        if tools.is_empty() {
            return match choice.as_ref().map(|choice| choice.as_str().unwrap_or("")) {
                None | Some("none" | "auto") => Ok(None),
                Some(_) => {
                    let message = "tool_choice demands a call, and this server has none of the tools: it runs none itself; add a \
                                   function, or leave tool_choice out";
                    Err(ApiError::field("tool_choice", message))
                }
            };
        }
        let none = choice.as_ref().is_some_and(|choice| choice == "none");
        match takes_tools(app) {
            // The tools are neither called nor shown to the model.
            Err(_) if none => return Ok(None),
            able => able?,
        }
        let functions = functions(fields, &tools, &places, &namespaces, spelling)?;
        let choice = choice_of(fields, choice, &functions, spelling)?;
        let (given, namespaces) = (spelling.nested(tools), Arc::new(namespaces));
        Ok(Some(Self { given, namespaces, functions, places, choice, parallel, spelling }))
    }

    /// The grammar of an answer that must call a tool, with the grammars of the tools' parameters, which have to compile.
    ///
    /// # Errors
    /// When a call of a tool cannot be demanded.
    pub fn grammar(&self, format: CallFormat) -> Result<Option<(Source, Vec<Named>)>, ApiError> {
        let named: Vec<Function> = match &self.choice {
            Choice::None | Choice::Auto => return Ok(None),
            Choice::Required => self.functions.clone(),
            Choice::Named(name) => self.functions.iter().filter(|tool| tool.name == *name).cloned().collect(),
        };
        let wanted = self.functions.iter().enumerate().filter(|(_, tool)| named.contains(tool));
        let parameters = wanted.map(|(index, tool)| Named {
            name: format!("{}{}.parameters", self.places[index], self.spelling.function()),
            source: Source::json_schema(&tool.parameters),
        });
        let source = calls(format, &named, self.rule());
        let source = source.map_err(|error| ApiError::field("tools", format!("tools: {error}")))?;
        Ok(Some((source, parameters.collect())))
    }

    /// The grammar of an answer that is JSON of a schema, or calls: where the model decides, and its calls begin as no JSON does.
    /// `None` otherwise, and where no grammar can say what a call is.
    pub fn or(&self, format: CallFormat, answer: &Source) -> Option<Source> {
        if self.choice != Choice::Auto || answer.kind != Kind::JsonSchema {
            return None;
        }
        let mut functions = self.functions.clone();
        match format {
            // A free call may have any arguments.
            CallFormat::Hermes => {
                functions.iter_mut().for_each(|function| function.parameters = json!({"type": "object"}));
            }
            CallFormat::Qwen3Coder | CallFormat::Gemma | CallFormat::FunctionGemma => {}
            CallFormat::Llama | CallFormat::Pythonic => return None,
        }
        answer.or(&calls(format, &functions, self.rule()).ok()?)
    }

    fn rule(&self) -> CallRule {
        let several = self.parallel && matches!(self.choice, Choice::Auto | Choice::Required);
        if several { CallRule::Several } else { CallRule::One }
    }
}

impl Spelling {
    /// The path of a tool's function within the tool.
    fn function(self) -> &'static str {
        match self {
            Self::Nested => ".function",
            Self::Flat => "",
        }
    }

    /// The function of a tool, or of a choice.
    fn of(self, tool: &Value) -> Option<&Value> {
        match self {
            Self::Nested => tool.get("function"),
            Self::Flat => Some(tool),
        }
    }

    /// Tools as templates expect them. Each is an object.
    fn nested(self, tools: Vec<Value>) -> Value {
        match self {
            Self::Flat => tools
                .into_iter()
                .map(|mut tool| {
                    if let Some(fields) = tool.as_object_mut() {
                        fields.shift_remove("type");
                    }
                    json!({"type": "function", "function": tool})
                })
                .collect(),
            Self::Nested => Value::Array(tools),
        }
    }
}

/// Refuses tools that the template cannot show to the model, or that the model cannot call.
fn takes_tools(app: &App) -> Result<(), ApiError> {
    let refuse = |reason: String| Err(ApiError::unsupported("tools", reason));
    match &app.text.template {
        Some(template) if template.takes_tools() => {}
        _ => {
            return refuse(format!(
                "model {:?} cannot be offered tools: its chat template has no place for them",
                app.model
            ));
        }
    }
    match app.text.calls() {
        Some(_) => Ok(()),
        None => refuse(format!(
            "how model {:?} writes calls of tools does not show in its chat template: start the server with --tool-parser",
            app.model
        )),
    }
}

/// Tools that OpenAI's server runs by itself. Agents offer them with every request, whether or not they are called.
pub(super) const FOREIGN: [&str; 4] = ["web_search", "web_search_preview", "tool_search", "image_generation"];

/// Whether OpenAI's server runs tools of this kind by itself. Some kinds have names with a date: `web_search_2025_08_26`.
fn is_foreign(kind: &str) -> bool {
    FOREIGN.contains(&kind) || kind.starts_with("web_search_")
}

/// Whether an item, or a part of one, concerns a call of a tool that OpenAI's server runs: `web_search_call.action.sources`.
pub(super) fn is_foreign_call(name: &str) -> bool {
    let item = name.split('.').next().unwrap_or_default();
    item.strip_suffix("_call").or(item.strip_suffix("_output")).is_some_and(is_foreign)
}

/// The tools that the client runs, as one list: without foreign ones, and with those of namespaces under joined names.
#[derive(Default)]
struct Offered {
    tools: Vec<Value>,
    /// The place of each in the request.
    places: Vec<String>,
    namespaces: HashMap<String, InNamespace>,
}

impl Offered {
    /// # Errors
    /// When a namespace is wrong, or there are too many tools.
    fn of(fields: &Fields, given: Value, spelling: Spelling) -> Result<Self, ApiError> {
        let expected = || format!("a list of up to {MAX_TOOLS} tools");
        let Value::Array(given) = given else { return Err(fields.wrong("tools", expected(), &given)) };
        let mut offered = Self::default();
        for (index, tool) in given.into_iter().enumerate() {
            let place = format!("tools[{index}]");
            match tool["type"].as_str() {
                Some(kind) if spelling == Spelling::Flat && is_foreign(kind) => {}
                Some("namespace") if spelling == Spelling::Flat => {
                    offered.add_namespace(fields, &place, tool)?
                }
                _ => offered.add(tool, place),
            }
            if offered.tools.len() > MAX_TOOLS {
                return Err(ApiError::field("tools", format!("tools must be {}", expected())));
            }
        }
        Ok(offered)
    }

    fn add(&mut self, tool: Value, place: String) {
        self.tools.push(tool);
        self.places.push(place);
    }

    /// Adds the tools of a namespace, or as many as show that there are too many.
    fn add_namespace(&mut self, fields: &Fields, place: &str, mut given: Value) -> Result<(), ApiError> {
        let name = given["name"].as_str().filter(|name| is_name(name)).map(str::to_owned);
        let (Some(namespace), true) = (name, given["tools"].is_array()) else {
            let expected = format!(
                "{{\"type\": \"namespace\", \"name\": up to {MAX_NAME} letters, digits, _, - and ., \"tools\": a list}}"
            );
            return Err(fields.wrong(place, expected, &given));
        };
        let Value::Array(within) = given["tools"].take() else { return Ok(()) };
        for (index, mut tool) in within.into_iter().take(MAX_TOOLS + 1).enumerate() {
            if let Some(name) = tool["name"].as_str().filter(|name| is_name(name)) {
                let of = InNamespace { namespace: namespace.clone(), name: name.to_owned() };
                let joined = of.joined();
                tool["name"] = json!(joined);
                self.namespaces.insert(joined, of);
            }
            self.add(tool, format!("{place}.tools[{index}]"));
        }
        Ok(())
    }
}

/// The values of a JSON value, itself included.
fn values(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(values).sum::<usize>(),
        Value::Object(fields) => fields.values().map(values).sum(),
        _ => 0,
    }
}

/// Whether a text can be the name of a tool or of a namespace.
fn is_name(name: &str) -> bool {
    let usual = |letter: char| letter.is_ascii_alphanumeric() || "_-.".contains(letter);
    (1..=MAX_NAME).contains(&name.len()) && name.chars().all(usual)
}

fn functions(
    fields: &Fields,
    tools: &[Value],
    places: &[String],
    namespaces: &HashMap<String, InNamespace>,
    spelling: Spelling,
) -> Result<Vec<Function>, ApiError> {
    let all: usize = tools.iter().map(values).sum();
    if all > MAX_VALUES {
        let message = format!("all tools together have {all} values; at most {MAX_VALUES} are taken");
        return Err(ApiError::field("tools", message));
    }
    let mut functions: Vec<Function> = Vec::new();
    for (tool, place) in tools.iter().zip(places) {
        let at = |field: &str| format!("{place}{field}");
        let is_function = tool.get("type") == Some(&json!("function"));
        let Some(function) = spelling.of(tool).filter(|_| is_function) else {
            let expected = match spelling {
                Spelling::Nested => "{\"type\": \"function\", \"function\": {…}}",
                Spelling::Flat => {
                    "{\"type\": \"function\", \"name\": …}, since this server has no tools of its own"
                }
            };
            return Err(fields.wrong(&at(""), expected, tool));
        };
        let at = |field: &str| format!("{place}{}{field}", spelling.function());
        let name = function.get("name").and_then(Value::as_str).unwrap_or_default();
        if !is_name(name) && !namespaces.contains_key(name) {
            let expected = format!("up to {MAX_NAME} letters, digits, _, - and .");
            return Err(fields.wrong(&at(".name"), expected, function.get("name").unwrap_or(&Value::Null)));
        }
        if functions.iter().any(|known| known.name == name) {
            return Err(ApiError::field(&at(".name"), format!("two tools are called {name:?}")));
        }
        let parameters = match function.get("parameters") {
            None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
            Some(parameters @ Value::Object(schema)) => {
                let mut parameters = parameters.clone();
                if let Some(fields) = parameters.as_object_mut().filter(|_| !schema.contains_key("type")) {
                    // Arguments are always an object, even if the schema does not say so.
                    fields.insert("type".into(), json!("object"));
                }
                parameters
            }
            Some(other) => return Err(fields.wrong(&at(".parameters"), "a JSON schema", other)),
        };
        let properties = parameters.get("properties").and_then(Value::as_object).map_or(0, Map::len);
        if properties > MAX_PROPERTIES {
            let message =
                format!("the tool {name} has {properties} properties; at most {MAX_PROPERTIES} are taken");
            return Err(ApiError::field(&at(".parameters"), message));
        }
        functions.push(Function { name: name.to_owned(), parameters });
    }
    Ok(functions)
}

fn choice_of(
    fields: &Fields,
    given: Option<Value>,
    functions: &[Function],
    spelling: Spelling,
) -> Result<Choice, ApiError> {
    let Some(given) = given else { return Ok(Choice::Auto) };
    match given.as_str() {
        Some("none") => return Ok(Choice::None),
        Some("auto") => return Ok(Choice::Auto),
        // "any" is another name that some clients use.
        Some("required" | "any") => return Ok(Choice::Required),
        _ => {}
    }
    let is_function = given.get("type").is_none_or(|kind| kind == "function");
    let function = spelling.of(&given).filter(|_| is_function);
    let text = |name: &str| function.and_then(|function| function.get(name)).and_then(Value::as_str);
    let name = text("name").map(|name| match text("namespace") {
        Some(namespace) => InNamespace { namespace: namespace.to_owned(), name: name.to_owned() }.joined(),
        None => name.to_owned(),
    });
    match name.as_deref() {
        Some(name) if functions.iter().any(|tool| tool.name == name) => Ok(Choice::Named(name.to_owned())),
        Some(name) => Err(ApiError::field(
            "tool_choice",
            format!("tool_choice names {}, which is not among the tools", echo(&name.into())),
        )),
        None => {
            let expected = match spelling {
                Spelling::Nested => {
                    "\"none\", \"auto\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": …}}"
                }
                Spelling::Flat => "\"none\", \"auto\", \"required\" or {\"type\": \"function\", \"name\": …}",
            };
            Err(fields.wrong("tool_choice", expected, &given))
        }
    }
}

/// Changes calls in messages to the form that templates expect: arguments are objects, and absent text is empty. Returns whether
/// there are calls or results of tools.
///
/// # Errors
/// When `tool_calls` is no list, or the arguments of a call are neither a JSON object nor a text.
pub(super) fn prepare(messages: &mut Value) -> Result<bool, ApiError> {
    let mut found = false;
    let mut nested = Nested::default();
    for (index, message) in messages.as_array_mut().into_iter().flatten().enumerate() {
        let Value::Object(message) = message else { continue };
        found |= message.get("role") == Some(&json!("tool"));
        match message.get("tool_calls") {
            Some(calls) if calls.is_null() || calls == &json!([]) => drop(message.remove("tool_calls")),
            Some(calls) if !calls.is_array() => {
                let name = format!("messages[{index}].tool_calls");
                return Err(ApiError::field(
                    &name,
                    format!("{name} must be a list of calls, got {}", echo(calls)),
                ));
            }
            _ => {}
        }
        // Templates append to the content, so it must be a text.
        let is_assistant = message.get("role") == Some(&json!("assistant"));
        if is_assistant && message.get("content").is_none_or(Value::is_null) {
            message.insert("content".into(), Value::from(""));
        }
        let Some(calls) = message.get_mut("tool_calls") else { continue };
        found = true;
        for call in calls.as_array_mut().into_iter().flatten() {
            let Some(Value::Object(function)) = call.get_mut("function") else { continue };
            let arguments = object(function, &mut nested)?.ok_or_else(|| {
                let name = format!("messages[{index}].tool_calls");
                ApiError::field(&name, format!("{name}: a call's arguments must be a JSON object, as text"))
            })?;
            function.insert("arguments".into(), arguments);
        }
    }
    Ok(found)
}

/// The arguments of a call as an object, however they are written. `None` if they are neither an object nor a text.
///
/// A model may write arguments that are no object, or an answer may end within them. The client sends them back with the result of
/// its tool, and the model has to see both: the text becomes the only argument, `arguments`.
///
/// # Errors
/// When the arguments of all calls of the body have too many values.
pub(super) fn object(call: &Map<String, Value>, nested: &mut Nested) -> Result<Option<Value>, ApiError> {
    Ok(match call.get("arguments") {
        None | Some(Value::Null) => Some(json!({})),
        Some(object @ Value::Object(_)) => Some(object.clone()),
        Some(Value::String(text)) if text.trim().is_empty() => Some(json!({})),
        Some(Value::String(text)) => {
            nested.check(text).map_err(|too_many| ApiError::invalid(too_many.to_string()))?;
            let object = serde_json::from_str::<Value>(text).ok().filter(Value::is_object);
            Some(object.unwrap_or_else(|| json!({"arguments": text})))
        }
        Some(_) => None,
    })
}
