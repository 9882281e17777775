//! Grammars of answers that must call a tool. The reader of the format can read every such answer.

use std::collections::HashSet;

use host_grammar::{GrammarError, MAX_TEXT, Source, json_rule, lark_text};
use serde_json::{Map, Value, json};

use super::arguments::{Kind, LONGEST_NAME, Schemas, kinds};
use super::{CallFormat, function_gemma};

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

/// Rules as they are written, line by line.
struct Rules {
    text: String,
}

impl Rules {
    /// Adds a line of a tool's rules.
    ///
    /// # Errors
    /// When the rules become longer than a grammar may be.
    fn add(&mut self, tool: &str, line: &str) -> Result<(), GrammarError> {
        self.have_room(tool, line.len() + 1)?;
        self.text.push('\n');
        self.text.push_str(line);
        Ok(())
    }

    /// Adds the rule of a value that follows a schema.
    ///
    /// # Errors
    /// As [`Rules::add`]. A schema that is too long is not copied.
    fn add_json(&mut self, tool: &str, name: &str, schema: &Schema<'_>) -> Result<(), GrammarError> {
        self.have_room(tool, schema.bytes)?;
        self.add(tool, &format!("{name}: {}", json_rule(&schema.value(), false)))
    }

    fn have_room(&self, tool: &str, bytes: usize) -> Result<(), GrammarError> {
        if self.text.len() + bytes <= MAX_TEXT {
            return Ok(());
        }
        let why = format!("the parameters of the tool {tool} make more than {MAX_TEXT} bytes of rules");
        Err(GrammarError::Refused(why))
    }
}

/// A tool whose calls are written with a rule for each argument.
struct Arguments<'a> {
    function: &'a Function,
    /// The names, the required ones first, else in the schema's order.
    names: Vec<&'a str>,
    /// How many of them are required.
    required: usize,
    /// The definitions to which schemas may refer, and their bytes as JSON.
    definitions: Vec<(&'static str, &'a Value)>,
    bytes: usize,
}

/// The schema of an argument, together with the definitions that it refers to.
struct Schema<'a> {
    schema: &'a Value,
    definitions: &'a [(&'static str, &'a Value)],
    /// Its length as JSON.
    bytes: usize,
}

impl<'a> Arguments<'a> {
    fn new(function: &'a Function) -> Self {
        let parameters = &function.parameters;
        let required = parameters.get("required").and_then(Value::as_array);
        let required: HashSet<&str> = required.into_iter().flatten().filter_map(Value::as_str).collect();
        let all = parameters.get("properties").and_then(Value::as_object);
        let all = all.into_iter().flat_map(Map::keys).map(String::as_str);
        let (mut names, others): (Vec<&str>, Vec<&str>) = all.partition(|name| required.contains(name));
        let required = names.len();
        names.extend(others);
        let definitions = ["$defs", "definitions"].into_iter();
        let definitions: Vec<_> = definitions.filter_map(|key| Some((key, parameters.get(key)?))).collect();
        let bytes = definitions.iter().map(|(_, all)| all.to_string().len()).sum();
        Self { function, names, required, definitions, bytes }
    }

    fn schema(&self, name: &str) -> Schema<'_> {
        let schema = &self.function.parameters["properties"][name];
        let text = schema.to_string();
        let (definitions, bytes): (&[_], _) =
            if text.contains("\"$ref\"") { (&self.definitions, self.bytes) } else { (&[], 0) };
        Schema { schema, definitions, bytes: text.len() + bytes }
    }
}

impl Schema<'_> {
    fn value(&self) -> Value {
        let mut schema = self.schema.clone();
        if let Value::Object(fields) = &mut schema {
            fields.extend(self.definitions.iter().map(|(key, all)| ((*key).to_owned(), (*all).clone())));
        }
        if schema == Value::Bool(true) { json!({}) } else { schema }
    }
}

