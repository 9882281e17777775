//! Grammars over a vocabulary of bytes and over a real model's.

#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

use host_front::text::TextModel;
use host_grammar::{Compiled, Compiler, GrammarError, Limits, Source, State, Vocabulary, ebnf};
use host_tests::fetched::Artifact;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

const END: u32 = 0;

fn compiler() -> Compiler {
    over(&Vocabulary::bytes())
}

/// A compiler with times that no busy machine needs.
fn over(vocabulary: &Vocabulary) -> Compiler {
    let hour = Duration::from_secs(3600);
    Compiler::new(vocabulary, Limits { wait: hour, compile_time: hour, ..Limits::default() }).unwrap()
}

fn compile(compiler: &Compiler, source: &Source) -> Result<Arc<Compiled>, GrammarError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(compiler.compile(0, source))
}

/// Whether a grammar allows each byte of a text in turn and then the end, which is byte 0.
fn takes(compiler: &Compiler, source: &Source, text: &str) -> bool {
    let mut state = compile(compiler, source).unwrap_or_else(|error| panic!("{error}")).begin(vec![END]);
    for byte in text.bytes() {
        let token = u32::from(byte);
        if !state.mask().is_ok_and(|mask| mask.allows(token)) {
            return false;
        }
        state.consume(token).unwrap();
    }
    state.mask().unwrap().allows(END)
}

