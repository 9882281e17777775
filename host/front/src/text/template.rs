//! Chat templates: Jinja, as Hugging Face's `apply_chat_template` renders it.

use std::io;
use std::sync::Arc;

use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value, syntax::SyntaxConfig};
use serde_json::Value as Json;

use super::TextError;
use super::calls::CallFormat;
use super::strftime::strftime;

/// A compiled chat template. Rendering is CPU work of the caller's thread.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
    source: Arc<str>,
}

const NAME: &str = "chat_template";
/// Most steps of the template engine for one prompt. A usual template takes about a hundred for a message.
const FUEL: u64 = 20_000_000;
/// Longest prompt that a template may write, in bytes. It is longer than the text of any context. Text that a template builds
/// before it writes is not limited, because the engine has no limit for it.
pub const LONGEST_PROMPT: usize = 64 << 20;

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("bos", &self.bos).field("eos", &self.eos).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a template. `bos` and `eos` are the values of `bos_token` and `eos_token` in it.
    ///
    /// # Errors
    /// When the source is not a template.
    pub fn new(source: String, bos: String, eos: String) -> Result<Self, TextError> {
        Self::with_fuel(source, bos, eos, FUEL)
    }

    /// Compiles a template with another limit on the steps of the engine.
    pub(crate) fn with_fuel(source: String, bos: String, eos: String, fuel: u64) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|error| TextError::Template(error.to_string()))?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(fuel));
        let kept = Arc::from(source.as_str());
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment
            .add_template_owned(NAME, source)
            .map_err(|error| TextError::Template(format!("not a template: {error}")))?;
        Ok(Self { environment, bos, eos, source: kept })
    }

    /// Compiles another template for the same model.
    ///
    /// # Errors
    /// When the source is not a template.
    pub fn instead(&self, source: String) -> Result<Self, TextError> {
        Self::new(source, self.bos.clone(), self.eos.clone())
    }

    /// Whether the template writes the tools of a request into the prompt.
    #[must_use]
    pub fn takes_tools(&self) -> bool {
        let template = self.environment.get_template(NAME);
        template.is_ok_and(|template| template.undeclared_variables(false).contains("tools"))
    }

    /// Whether the template has a place for tool calls and their results.
    #[must_use]
    pub fn takes_calls(&self) -> bool {
        self.source.contains("tool")
    }

    /// Whether the template mentions a role of this name.
    #[must_use]
    pub fn knows(&self, role: &str) -> bool {
        self.source.contains(role)
    }

    /// The format in which the template's model writes calls, if the template shows it.
    #[must_use]
    pub fn calls(&self) -> Option<CallFormat> {
        CallFormat::of_template(&self.source)
    }

    /// The prompt for these messages (a JSON list of objects with `role` and `content`), ready for the assistant's turn
    /// unless `extra` has `add_generation_prompt: false`. `extra` are further variables of the template (`enable_thinking`), and
    /// `now` is seconds since 1970.
    ///
    /// # Errors
    /// When the template refuses the messages, or the prompt has more than 64 MiB.
    pub fn render(
        &self,
        messages: &Json,
        extra: &serde_json::Map<String, Json>,
        now: u64,
    ) -> Result<String, TextError> {
        self.render_within(messages, extra, now, LONGEST_PROMPT)
    }

    /// As [`render`](Self::render), for a prompt of at most `most` bytes. A longer one is written no further.
    ///
    /// # Errors
    /// When the template refuses the messages, and [`TextError::TooLong`].
    pub fn render_within(
        &self,
        messages: &Json,
        extra: &serde_json::Map<String, Json>,
        now: u64,
        most: usize,
    ) -> Result<String, TextError> {
        // `tools` is none if there are no tools, as in Python: some templates test for that.
        let mut variables: Vec<(String, Value)> = vec![("tools".into(), Value::from(()))];
        let given: Vec<(String, Value)> =
            extra.iter().map(|(name, value)| (name.clone(), Value::from(Serde(value)))).collect();
        variables.extend(given);
        variables.extend([
            ("messages".into(), Value::from(Serde(messages))),
            (
                "add_generation_prompt".into(),
                extra
                    .get("add_generation_prompt")
                    .map_or_else(|| Value::from(true), |add| Value::from(Serde(add))),
            ),
            ("bos_token".into(), Value::from(self.bos.clone())),
            ("eos_token".into(), Value::from(self.eos.clone())),
            ("strftime_now".into(), Value::from_function(move |format: String| strftime(&format, now))),
        ]);
        let context = Value::from_pairs(variables);
        let mut prompt = Prompt { text: Vec::new(), most: most.min(LONGEST_PROMPT), is_too_long: false };
        let template = self.environment.get_template(NAME);
        match template.and_then(|template| template.render_captured_to(context, &mut prompt).map(drop)) {
            Ok(()) => String::from_utf8(prompt.text).map_err(|error| TextError::Template(error.to_string())),
            Err(_ended) if prompt.is_too_long => Err(TextError::TooLong(prompt.most)),
            Err(error) => {
                Err(TextError::Template(error.detail().map_or_else(|| error.to_string(), str::to_owned)))
            }
        }
    }
}