/// The grammar of an answer that calls some of these tools.
///
/// # Errors
/// When the format cannot write the arguments of one of them, or when the grammar becomes too long.
pub fn calls(format: CallFormat, functions: &[Function], rule: CallRule) -> Result<Source, GrammarError> {
    let start = match (format, rule) {
        (CallFormat::Hermes | CallFormat::Qwen3Coder, CallRule::Several) => "start: call (\"\\n\" call)*",
        (CallFormat::Pythonic, CallRule::Several) => "start: \"[\" call (\", \" call)* \"]\"",
        (CallFormat::Pythonic, CallRule::One) => "start: \"[\" call \"]\"",
        (CallFormat::Gemma, CallRule::Several) => {
            "start: \"```tool_code\\n\" call (\"\\n\" call)* \"\\n```\""
        }
        (CallFormat::Gemma, CallRule::One) => "start: \"```tool_code\\n\" call \"\\n```\"",
        (CallFormat::FunctionGemma, CallRule::Several) => "start: call+",
        // Llama's models are not trained to write more than one call.
        (CallFormat::Hermes | CallFormat::Qwen3Coder | CallFormat::FunctionGemma, CallRule::One)
        | (CallFormat::Llama, _) => "start: call",
    };
    let names: Vec<String> = (0..functions.len()).map(|index| format!("call_{index}")).collect();
    let mut rules = Rules { text: format!("{start}\ncall: {}", names.join(" | ")) };
    for (index, function) in functions.iter().enumerate() {
        let name = Value::from(function.name.as_str());
        match format {
            CallFormat::Hermes => {
                let before = format!("<tool_call>\n{{\"name\": {name}, \"arguments\": ");
                object(&mut rules, index, function, &before, "}\n</tool_call>")?;
            }
            CallFormat::Llama => {
                let before = format!("{{\"name\": {name}, \"parameters\": ");
                object(&mut rules, index, function, &before, "}")?;
            }
            CallFormat::Pythonic | CallFormat::Gemma => {
                keywords(&mut rules, index, &Arguments::new(function))?;
            }
            CallFormat::Qwen3Coder => tags(&mut rules, index, &Arguments::new(function))?,
            CallFormat::FunctionGemma => fields(&mut rules, index, &Arguments::new(function))?,
        }
    }
    Ok(Source::lark(rules.text))
}

/// The rules of a call whose arguments are one JSON object.
fn object(
    rules: &mut Rules,
    index: usize,
    function: &Function,
    before: &str,
    after: &str,
) -> Result<(), GrammarError> {
    let (tool, schema) = (&function.name, &function.parameters);
    let call = format!("call_{index}: {} args_{index} {}", lark_text(before), lark_text(after));
    rules.add(tool, &call)?;
    let bytes = schema.to_string().len();
    rules.add_json(tool, &format!("args_{index}"), &Schema { schema, definitions: &[], bytes })
}

/// The rules of a call in tags: first its required arguments, then any of the others, each in the schema's order.
fn tags(rules: &mut Rules, index: usize, arguments: &Arguments<'_>) -> Result<(), GrammarError> {
    let Function { name: tool, parameters } = arguments.function;
    let refuse =
        |why: String| Err(GrammarError::Refused(format!("this model writes calls in tags, and {why}")));
    let odd = |name: &&&str| name.is_empty() || name.len() > LONGEST_NAME || name.contains(['>', '<', '\n']);
    if let Some(name) = arguments.names.iter().find(odd) {
        let name = start_of(name);
        return refuse(format!("an argument of the tool {tool} is called {name:?}, which no tag can name"));
    }
    if let Some(why) = elsewhere(arguments.function) {
        return refuse(why);
    }
    let all = (0..arguments.names.len())
        .map(|at| format!(" arg_{index}_{at}{}", if at < arguments.required { "" } else { "?" }));
    let before = lark_text(&format!("<tool_call>\n<function={tool}>\n"));
    let after = lark_text("</function>\n</tool_call>");
    rules.add(tool, &format!("call_{index}: {before}{} {after}", all.collect::<String>()))?;
    // The reader has the same, also where a limit ends the search.
    let kinds = kinds(parameters);
    let mut schemas = Schemas::new(parameters);
    for (at, name) in arguments.names.iter().enumerate() {
        let (rule, before) = (format!("{index}_{at}"), lark_text(&format!("<parameter={name}>\n")));
        rules.add(tool, &format!("arg_{rule}: {before} value_{rule} \"\\n\""))?;
        match kinds.get(*name).copied().unwrap_or(Kind::Text) {
            Kind::Json(_) => {
                let after = lark_text("\n</parameter>");
                rules.add(tool, &format!("value_{rule}: json_{rule} {after}"))?;
                rules.add_json(tool, &format!("json_{rule}"), &arguments.schema(name))?;
            }
            kind => plain(rules, tool, &rule, &mut schemas, &parameters["properties"][name], kind)?,
        }
    }
    Ok(())
}