#[test]
fn each_kind_takes_what_follows_it_and_nothing_else() {
    let compiler = compiler();
    let person = json!({
        "type": "object", "required": ["name", "age"], "additionalProperties": false,
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0}, "likes": {"$ref": "#/$defs/list"}},
        "$defs": {"list": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}},
    });
    let compact = Source { compact: true, ..Source::json_schema(&person) };
    for (source, right, wrong) in [
        (
            Source::json_schema(&person),
            &[
                r#"{"name":"Ada","age":36}"#,
                "{\n  \"name\": \"\",\n  \"age\": 0,\n  \"likes\": [\"b\", \"a\"]\n}",
            ][..],
            &[
                r#"{"name":"Ada"}"#,
                r#"{"name":"Ada","age":-1}"#,
                r#"{"name":"Adalbert","age":1}"#,
                "[]",
                r#"{"name":"Ada","age":1,"x":2}"#,
            ][..],
        ),
        (compact, &[r#"{"name":"Ada","age":36}"#], &[r#"{"name": "Ada", "age": 36}"#]),
        (Source::json_object(), &["{}", r#"{"a": [1, {"b": null}]}"#], &["[]", "1", "{\"a\":}", "{a:1}"]),
        (Source::regex(r"(\d{1,3}\.){3}\d{1,3}"), &["127.0.0.1"], &["127.0.0", "x127.0.0.1", "127.0.0.1x"]),
        (
            Source::choice(&["red".into(), "reddish".into()]).unwrap(),
            &["red", "reddish"],
            &["re", "green", "redd"],
        ),
        (Source::lark("start: \"<\" /[a-z]+/ \">\""), &["<ab>"], &["<>", "<AB>"]),
        (
            ebnf::source("root ::= item (\",\" item){0,2} \"\"\nitem ::= [a-c/]+ | \"\\u00e9\"").unwrap(),
            &["a", "ab/,é,c"],
            &["", "a,", "a,b,c,a", "d"],
        ),
    ] {
        for text in right {
            assert!(takes(&compiler, &source, text), "{source:?} must take {text}");
        }
        for text in wrong {
            assert!(!takes(&compiler, &source, text), "{source:?} must not take {text}");
        }
    }
}

#[test]
fn white_space_between_parts_of_json_has_an_end() {
    let compiler = compiler();
    let schema = Source::json_schema(
        &json!({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}),
    );
    assert!(takes(&compiler, &schema, &format!("{{\n{}\"a\" : null\r\n}}", " ".repeat(40))));
    for endless in ["{\n\n\"a\":null}", "{\n \n\"a\":null}", &format!("{{{}\"a\":null}}", " ".repeat(41))] {
        assert!(!takes(&compiler, &schema, endless), "{endless:?}");
    }
}

#[test]
fn thoughts_may_or_must_come_before_an_answer() {
    let compiler = compiler();
    let lark = Source::lark("start: digit+\ndigit: /[0-9]/");
    let object = Source::json_schema(
        &json!({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": false}),
    );
    let compact = Source { compact: true, ..object.clone() };
    for (source, answer) in [
        (&lark, "12"),
        (&Source::regex("a/b"), "a/b"),
        (&Source::regex(r"a\/b\\[/]\\/c"), r"a/b\/\/c"),
        (&Source::regex("a\nb"), "a\nb"),
        (&object, "{}"),
        (&compact, "{\"a\":null}"),
    ] {
        let free = source.after_thoughts(false);
        for text in [answer.to_owned(), format!("<think>\nso </b>\n</think>\n\n{answer}")] {
            assert!(takes(&compiler, &free, &text), "{free:?}: {text:?}");
        }
        assert!(!takes(&compiler, &free, "<think>") && !takes(&compiler, &free, "x"));
        let open = source.after_thoughts(true);
        assert!(takes(&compiler, &open, &format!("so</think>{answer}")) && !takes(&compiler, &open, answer));
    }
}

#[test]
fn an_answer_may_follow_one_of_two_grammars() {
    let compiler = compiler();
    let calls = Source::lark("start: call call*\ncall: \"<\" /[a-z]/ \">\"");
    let object = Source::json_schema(&json!({"type": "object", "additionalProperties": false}));
    let either = object.or(&calls).unwrap();
    assert!(takes(&compiler, &either, "{}") && takes(&compiler, &either, "<a><b>"));
    assert!(!takes(&compiler, &either, "{}<a>") && !takes(&compiler, &either, "x"));
    assert!(takes(&compiler, &either.after_thoughts(true), "so</think><a>"));
    assert!(takes(&compiler, &Source::regex("a/b").or(&calls).unwrap(), "a/b"));
    assert!(calls.or(&calls).is_none() && object.or(&object).is_none());
}

#[test]
fn what_pydantic_and_zod_write_beyond_the_engines_keywords_is_enforced() {
    let compiler = compiler();
    let decimal =
        |end: &str| json!({"type": "string", "pattern": format!(r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{end}")});
    for (schema, right, wrong) in [
        (
            decimal("*$"),
            &["\"1\"", "\"-0.50\"", "\".5\"", "\"+7.\""][..],
            &["\"\"", "\"-\"", "\".\"", "\"1e5\""][..],
        ),
        (
            decimal("{0,2}0*$"),
            &["\"1.25\"", "\"1.2500\"", "\"12\"", "\".05\""],
            &["\"1.255\"", "\".\"", "\"+\""],
        ),
        (
            json!({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}),
            &["{}", r#"{"a":1,"b":2}"#],
            &[r#"{"a":"1"}"#],
        ),
        (
            json!({"type": "object", "propertyNames": {"enum": ["low", "high"]}, "additionalProperties": {"type": "integer"}}),
            &["{}", r#"{"low":1,"high":2}"#, r#"{"high":2}"#],
            &[r#"{"mid":1}"#, r#"{"low":true}"#],
        ),
        (
            json!({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}, "additionalProperties": {"type": "integer"}}),
            &[r#"{"ab":1}"#, r#"{"ab":1,"abc":2}"#],
            &[r#"{"a":1}"#, r#"{"abcd":1}"#],
        ),
        (json!({"type": "string", "format": "cuid2", "maxLength": 2}), &["\"ab\""], &["\"abc\"", "1"]),
        (
            json!({"type": "array", "items": {"type": "integer"}, "uniqueItems": true, "maxItems": 1}),
            &["[]", "[1]"],
            &["[1,2]"],
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "integer"}}, "unevaluatedProperties": false}),
            &["{}", r#"{"a":1}"#],
            &[r#"{"b":1}"#],
        ),
    ] {
        let source = Source::json_schema(&schema);
        for text in right {
            assert!(takes(&compiler, &source, text), "{schema} does not take {text}");
        }
        for text in wrong {
            assert!(!takes(&compiler, &source, text), "{schema} takes {text}");
        }
    }
}

#[test]
fn what_cannot_be_carried_out_is_refused_with_a_reason() {
    let compiler = compiler();
    for (source, words) in [
        (Source::regex("(a"), "regular expression cannot be used"),
        (Source::regex("(?=a)b"), "regular expression cannot be used"),
        (Source::lark("begin: \"a\""), "grammar cannot be used"),
        (Source::json_schema(&json!({"type": "strange"})), "strange"),
        (Source::json_schema(&json!({"type": "string", "format": "json-pointer"})), "json-pointer"),
        (
            Source::json_schema(&json!({"type": "array", "uniqueItems": true, "contains": {}})),
            "cannot be enforced here (\"contains\", \"uniqueItems\"): leave them out",
        ),
        (
            Source::lark("start: %json {\"type\": \"array\", \"uniqueItems\": true}"),
            "cannot be enforced here (\"uniqueItems\")",
        ),
        (
            Source::json_schema(&json!({"propertyNames": {"pattern": "a"}, "properties": {"b": true}})),
            "propertyNames",
        ),
        (Source::json_schema(&json!({"$ref": "https://example.com/x.json"})), "JSON schema cannot be used"),
        (Source::json_schema(&json!({"$ref": "#/$defs/none"})), "JSON schema cannot be used"),
        (Source::json_schema(&json!(false)), "must be an object"),
    ] {
        let error = compile(&compiler, &source).err().unwrap().to_string();
        assert!(error.contains(words) && !error.contains('\n'), "{source:?}: {error}");
        assert_eq!(compile(&compiler, &source).err().unwrap().to_string(), error, "kept");
    }
}

/// A real vocabulary: SmolLM2's, which has a token of its own for the end of a turn.
fn real() -> (TextModel, Vocabulary) {
    let text = TextModel::load(&Artifact::SmolLm2.path()).unwrap();
    let tokenizer = text.tokenizer.clone();
    let width = tokenizer.vocabulary();
    let vocabulary = Vocabulary::new(width, |id| (tokenizer.token_bytes(id), tokenizer.is_special(id)));
    (text, vocabulary)
}

/// Draws random allowed tokens until the answer ends, at most `most`. Returns the tokens, and whether the answer ended.
fn walk(state: &mut State, ends: &[u32], random: &mut fastrand::Rng, most: usize) -> (Vec<u32>, bool) {
    let mut tokens = Vec::new();
    while tokens.len() < most {
        let allowed = state.mask().unwrap().tokens();
        // Ends with probability 1/2 wherever the grammar can end. Otherwise it takes any allowed token.
        if let Some(end) = allowed.iter().find(|token| ends.contains(token)).filter(|_| random.bool()) {
            state.consume(*end).unwrap();
            return (tokens, true);
        }
        let usual: Vec<u32> = allowed.iter().copied().filter(|token| !ends.contains(token)).collect();
        let Some(&token) = usual.get(random.usize(..usual.len().max(1))) else { return (tokens, true) };
        state.consume(token).unwrap();
        tokens.push(token);
    }
    (tokens, false)
}

#[test]
fn over_a_real_vocabulary_every_end_is_valid_and_the_state_follows_from_the_tokens() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let (text, vocabulary) = real();
    let compiler = over(&vocabulary);
    let schema = json!({"type": "object", "properties": {"kind": {"enum": ["größe", "b"]}, "count": {"type": "integer"}, "text": {"type": "string", "maxLength": 12}},
        "required": ["kind", "count"], "additionalProperties": false});
    let compiled = compile(&compiler, &Source { compact: true, ..Source::json_schema(&schema) }).unwrap();
    let mut ended = 0;
    for _ in 0..40 {
        let mut state = compiled.begin(text.end.clone());
        let (tokens, over) = walk(&mut state, &text.end, &mut random, 60);
        // The same tokens, fed to another state up to any place, allow the same next tokens.
        let cut = random.usize(..=tokens.len());
        let (mut first, mut second) = (compiled.begin(text.end.clone()), compiled.begin(text.end.clone()));
        for token in &tokens[..cut] {
            first.mask().unwrap();
            first.consume(*token).unwrap();
            second.consume(*token).unwrap();
        }
        assert_eq!(
            first.mask().unwrap().tokens(),
            second.mask().unwrap().tokens(),
            "after {cut} of {tokens:?}"
        );
        if over {
            ended += 1;
            let bytes: Vec<u8> = tokens.iter().flat_map(|token| text.tokenizer.token_bytes(*token)).collect();
            let value: Value = serde_json::from_slice(&bytes).unwrap_or_else(|error| {
                panic!("{error}: {}", String::from_utf8_lossy(&bytes));
            });
            assert!(value["count"].is_number() && value["kind"].is_string(), "{value}");
            assert_eq!(state.mask().unwrap().tokens(), sorted(&text.end), "after the end only ends");
        }
    }
    assert!(ended > 5, "{ended} of 40 ended");
}

fn sorted(tokens: &[u32]) -> Vec<u32> {
    let mut tokens = tokens.to_vec();
    tokens.sort_unstable();
    tokens
}

#[test]
fn end_tokens_come_where_the_grammar_can_end_and_special_ones_are_no_text() {
    let (text, vocabulary) = real();
    let compiler = over(&vocabulary);
    let compiled = compile(&compiler, &Source::regex("(?s:.){2}")).unwrap();
    let mut state = compiled.begin(text.end.clone());
    let first = state.mask().unwrap();
    assert!(text.end.iter().all(|end| !first.allows(*end)), "too early");
    let specials = (0..vocabulary.width()).filter(|id| text.tokenizer.is_special(*id) && first.allows(*id));
    assert_eq!(specials.count(), 0);
    for token in text.tokenizer.encode("ab", false).unwrap() {
        state.consume(token).unwrap();
    }
    assert_eq!(state.mask().unwrap().tokens(), sorted(&text.end));
    let mut logits = vec![1.0; vocabulary.width() as usize + 7];
    state.mask().unwrap().apply(&mut logits);
    let left = logits.iter().filter(|logit| logit.is_finite()).count();
    assert_eq!(left, text.end.len(), "ids beyond the vocabulary neither");
}
