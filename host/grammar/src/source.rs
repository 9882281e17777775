//! A grammar as text, and the checks before any engine gets it.

use serde_json::{Value, json};

use crate::GrammarError;
use crate::schema::for_engine;

/// Most bytes of a grammar.
pub const MAX_TEXT: usize = 256 << 10;
/// Deepest nesting of lists, objects, groups or brackets.
pub const MAX_DEPTH: usize = 64;
/// Deepest nesting of brackets, with brackets in quotes counted.
const MAX_BRACKETS: usize = 1000;
/// Most alternatives of a choice.
const MAX_CHOICES: usize = 4096;
/// Largest product of the bounds of repetitions that are nested into each other.
const MAX_REPEATS: u64 = 100_000;

/// What a text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A JSON schema.
    JsonSchema,
    /// A regular expression that the whole answer matches.
    Regex,
    /// Rules in the notation of Lark, as llguidance reads it.
    Lark,
}

impl Kind {
    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::JsonSchema => "json_schema",
            Kind::Regex => "regex",
            Kind::Lark => "lark",
        }
    }

    /// The kind of this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        [Kind::JsonSchema, Kind::Regex, Kind::Lark].into_iter().find(|kind| kind.as_str() == name)
    }

    /// The name in messages.
    #[must_use]
    pub fn noun(self) -> &'static str {
        match self {
            Kind::JsonSchema => "JSON schema",
            Kind::Regex => "regular expression",
            Kind::Lark => "grammar",
        }
    }
}

/// A grammar as it travels with a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Source {
    /// What the text is.
    pub kind: Kind,
    /// The text.
    pub text: String,
    /// Whether JSON has no white space between its parts. Only for [`Kind::JsonSchema`].
    pub compact: bool,
}

impl Source {
    /// Any JSON object.
    #[must_use]
    pub fn json_object() -> Self {
        Self::json_schema(&json!({"type": "object"}))
    }

    /// JSON that follows a schema.
    #[must_use]
    pub fn json_schema(schema: &Value) -> Self {
        Self { kind: Kind::JsonSchema, text: schema.to_string(), compact: false }
    }

    /// Text that a regular expression matches from its first to its last character.
    #[must_use]
    pub fn regex(text: impl Into<String>) -> Self {
        Self { kind: Kind::Regex, text: text.into(), compact: false }
    }

    /// Text that follows rules in Lark's notation, from the rule `start` on.
    #[must_use]
    pub fn lark(text: impl Into<String>) -> Self {
        Self { kind: Kind::Lark, text: text.into(), compact: false }
    }

    /// One of these texts.
    ///
    /// # Errors
    /// When there is no text, a text is empty, or there are too many.
    pub fn choice(texts: &[String]) -> Result<Self, GrammarError> {
        let refuse = |reason: String| Err(GrammarError::Refused(reason));
        if texts.is_empty() || texts.iter().any(String::is_empty) {
            return refuse("a choice needs at least one text, and none of its texts may be empty".into());
        }
        if texts.len() > MAX_CHOICES {
            return refuse(format!("a choice has {} texts; at most {MAX_CHOICES} are taken", texts.len()));
        }
        let quoted: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
        Ok(Self::lark(format!("start: {}", quoted.join(" | "))))
    }

    /// The same grammar, preceded by thoughts that end with `</think>`. `open` says that the prompt has begun the thoughts.
    /// Otherwise an answer may have thoughts or none.
    #[must_use]
    pub fn after_thoughts(&self, open: bool) -> Self {
        let begin = if open { "think space" } else { "(\"<think>\" think space)?" };
        let body = match self.kind {
            Kind::Lark => renamed(&self.text, "answer"),
            Kind::JsonSchema | Kind::Regex => format!("answer: {}", self.rule()),
        };
        let rules = "think[suffix=\"</think>\"]: /(?s:.*)/\nspace: /[ \\n]*/";
        Self::lark(format!("start: {begin} answer\n{rules}\n{body}"))
    }