/// Why a format that writes argument by argument cannot write the calls of a tool: some of its arguments are not in the list.
fn elsewhere(function: &Function) -> Option<String> {
    let Function { name, parameters } = function;
    let key = ["$ref", "allOf", "anyOf", "oneOf"].into_iter().find(|key| parameters.get(*key).is_some())?;
    Some(format!(
        "the arguments of the tool {name} are not listed in its properties alone, but in {key}, too"
    ))
}

/// As much of a name as an error repeats.
fn start_of(name: &str) -> String {
    name.chars().take(64).collect()
}

/// Longest text whose length a rule for plain text can limit, in characters.
const LONGEST_COUNTED: u64 = 1000;

/// The rules of an argument that may be plain text, including the tag that ends it.
fn plain<'a>(
    rules: &mut Rules,
    tool: &str,
    rule: &str,
    schemas: &mut Schemas<'a>,
    schema: &'a Value,
    kind: Kind,
) -> Result<(), GrammarError> {
    if let Some(values) = schemas.values(schema) {
        let written = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let texts = alternatives(rules, tool, &values, written)?;
        return rules.add(tool, &format!("value_{rule}: ({texts}) {}", lark_text("\n</parameter>")));
    }
    let any = counted(schemas.resolved(schema), kind);
    // Any text that does not contain the end tag, and the end of a line.
    let text = format!("TEXT_{rule}: /{any}\\n/ & ~/(?s:.*)<\\/parameter>(?s:.*)/");
    rules.add(tool, &text)?;
    rules.add(tool, &format!("value_{rule}[suffix=\"</parameter>\"]: TEXT_{rule}"))
}

/// These values as alternatives of a rule.
fn alternatives(
    rules: &Rules,
    tool: &str,
    values: &[&Value],
    written: impl Fn(&Value) -> String,
) -> Result<String, GrammarError> {
    let mut texts = String::new();
    for &value in values {
        let text = written(value);
        rules.have_room(tool, texts.len() + text.len())?;
        let or = if texts.is_empty() { "" } else { " | " };
        texts += &format!("{or}{}", lark_text(&text));
    }
    Ok(texts)
}

/// An expression for any text of the length that a schema asks for.
fn counted(schema: &Value, kind: Kind) -> String {
    let bound = |key: &str| schema.get(key).and_then(Value::as_u64).filter(|_| kind == Kind::Text);
    let least = bound("minLength").unwrap_or(0).min(LONGEST_COUNTED);
    let most = bound("maxLength").filter(|most| (least..=LONGEST_COUNTED).contains(most));
    let most = most.map_or(String::new(), |most| most.to_string());
    format!("(?s:.{{{least},{most}}})")
}