/// The text that a template has written, up to the longest prompt.
struct Prompt {
    text: Vec<u8>,
    most: usize,
    is_too_long: bool,
}

impl io::Write for Prompt {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.is_too_long |= text.len() > self.most - self.text.len();
        if self.is_too_long {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.text.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=…, separators=…, sort_keys=…)`. The built-in filter escapes HTML and
/// writes no spaces, which a model would notice.
fn tojson(value: Value, options: Kwargs) -> Result<Value, Error> {
    let style = Style::of(&options)?;
    let failed = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    if value.kind() == ValueKind::Undefined {
        return Err(Error::new(ErrorKind::UndefinedError, "tojson of an undefined value"));
    }
    let json = serde_json::to_value(&value).map_err(failed)?;
    let mut text = String::new();
    style.write(&json, 0, &mut text)?;
    Ok(Value::from_safe_string(text))
}

/// How [`tojson`] writes a value.
struct Style {
    /// Spaces of each level. If absent, all is on one line.
    indent: Option<usize>,
    /// The text between two items.
    comma: String,
    /// The text behind a key.
    colon: String,
    /// Whether the keys of an object are in the order of their characters.
    sorts: bool,
}

impl Style {
    /// # Errors
    /// When an option has a value that Python would refuse.
    fn of(options: &Kwargs) -> Result<Self, Error> {
        let indent: Option<usize> = options.get("indent")?;
        let sorts: Option<Value> = options.get("sort_keys")?;
        let separators: Option<Value> = options.get("separators")?;
        let (comma, colon) = match separators {
            Some(given) => separators_of(&given)?,
            // A line needs no space at its end.
            None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
            None => (", ".to_owned(), ": ".to_owned()),
        };
        Ok(Self { indent, comma, colon, sorts: sorts.is_some_and(|sorts| sorts.is_true()) })
    }

    /// Writes a value that is so deep in others. Indentation may make a text much longer than the value.
    ///
    /// # Errors
    /// When the text has more than [`LONGEST_PROMPT`] bytes.
    fn write(&self, json: &Json, depth: usize, text: &mut String) -> Result<(), Error> {
        match json {
            Json::Array(items) if !items.is_empty() => {
                text.push('[');
                for (index, item) in items.iter().enumerate() {
                    if index > 0 {
                        text.push_str(&self.comma);
                    }
                    self.line(depth + 1, text)?;
                    self.write(item, depth + 1, text)?;
                }
                self.line(depth, text)?;
                text.push(']');
            }
            Json::Object(fields) if !fields.is_empty() => {
                let mut fields: Vec<(&String, &Json)> = fields.iter().collect();
                if self.sorts {
                    // UTF-8 has the order of the characters.
                    fields.sort_unstable_by_key(|(name, _)| *name);
                }
                text.push('{');
                for (index, (name, value)) in fields.into_iter().enumerate() {
                    if index > 0 {
                        text.push_str(&self.comma);
                    }
                    self.line(depth + 1, text)?;
                    text.push_str(&Json::from(name.as_str()).to_string());
                    text.push_str(&self.colon);
                    self.write(value, depth + 1, text)?;
                }
                self.line(depth, text)?;
                text.push('}');
            }
            other => text.push_str(&other.to_string()),
        }
        Ok(())
    }

    /// Begins a line for a value that is so deep in others, if values have lines.
    ///
    /// # Errors
    /// When the text becomes too long.
    fn line(&self, depth: usize, text: &mut String) -> Result<(), Error> {
        let spaces = self.indent.unwrap_or(0).saturating_mul(depth);
        if text.len().saturating_add(spaces) > LONGEST_PROMPT {
            let message = format!("tojson writes more than {LONGEST_PROMPT} bytes");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        if self.indent.is_some() {
            text.push('\n');
            text.extend(std::iter::repeat_n(' ', spaces));
        }
        Ok(())
    }
}

/// The texts between two items and behind a key.
///
/// # Errors
/// When the value is not two texts.
fn separators_of(given: &Value) -> Result<(String, String), Error> {
    let values: Vec<Value> = given.try_iter()?.take(3).collect();
    let texts: Vec<Option<&str>> = values.iter().map(Value::as_str).collect();
    match texts[..] {
        [Some(comma), Some(colon)] => Ok((comma.to_owned(), colon.to_owned())),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "the separators of tojson are not two texts")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, messages: &Json) -> Result<String, TextError> {
        let template = ChatTemplate::new(source.into(), "<s>".into(), "</s>".into())?;
        template.render(messages, &serde_json::Map::new(), 0)
    }

    #[test]
    fn a_template_in_the_usual_style_renders() {
        let source = "{{ bos_token }}\n{% for message in messages %}\n    {% if message['role'] == 'system' %}\n        {% continue %}\n    {% endif %}\n<|{{ message.role.upper() }}|>{{ message['content'].strip() }}{{ eos_token }}\n{% endfor %}\n{% if add_generation_prompt %}\n<|ASSISTANT|>\n{%- endif %}";
        let messages =
            json!([{"role": "system", "content": "x"}, {"role": "user", "content": " Is 1 < 2 & \"so\"?  "}]);
        let text = render(source, &messages).unwrap();
        assert_eq!(text, "<s>\n<|USER|>Is 1 < 2 & \"so\"?</s>\n<|ASSISTANT|>");
    }

    #[test]
    fn raise_exception_reaches_the_caller_as_its_own_words() {
        let error = render("{{ raise_exception('roles must alternate') }}", &json!([])).unwrap_err();
        assert_eq!(error.to_string(), "the chat template refused the messages: roles must alternate");
    }

    #[test]
    fn tojson_writes_what_python_writes() {
        let messages = json!([{"b": 1, "a": ["<é>", null, true, 1.5]}, {}]);
        assert_eq!(
            render("{{ messages | tojson }}", &messages).unwrap(),
            r#"[{"b": 1, "a": ["<é>", null, true, 1.5]}, {}]"#
        );
        assert_eq!(render("{{ messages[1:] | tojson(indent=2) }}", &messages).unwrap(), "[\n  {}\n]");
    }

    #[test]
    fn tojson_takes_the_separators_and_the_order_of_keys_as_python_does() {
        // What `json.dumps(…, ensure_ascii=False)` of Python 3 writes with these options.
        let messages = json!([{"é": 1, "b": [2, {"d": 3, "c": 4}], "B": {}}]);
        for (options, text) in [
            ("sort_keys=true", r#"[{"B": {}, "b": [2, {"c": 4, "d": 3}], "é": 1}]"#),
            ("sort_keys=False", r#"[{"é": 1, "b": [2, {"d": 3, "c": 4}], "B": {}}]"#),
            ("separators=(',', ':')", r#"[{"é":1,"b":[2,{"d":3,"c":4}],"B":{}}]"#),
            ("separators=[',', ': '], sort_keys=True", r#"[{"B": {},"b": [2,{"c": 4,"d": 3}],"é": 1}]"#),
            ("separators=none", r#"[{"é": 1, "b": [2, {"d": 3, "c": 4}], "B": {}}]"#),
            (
                "indent=1, separators=(', ', ':'), sort_keys=true",
                "[\n {\n  \"B\":{}, \n  \"b\":[\n   2, \n   {\n    \"c\":4, \n    \"d\":3\n   }\n  ], \n  \"é\":1\n }\n]",
            ),
        ] {
            let source = format!("{{{{ messages | tojson({options}) }}}}");
            assert_eq!(render(&source, &messages).unwrap(), text, "{options}");
        }
        for options in ["separators=(',',)", "separators=(',', 1)", "separators=3"] {
            let source = format!("{{{{ messages | tojson({options}) }}}}");
            assert!(render(&source, &messages).is_err(), "{options}");
        }
    }

    #[test]
    fn the_date_is_the_callers() {
        assert_eq!(render("{{ strftime_now('%d %b %Y') }}", &json!([])).unwrap(), "01 Jan 1970");
    }

    #[test]
    fn a_template_that_would_go_on_for_ever_is_ended() {
        let loops = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
        let error = render(loops, &json!([])).unwrap_err();
        assert!(error.to_string().contains("fuel"), "{error}");
        // As many messages as fit into a body take fewer steps.
        let messages = vec![json!({"role": "user", "content": ""}); 100_000];
        let source = "{% for message in messages %}{% if message['role'] == 'user' %}<u>{{ message['content'] | trim }}{% endif %}{% endfor %}";
        assert_eq!(render(source, &Json::from(messages)).unwrap().len(), 300_000);
    }

    #[test]
    fn a_template_that_writes_more_than_any_prompt_is_ended() {
        let writes =
            |mib: usize| format!("{{% for a in range({mib}) %}}{{{{ 'x' * 1048576 }}}}{{% endfor %}}");
        assert_eq!(render(&writes(64), &json!([])).unwrap().len(), LONGEST_PROMPT);
        let error = render(&writes(65), &json!([])).map(|prompt| prompt.len()).unwrap_err();
        assert!(error.to_string().contains("more than 67108864 bytes"), "{error}");
    }

    #[test]
    fn a_prompt_has_no_more_bytes_than_its_caller_takes() {
        let template = ChatTemplate::new("{{ 'x' * 10 }}".into(), String::new(), String::new()).unwrap();
        let within = |most| template.render_within(&json!([]), &serde_json::Map::new(), 0, most);
        assert_eq!(within(10).unwrap().len(), 10);
        assert!(matches!(within(9), Err(TextError::TooLong(9))));
    }

    #[test]
    fn tojson_that_writes_more_than_a_prompt_may_have_is_ended() {
        let deep = (0..100).fold(json!(vec![0; 400_000]), |inner, _| Json::Array(vec![inner]));
        // It is not written to the prompt, which has a limit of its own.
        let error = render("{% set text = messages | tojson(indent=4) %}", &deep).unwrap_err();
        assert!(error.to_string().contains("tojson writes more than 67108864 bytes"), "{error}");
        let error =
            render("{% set text = messages | tojson(indent=99999999999) %}", &json!([1])).unwrap_err();
        assert!(error.to_string().contains("tojson writes more"), "{error}");
    }

    #[test]
    fn a_broken_template_is_refused_when_it_is_loaded() {
        let error = ChatTemplate::new("{% for %}".into(), String::new(), String::new()).unwrap_err();
        assert!(error.to_string().contains("not a template"), "{error}");
    }
}