    /// An answer under this grammar, or one under `rules`, which are Lark's and have no rule `first` and `second`. `None` if this
    /// grammar is of rules itself: their names may be the same.
    ///
    /// The first characters must tell which of the two it is. The engine reads as much as one piece of either grammar can be, and
    /// does not go back.
    #[must_use]
    pub fn or(&self, rules: &Self) -> Option<Self> {
        (self.kind != Kind::Lark && rules.kind == Kind::Lark).then(|| {
            let second = renamed(&rules.text, "second");
            Self::lark(format!("start: first | second\nfirst: {}\n{second}", self.rule()))
        })
    }

    /// A schema or an expression as the right side of one of Lark's rules.
    fn rule(&self) -> String {
        match self.kind {
            Kind::JsonSchema => {
                let schema = serde_json::from_str(&self.text).unwrap_or_else(|_wrong| json!({}));
                json_rule(&schema, self.compact)
            }
            Kind::Regex | Kind::Lark => format!("/{}/", within_slashes(&self.text)),
        }
    }

    /// Refuses a text that is too large or too deep for the engine, or has an option that clients may not set.
    ///
    /// # Errors
    /// With the limit that the text exceeds, or what else is wrong.
    pub fn check(&self) -> Result<(), GrammarError> {
        let noun = self.kind.noun();
        let refuse = |reason: String| Err(GrammarError::Refused(reason));
        if self.text.trim().is_empty() {
            return refuse(format!("the {noun} is empty"));
        }
        if self.text.len() > MAX_TEXT {
            return refuse(format!("the {noun} has {} bytes; at most {MAX_TEXT} are taken", self.text.len()));
        }
        if self.text.contains('\0') {
            return refuse(format!("the {noun} has a NUL character"));
        }
        // A quote is an ordinary character in an expression, and can be one in rules. So brackets in quotes count too, with a
        // higher limit.
        let within = if self.kind == Kind::Regex { 0 } else { deepest(&self.text, true) };
        let all = if self.kind == Kind::JsonSchema { 0 } else { deepest(&self.text, false) };
        for (depth, most) in [(within, MAX_DEPTH), (all, MAX_BRACKETS)] {
            if depth > most {
                return refuse(format!("the {noun} is nested {depth} deep; at most {most} are taken"));
            }
        }
        match self.kind {
            Kind::JsonSchema => self.check_schema(),
            Kind::Regex | Kind::Lark => {
                let repeats = repeats(&self.text);
                if repeats > MAX_REPEATS {
                    return refuse(format!(
                        "the bounds of the {noun}'s repetitions multiply to {repeats}; at most {MAX_REPEATS} are taken"
                    ));
                }
                Ok(())
            }
        }
    }

    fn check_schema(&self) -> Result<(), GrammarError> {
        let schema: Value = serde_json::from_str(&self.text).map_err(|error| GrammarError::Compile {
            kind: self.kind.noun(),
            reason: format!("it is not JSON: {error}"),
        })?;
        match &schema {
            Value::Object(fields) if fields.contains_key("x-guidance") => Err(GrammarError::Refused(
                "x-guidance in a JSON schema is not for clients: leave it out".into(),
            )),
            Value::Object(_) | Value::Bool(true) => Ok(()),
            _ => Err(GrammarError::Refused("a JSON schema must be an object".into())),
        }
    }
}

/// A regular expression as it stands between the slashes of Lark's notation, which may have no slash and no line's end in it.
fn within_slashes(regex: &str) -> String {
    let (mut within, mut is_escaped) = (String::with_capacity(regex.len()), false);
    for letter in regex.chars() {
        match letter {
            '/' if !is_escaped => within.push_str("\\/"),
            '\n' if is_escaped => within.push('n'),
            '\n' => within.push_str("\\n"),
            letter => within.push(letter),
        }
        is_escaped = letter == '\\' && !is_escaped;
    }
    within
}