/// The rules of a call of FunctionGemma: first its required arguments, then any of the others, each in the schema's order. Lists and
/// objects are JSON, which the reader accepts, too.
fn fields(rules: &mut Rules, index: usize, arguments: &Arguments<'_>) -> Result<(), GrammarError> {
    const ESCAPE: &str = function_gemma::ESCAPE;
    let Function { name: tool, parameters } = arguments.function;
    let refuse = |why: String| Err(GrammarError::Refused(format!("of FunctionGemma's calls, {why}")));
    let odd = |name: &&&str| {
        name.is_empty() || name.len() > LONGEST_NAME || name.trim() != **name || name.contains(ODD_IN_FIELDS)
    };
    if let Some(name) = arguments.names.iter().find(odd) {
        let name = start_of(name);
        return refuse(format!("an argument of the tool {tool} is called {name:?}, which they cannot name"));
    }
    if let Some(why) = elsewhere(arguments.function) {
        return refuse(why);
    }
    let before = format!("{}{}{tool}{{", function_gemma::OPEN, function_gemma::CALL);
    let after = format!("}}{}", function_gemma::CLOSE);
    separated(rules, index, arguments, [&before, ",", &after])?;
    let kinds = kinds(parameters);
    let mut schemas = Schemas::new(parameters);
    for (at, name) in arguments.names.iter().enumerate() {
        let rule = format!("{index}_{at}");
        rules.add(tool, &format!("arg_{rule}: {} value_{rule}", lark_text(&format!("{name}:"))))?;
        let schema = &parameters["properties"][name];
        let kind = kinds.get(*name).copied().unwrap_or(Kind::Text);
        let values = match kind {
            Kind::Text | Kind::Mixed(_) => schemas.values(schema),
            Kind::Json(_) => None,
        };
        if let Some(values) = values {
            if values.iter().any(|value| value.as_str().is_some_and(|text| text.contains(ESCAPE))) {
                return refuse(format!(
                    "an argument of the tool {tool} may be a text with {ESCAPE}, which ends a text"
                ));
            }
            let written = |value: &Value| match value.as_str() {
                Some(text) => format!("{ESCAPE}{text}{ESCAPE}"),
                None => value.to_string(),
            };
            let texts = alternatives(rules, tool, &values, written)?;
            rules.add(tool, &format!("value_{rule}: {texts}"))?;
            continue;
        }
        let mark = lark_text(ESCAPE);
        let value = match kind {
            Kind::Text => format!("{mark} text_{rule}"),
            Kind::Mixed(_) => format!("{mark} text_{rule} | json_{rule}"),
            Kind::Json(_) => format!("json_{rule}"),
        };
        rules.add(tool, &format!("value_{rule}: {value}"))?;
        if let Kind::Text | Kind::Mixed(_) = kind {
            let any = counted(schemas.resolved(schema), kind);
            rules.add(tool, &format!("TEXT_{rule}: /{any}/ & ~/(?s:.*){ESCAPE}(?s:.*)/"))?;
            rules.add(tool, &format!("text_{rule}[suffix={mark}]: TEXT_{rule}"))?;
        }
        if let Kind::Mixed(_) | Kind::Json(_) = kind {
            rules.add_json(tool, &format!("json_{rule}"), &arguments.schema(name))?;
        }
    }
    Ok(())
}

/// Letters that the name of an argument cannot have in FunctionGemma's calls.
const ODD_IN_FIELDS: [char; 9] = [':', ',', '{', '}', '[', ']', '<', '"', '\n'];

/// The rule of a call: first its required arguments, then any of the others, each in the schema's order. `marks` are the texts before
/// the arguments, between two of them, and behind them.
///
/// ```text
/// required  call: "f(" arg_0 ", " arg_1 (", " arg_2)? (", " arg_3)? ")"
/// none      call: "f(" some_1? ")"
///           some_0: arg_0
///           some_1: some_0 (", " arg_1)? | arg_1       at least one of the arguments up to the second
/// ```
fn separated(
    rules: &mut Rules,
    index: usize,
    arguments: &Arguments<'_>,
    marks: [&str; 3],
) -> Result<(), GrammarError> {
    let Arguments { function, names, required, .. } = arguments;
    let tool = &function.name;
    let [before, comma, after] = marks.map(lark_text);
    let rule = |at: usize| format!("arg_{index}_{at}");
    let all = match (required, names.len()) {
        (0, 0) => String::new(),
        (0, count) => format!("some_{index}_{}? ", count - 1),
        (required, count) => {
            let between = format!(" {comma} ");
            let must: Vec<String> = (0..*required).map(rule).collect();
            let may: String = (*required..count).map(|at| format!(" ({comma} {})?", rule(at))).collect();
            format!("{}{may} ", must.join(between.as_str()))
        }
    };
    rules.add(tool, &format!("call_{index}: {before} {all}{after}"))?;
    if *required > 0 {
        return Ok(());
    }
    for at in 0..names.len() {
        let arg = rule(at);
        let some = match at.checked_sub(1) {
            None => arg,
            Some(last) => format!("some_{index}_{last} ({comma} {arg})? | {arg}"),
        };
        rules.add(tool, &format!("some_{index}_{at}: {some}"))?;
    }
    Ok(())
}