/// The expression of Lark for JSON of a schema.
#[must_use]
pub fn json_rule(schema: &Value, compact: bool) -> String {
    format!("%json {}", for_engine(schema, compact))
}

/// Rules with the rule `start` renamed.
fn renamed(rules: &str, name: &str) -> String {
    let line = |line: &str| match line.trim_start().strip_prefix("start") {
        Some(rest) if rest.trim_start().starts_with(':') => format!("{name}{rest}"),
        _ => line.to_owned(),
    };
    rules.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// A text as Lark writes it.
#[must_use]
pub fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// How deep brackets nest. If quotes are `read`, brackets in quoted texts do not count. The text may be no valid grammar: the
/// engine refuses it later.
fn deepest(text: &str, read: bool) -> usize {
    let (mut depth, mut most) = (0_usize, 0);
    let mut escaped = false;
    let mut quoted = false;
    for byte in text.bytes() {
        if std::mem::take(&mut escaped) {
            continue;
        }
        match byte {
            b'\\' => escaped = true,
            b'"' => quoted = read && !quoted,
            b'(' | b'[' | b'{' if !quoted => {
                depth += 1;
                most = most.max(depth);
            }
            b')' | b']' | b'}' if !quoted => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    most
}

/// An upper limit on how often bounded repetitions repeat within each other: the largest product of nested `{m,n}`.
fn repeats(text: &str) -> u64 {
    // For each open group, the largest product of a part of it that is complete.
    let mut open = vec![1_u64];
    // The product of the newest item, to which a repetition would apply.
    let mut last = 1_u64;
    let mut bytes = text.char_indices().peekable();
    while let Some((at, letter)) = bytes.next() {
        match letter {
            '\\' => {
                bytes.next();
                last = 1;
            }
            '(' => {
                open.push(1);
                last = 1;
            }
            ')' => {
                last = if open.len() > 1 { open.pop().unwrap_or(1) } else { 1 };
                keep(&mut open, last);
            }
            '{' => match bound(text[at + 1..].chars()) {
                Some((times, read)) => {
                    last = last.saturating_mul(times.max(1));
                    keep(&mut open, last);
                    bytes.nth(read - 1);
                }
                None => last = 1,
            },
            // They repeat the item once more, or make its repetition lazy.
            '?' | '*' | '+' => {}
            _ => last = 1,
        }
    }
    open.into_iter().max().unwrap_or(1)
}

fn keep(open: &mut [u64], product: u64) {
    if let Some(outer) = open.last_mut() {
        *outer = (*outer).max(product);
    }
}

/// The larger number of `m}`, `m,}` or `m,n}`, and the number of characters up to the brace. White space may be anywhere. Reads no
/// further than to the first character that no bound has, so that two braces never read the same text. A comment behind a number,
/// which some regular expressions may have there, counts as a number that is too large.
fn bound(rest: impl Iterator<Item = char>) -> Option<(u64, usize)> {
    let mut inner = String::new();
    for (read, letter) in rest.enumerate() {
        match letter {
            '}' => {
                let (low, high) = inner.split_once([',', '.']).unwrap_or((&inner, ""));
                let number = |text: &str| text.trim_matches('.').parse::<u64>().ok();
                let low = number(low).or_else(|| low.is_empty().then_some(0))?;
                return Some((number(high).unwrap_or(low).max(low), read + 1));
            }
            '0'..='9' | ',' | '.' | '+' => inner.push(letter),
            '#' if inner.starts_with(|first: char| first.is_ascii_digit()) => {
                return Some((u64::MAX, read + 1));
            }
            letter if letter.is_whitespace() => {}
            _ => return None,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(source: &Source) -> String {
        source.check().err().map_or_else(String::new, |error| error.to_string())
    }

    #[test]
    fn what_is_too_large_too_deep_or_not_for_clients_is_refused_with_the_limit() {
        let deep = format!("{}1{}", "[".repeat(70), "]".repeat(70));
        for (source, words) in [
            (Source::lark(" "), "is empty"),
            (Source::regex("a".repeat(MAX_TEXT + 1)), "at most 262144"),
            (Source::regex("a\0"), "NUL"),
            (Source { text: deep, ..Source::json_object() }, "nested 70 deep"),
            (Source::regex(format!("{}a{}", "(".repeat(1001), ")".repeat(1001))), "nested 1001 deep"),
            (Source::lark(format!("start: /\"/ {}", "(".repeat(1001))), "nested 1001 deep"),
            (Source::lark(format!("start: {}", "(".repeat(65))), "nested 65 deep"),
            (Source::json_schema(&json!({"x-guidance": {"lenient": true}})), "x-guidance"),
            (Source::json_schema(&json!([])), "must be an object"),
            (Source { text: "{".into(), ..Source::json_object() }, "not JSON"),
            (Source::regex("((a{1,1000}){1,1000}){1,1000}"), "multiply to 1000000000"),
        ] {
            let found = reason(&source);
            assert!(found.contains(words), "{found}");
        }
        for fine in [
            Source::json_object(),
            Source::json_schema(&json!(true)),
            Source::regex(r"[(\[]{3}(a|b){2,5}"),
            Source::regex(r"(\d{1,3}\.){3}\d{1,3}"),
            Source::lark("start: \"((((\" "),
        ] {
            assert_eq!(fine.check(), Ok(()), "{fine:?}");
        }
    }

    #[test]
    fn repetitions_count_where_they_nest_and_not_where_they_follow_each_other() {
        for (text, product) in [
            ("a{10}b{20}", 20),
            ("(a{10}b){20}", 200),
            ("((a{2}){3}b{100}){4}", 400),
            (r"\{5}a{,7}", 7),
            ("a{3,}", 3),
            ("(a)(b{6})c", 6),
            ("[^{]{40}", 40),
            ("a{10 }{ 20}{1 0}", 2000),
            ("a{10}?{20}?", 200),
            ("a{10}+{20}*{3}", 600),
            ("a{10}b?{20}", 20),
            ("a{10} {20}", 20),
        ] {
            assert_eq!(repeats(text), product, "{text}");
        }
    }

    #[test]
    fn the_bounds_of_repetitions_are_read_in_as_many_steps_as_the_text_has_characters() {
        let text = "{)".repeat(MAX_TEXT / 2 - 1) + "}";
        for text in
            [text.as_str(), &"{1".repeat(MAX_TEXT / 2), &"{".repeat(MAX_TEXT), &"a{1}".repeat(MAX_TEXT / 4)]
        {
            let mut steps = 0_usize;
            for (at, _) in text.match_indices('{') {
                bound(text[at + 1..].chars().inspect(|_| steps += 1));
                assert!(steps <= 2 * text.len(), "{:.8}: {steps} steps at {at} of {}", text, text.len());
            }
        }
        assert_eq!(Source::regex(text).check(), Ok(()), "the engine refuses it");
        for (bound_of, times) in
            [("3}", Some(3)), (" 3 , 7 }", Some(7)), (",7}", Some(7)), ("3,}", Some(3)), ("3..7}x", Some(7))]
        {
            assert_eq!(bound(bound_of.chars()).map(|(times, _)| times), times, "{bound_of}");
        }
        assert_eq!(bound(" 3 }x".chars()), Some((3, 4)), "up to the brace");
        assert_eq!(bound("1000#a\n}".chars()), Some((u64::MAX, 5)), "a comment");
        for none in ["a}", "3", "3{4}", "}", "3,7", "#}"] {
            assert!(bound(none.chars()).is_none_or(|(times, _)| times == 0), "{none}");
        }
    }

    #[test]
    fn a_choice_is_the_texts_themselves() {
        let choice = Source::choice(&["a\"b".into(), "ü\n".into()]).unwrap();
        assert_eq!(choice.text, "start: \"a\\\"b\" | \"ü\\n\"");
        assert!(Source::choice(&[]).is_err() && Source::choice(&[String::new()]).is_err());
    }
}