/// The rules of a call in Python's notation. Values are JSON, which the reader accepts like literals of Python.
fn keywords(rules: &mut Rules, index: usize, arguments: &Arguments<'_>) -> Result<(), GrammarError> {
    let Arguments { function, names, .. } = arguments;
    let tool = &function.name;
    let odd = |name: &&&str| !name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
    if let Some(name) = names.iter().find(odd) {
        let name = start_of(name);
        return Err(GrammarError::Refused(format!(
            "this model writes calls in Python's notation, and an argument of the tool {tool} is called {name:?}, which is no name there"
        )));
    }
    separated(rules, index, arguments, [&format!("{tool}("), ", ", ")"])?;
    for (at, name) in names.iter().enumerate() {
        let value = format!("value_{index}_{at}");
        rules.add(tool, &format!("arg_{index}_{at}: {} {value}", lark_text(&format!("{name}="))))?;
        rules.add_json(tool, &value, &arguments.schema(name))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use host_grammar::Compiler;

    use super::*;
    use crate::text::calls::tests::compiler;

    const END: u32 = 0;

    /// A tool whose arguments are called `a` to `e`. The bits of `required` say which of them are required.
    fn tool(count: usize, required: usize) -> Function {
        let name = |at: usize| ["a", "b", "c", "d", "e"][at].to_owned();
        let properties: Map<String, Value> = (0..count).map(|at| (name(at), json!({"const": at}))).collect();
        let required: Vec<String> = (0..count).filter(|at| required >> at & 1 == 1).map(name).collect();
        let parameters = json!({"type": "object", "properties": properties, "required": required});
        Function { name: "f".to_owned(), parameters }
    }

    /// The rule of a call as it was written before its optional arguments became a chain of rules.
    fn one_rule(count: usize, required: usize) -> String {
        let may =
            |from: usize| -> String { (from..count).map(|at| format!(" (\", \" arg_0_{at})?")).collect() };
        let first = |at: usize| format!("arg_0_{at}{}", may(at + 1));
        let must: Vec<String> = (0..required).map(|at| format!("arg_0_{at}")).collect();
        let arguments = match (required, count) {
            (0, 0) => String::new(),
            (0, _) => format!("({})?", (0..count).map(first).collect::<Vec<_>>().join(" | ")),
            _ => format!("{}{}", must.join(" \", \" "), may(required)),
        };
        format!("call_0: \"f(\" {arguments} \")\"")
    }

    /// Which of these texts a grammar takes as whole answers.
    fn taken<'a>(compiler: &Compiler, source: &Source, texts: &'a [String]) -> Vec<&'a str> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let compiled = runtime.block_on(compiler.compile(0, source)).unwrap();
        let takes = |text: &&String| {
            let mut state = compiled.begin(vec![END]);
            text.bytes()
                .map(u32::from)
                .all(|byte| state.mask().unwrap().allows(byte) && state.consume(byte).is_ok())
                && state.mask().unwrap().allows(END)
        };
        texts.iter().filter(takes).map(String::as_str).collect()
    }

    #[test]
    fn an_answer_is_json_or_calls_in_tags() {
        let compiler = compiler();
        let answer = Source::json_schema(
            &json!({"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}),
        );
        const HERMES: &str = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 0}}\n</tool_call>";
        const CODER: &str =
            "<tool_call>\n<function=f>\n<parameter=a>\n0\n</parameter>\n</function>\n</tool_call>";
        const FUNCTION: &str = "<start_function_call>call:f{a:0}<end_function_call>";
        for (format, call, two) in [
            (CallFormat::Hermes, HERMES, format!("{HERMES}\n{HERMES}")),
            (CallFormat::Qwen3Coder, CODER, format!("{CODER}\n{CODER}")),
            (CallFormat::Gemma, "```tool_code\nf(a=0)\n```", "```tool_code\nf(a=0)\nf(a=0)\n```".to_owned()),
            (CallFormat::FunctionGemma, FUNCTION, format!("{FUNCTION}{FUNCTION}")),
        ] {
            let calls = calls(format, &[tool(1, 1)], CallRule::Several).unwrap();
            let texts = [r#"{"sum":1}"#, "{\n  \"sum\": 1\n}", call, &two].map(str::to_owned);
            let either = answer.or(&calls).unwrap();
            assert_eq!(taken(&compiler, &either, &texts), texts, "{}", either.text);
            let wrong = [r#"{"a":1}"#, "so", &format!("{{\"sum\":1}}{call}")].map(str::to_owned);
            assert!(taken(&compiler, &either, &wrong).is_empty(), "{}", either.text);
        }
    }

    #[test]
    fn functiongemma_has_texts_between_its_marks_and_json_elsewhere() {
        let compiler = compiler();
        let parameters = json!({
            "type": "object", "required": ["text", "kind", "any", "list"],
            "properties": {
                "text": {"type": "string", "minLength": 1, "maxLength": 4}, "kind": {"enum": ["a", null]},
                "any": {"type": ["string", "integer"]}, "list": {"type": "array", "items": {"type": "string"}},
            },
        });
        let function = Function { name: "f".to_owned(), parameters };
        let source = calls(CallFormat::FunctionGemma, &[function], CallRule::One).unwrap();
        let call = |text: &str, kind: &str, any: &str, list: &str| {
            let arguments = format!("text:{text},kind:{kind},any:{any},list:{list}");
            format!("<start_function_call>call:f{{{arguments}}}<end_function_call>")
        };
        let right = [
            call("<escape><\"},<escape>", "<escape>a<escape>", "7", "[]"),
            call("<escape>é<escape>", "null", "<escape>x, y<escape>", "[\"a\"]"),
        ];
        assert_eq!(taken(&compiler, &source, &right), right, "{}", source.text);
        let wrong = [
            call("<escape>abcde<escape>", "null", "7", "[]"),
            call("<escape><escape>", "null", "7", "[]"),
            call("<escape>a<escape>b<escape>", "null", "7", "[]"),
            call("a", "null", "7", "[]"),
            call("<escape>a<escape>", "a", "7", "[]"),
            call("<escape>a<escape>", "null", "x", "[]"),
        ];
        assert!(taken(&compiler, &source, &wrong).is_empty(), "{}", source.text);
    }

    #[test]
    fn a_chain_of_rules_takes_the_calls_that_one_long_rule_takes() {
        let compiler = compiler();
        for count in 0..=5 {
            for required in 0..1 << count {
                let function = tool(count, required);
                let source =
                    calls(CallFormat::Pythonic, std::slice::from_ref(&function), CallRule::One).unwrap();
                let lines: Vec<&str> =
                    source.text.lines().filter(|line| !line.starts_with("some_")).collect();
                let at = lines.iter().position(|line| line.starts_with("call_0:")).unwrap();
                let of_required = required.count_ones() as usize;
                let long = one_rule(count, of_required);
                let before = [&lines[..at], &[long.as_str()], &lines[at + 1..]].concat().join("\n");
                // Any of the arguments, in the grammar's order, in the reverse order, and with the first one again.
                let arguments = Arguments::new(&function);
                let all: Vec<String> = arguments
                    .names
                    .iter()
                    .map(|name| format!("{name}={}", function.parameters["properties"][name]["const"]))
                    .collect();
                let some = (0..1_usize << count).map(|set| -> Vec<&str> {
                    let chosen = all.iter().enumerate().filter(|(at, _)| set >> at & 1 == 1);
                    chosen.map(|(_, text)| text.as_str()).collect()
                });
                let texts: Vec<String> = some
                    .flat_map(|some| {
                        let reverse: Vec<&str> = some.iter().rev().copied().collect();
                        let again: Vec<&str> = some.iter().chain(some.first()).copied().collect();
                        [some, reverse, again].map(|some| format!("[f({})]", some.join(", ")))
                    })
                    .collect();
                let now = taken(&compiler, &source, &texts);
                assert_eq!(now, taken(&compiler, &Source::lark(before), &texts), "{}", source.text);
                let kinds: HashSet<&str> = now.into_iter().collect();
                assert_eq!(kinds.len(), 1 << (count - of_required), "{}", source.text);
            }
        }
    }
}
