//! Every sample gives the same parts however its text is cut.

use std::time::Duration;

use host_grammar::{Compiler, Limits, Vocabulary};
use serde_json::{Value, json};

use super::*;

mod work;

/// A whole answer: its text, and its calls with their arguments.
type All = (String, Vec<(String, String)>);

fn join(parts: Vec<AnswerPart>) -> All {
    let (mut text, mut calls) = (String::new(), Vec::<(String, String)>::new());
    for part in parts {
        match part {
            AnswerPart::Text(more) => text.push_str(&more),
            AnswerPart::Call(name) => calls.push((name, String::new())),
            AnswerPart::Arguments(more) => calls.last_mut().expect("a call has begun").1.push_str(&more),
        }
    }
    (text, calls)
}

/// A format, an answer, its text, its calls.
type Sample = (CallFormat, &'static str, &'static str, &'static [(&'static str, &'static str)]);

fn read(format: CallFormat, pieces: &[&str]) -> All {
    let parameters = json!({"properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "list": {"type": "array"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "any": {},
        "kind": {"$ref": "#/$defs/kind"}, "word": {"enum": ["1", "b"]}
    }, "$defs": {"kind": {"type": ["boolean", "string"]}}});
    let tools =
        ["f", "get_weather"].map(|name| Function { name: name.into(), parameters: parameters.clone() });
    let mut reader = format.readers(&tools).reader();
    let mut parts: Vec<AnswerPart> = pieces.iter().flat_map(|piece| reader.push(piece)).collect();
    parts.extend(reader.finish());
    join(parts)
}

#[test]
fn calls_are_read_wherever_the_text_is_cut() {
    use CallFormat::{FunctionGemma, Gemma, Hermes, Llama, Pythonic, Qwen3Coder};
    let samples: [Sample; 71] = [
        (Hermes, "Hello <b>world</b>.\n", "Hello <b>world</b>.\n", &[]),
        (
            Hermes,
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\\\"\"]}}\n</tool_call>",
            "",
            &[("f", "{\"a\": [1, \"}\\\"\"]}")],
        ),
        (
            Hermes,
            "Sure.\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n<tool_call>\n{\"name\": \"other\", \"arguments\": {\"é\": null}}\n</tool_call>\n",
            "Sure.",
            &[("f", "{}"), ("other", "{\"é\": null}")],
        ),
        (
            Hermes,
            "<tool_call>{\"arguments\": {\"b\": 1}, \"name\": \"f\"}</tool_call> done",
            " done",
            &[("f", "{\"b\":1}")],
        ),
        (Hermes, "<tool_call>{\"name\": \"f\"}</tool_call>", "", &[("f", "{}")]),
        (
            Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>",
            "",
            &[("f", "{\"a\": 1}")],
        ),
        (Hermes, "the marker <tool_call> is text", "the marker <tool_call> is text", &[]),
        (Hermes, "<tool_call>{\"no\": 1}</tool_call>", "<tool_call>{\"no\": 1}</tool_call>", &[]),
        (
            Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"cut o",
            "",
            &[("f", "{\"a\": \"cut o")],
        ),
        (Hermes, "<tool_call>{\"name\": \"f", "<tool_call>{\"name\": \"f", &[]),
        (Hermes, "a < b <tool", "a < b <tool", &[]),
        (Llama, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "", &[("f", "{\"a\": 1}")]),
        (
            Llama,
            "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"get_weather\", \"arguments\": {\"x\": \"y\"}}",
            "",
            &[("f", "{}"), ("get_weather", "{\"x\": \"y\"}")],
        ),
        (
            Llama,
            "{\"type\": \"function\", \"name\": \"f\", \"parameters\": {\"a\": 1}}",
            "",
            &[("f", "{\"a\":1}")],
        ),
        (
            Llama,
            "{\"name\": \"Ada\", \"parameters\": {\"age\": 36}}",
            "{\"name\": \"Ada\", \"parameters\": {\"age\": 36}}",
            &[],
        ),
        (Llama, "{\"answer\": 42} and more", "{\"answer\": 42} and more", &[]),
        (Llama, "Just text {\"name\": \"f\"}", "Just text {\"name\": \"f\"}", &[]),
        (Llama, "{cut", "{cut", &[]),
        (
            Pythonic,
            "[f(a=1, b='it\\'s', c=[True, None, -1.5], d={\"k\": (1, 2)}), get_weather()]",
            "",
            &[
                ("f", "{\"a\":1,\"b\":\"it's\",\"c\":[true,null,-1.5],\"d\":{\"k\":[1,2]}}"),
                ("get_weather", "{}"),
            ],
        ),
        (Pythonic, "<|python_start|>[f(a=\")\")]<|python_end|>", "", &[("f", "{\"a\":\")\"}")]),
        (Pythonic, "[1, 2, 3]", "[1, 2, 3]", &[]),
        (Pythonic, "[unknown(a=1)]", "[unknown(a=1)]", &[]),
        (Pythonic, "text [f()]", "text [f()]", &[]),
        (Pythonic, "[f(a=1", "[f(a=1", &[]),
        (
            Qwen3Coder,
            "Sure.\n\n<tool_call>\n<function=f>\n<parameter=text>\n if a < b:\n\treturn \"é\"\n\n</parameter>\n<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>",
            "Sure.",
            &[("f", r#"{"text": " if a < b:\n\treturn \"é\"\n", "count": 3}"#)],
        ),
        (
            Qwen3Coder,
            "<tool_call><function=f><parameter=list>[1, {\"a\": null}]</parameter></function></tool_call>\n<tool_call>\n<function=other>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>\n",
            "",
            &[("f", r#"{"list": [1, {"a": null}]}"#), ("other", r#"{"x": "1"}"#)],
        ),
        (Qwen3Coder, "<tool_call>\n<function=f>\n</function>\n</tool_call> done", " done", &[("f", "{}")]),
        // Answers in which the model has left out markers.
        (
            Qwen3Coder,
            "Now.\n<function=f>\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>",
            "Now.",
            &[("f", r#"{"text": "x"}"#)],
        ),
        (
            Qwen3Coder,
            "<tool_call>\n<function=f>\n<parameter=text>\nx\n</parameter>\n</tool_call>",
            "",
            &[("f", r#"{"text": "x"}"#)],
        ),
        (Qwen3Coder, "<function=unknown>\n</function>", "<function=unknown>\n</function>", &[]),
        (Qwen3Coder, "a <tool_call> is <function> text", "a <tool_call> is <function> text", &[]),
        (Qwen3Coder, "a < b <func", "a < b <func", &[]),
        (Qwen3Coder, "<tool_call>\n<function=f", "<tool_call>\n<function=f", &[]),
        // Values whose form depends on their schemas.
        (
            Qwen3Coder,
            "<tool_call><function=f><parameter=maybe>\nNone\n</parameter>, <parameter=maybe>\n12\n</parameter><parameter=any>\nParis\n</parameter><parameter=kind>\nTrue\n</parameter><parameter=word>\n1\n</parameter></function></tool_call>",
            "",
            &[("f", r#"{"maybe": null, "maybe": "12", "any": "Paris", "kind": true, "word": "1"}"#)],
        ),
        (
            Qwen3Coder,
            "<tool_call><function=f><parameter=count>\nmany\n</parameter><parameter=text>\n</parameter></function></tool_call>",
            "",
            &[("f", r#"{"count": "many", "text": ""}"#)],
        ),
        (
            Qwen3Coder,
            "<tool_call><function=f><parameter=text>\n<parameter=text>\n</function>\n</tool_call></paramete",
            "",
            &[("f", r#"{"text": "<parameter=text>\n</function>\n</tool_call></paramete"#)],
        ),
        (Qwen3Coder, "<tool_call><function=f><parameter=count>\n12", "", &[("f", r#"{"count": "#)]),
        // White space and quotes of a text are kept, and a tag in a JSON string is text.
        (
            Qwen3Coder,
            "<tool_call><function=f><parameter=maybe>\n    return \"1\"\n\n</parameter><parameter=any>\n\"q\"\n</parameter></function></tool_call>",
            "",
            &[("f", r#"{"maybe": "    return \"1\"\n", "any": "\"q\""}"#)],
        ),
        (
            Qwen3Coder,
            "<tool_call><function=f><parameter=list>\n[\"a</parameter>\", \"\\\"</parameter>\"]\n</parameter></function></tool_call>",
            "",
            &[("f", r#"{"list": ["a</parameter>", "\"</parameter>"]}"#)],
        ),
        (
            Qwen3Coder,
            "<tool_call><function=f><parameter=list>\n['it', \"s\"]\n</parameter></function></tool_call>",
            "",
            &[("f", r#"{"list": "['it', \"s\"]"}"#)],
        ),
        (Qwen3Coder, "<tool_call><function=f><parameter=te", "", &[("f", "{")]),
        (
            Gemma,
            "I look.\n\n```tool_code\nget_weather(text=\"Oslo\", count=3)\n```\n",
            "I look.",
            &[("get_weather", "{\"text\":\"Oslo\",\"count\":3}")],
        ),
        (
            Gemma,
            "```tool_code\n[f(a='it\\'s'), get_weather()]\n```\nand\n```tool_code\nf()```",
            "\nand",
            &[("f", "{\"a\":\"it's\"}"), ("get_weather", "{}"), ("f", "{}")],
        ),
        (Gemma, "```tool_code\nf()\n``` done", " done", &[("f", "{}")]),
        (Gemma, "```tool_code\nf(text='```')\n```", "", &[("f", "{\"text\":\"```\"}")]),
        (Gemma, "```tool_code\nf(a=1)", "", &[("f", "{\"a\":1}")]),
        (Gemma, "```tool_code\nf()\nprint(1)\n```", "\nprint(1)\n```", &[("f", "{}")]),
        (Gemma, "```tool_code\nx = f(a=1)\n```", "```tool_code\nx = f(a=1)\n```", &[]),
        (Gemma, "```tool_code\nf(1)\nget_weather()\n```", "```tool_code\nf(1)\nget_weather()\n```", &[]),
        (Gemma, "```tool_code\n```", "```tool_code\n```", &[]),
        (Gemma, "```tool_code\nf(a=1)\nf(2)\n```", "\nf(2)\n```", &[("f", "{\"a\":1}")]),
        (Gemma, "```tool_code\nf(a=1)\nf(a=", "\nf(a=", &[("f", "{\"a\":1}")]),
        (Gemma, "```tool_code\nf(\"x\", b=1)\n```", "```tool_code\nf(\"x\", b=1)\n```", &[]),
        (Gemma, "```tool_code\nf(g(a=1))\n```", "```tool_code\nf(g(a=1))\n```", &[]),
        (Pythonic, "[f(\"x\", b=1)]", "[f(\"x\", b=1)]", &[]),
        (Pythonic, "[f(g(a=1))]", "[f(g(a=1))]", &[]),
        (Gemma, "```python\nf()\n```", "```python\nf()\n```", &[]),
        (Gemma, "```tool_code\nf(a=1", "```tool_code\nf(a=1", &[]),
        (Gemma, "```tool_cod", "```tool_cod", &[]),
        (Gemma, "a ` b ```` c", "a ` b ```` c", &[]),
        (
            FunctionGemma,
            "Sure. <start_function_call>call:get_weather{count:3,text:<escape>Oslo, }<escape>}<end_function_call>",
            "Sure.",
            &[("get_weather", "{\"count\":3,\"text\":\"Oslo, }\"}")],
        ),
        (
            FunctionGemma,
            "<start_function_call>call:f{}<end_function_call><start_function_call>call:other{list:[<escape>a<escape>,true]}<end_function_call>\n",
            "",
            &[("f", "{}"), ("other", "{\"list\":[\"a\",true]}")],
        ),
        (
            FunctionGemma,
            "<start_function_call> call:f{a:{b:null}} <end_function_call> done",
            " done",
            &[("f", "{\"a\":{\"b\":null}}")],
        ),
        (
            FunctionGemma,
            "<start_function_call>call:f{\"a\": [\"}<escape>\", {\"b\": 1}]}",
            "",
            &[("f", "{\"a\":[\"}<escape>\",{\"b\":1}]}")],
        ),
        (
            FunctionGemma,
            "<start_function_call>call:f{text:<escape>a < b <esc<escape>}<end_function_call>",
            "",
            &[("f", "{\"text\":\"a < b <esc\"}")],
        ),
        (
            FunctionGemma,
            "<start_function_call>call:f{text:New York}<end_function_call>",
            "",
            &[("f", "{\"text\":\"New York\"}")],
        ),
        (FunctionGemma, "the <start_function_call> marker", "the <start_function_call> marker", &[]),
        (
            FunctionGemma,
            "<start_function_call>call:f{a}<end_function_call>",
            "<start_function_call>call:f{a}<end_function_call>",
            &[],
        ),
        (
            FunctionGemma,
            "<start_function_call>call:f{a:<escape>b",
            "<start_function_call>call:f{a:<escape>b",
            &[],
        ),
        (FunctionGemma, "<start_function_call>call:f{a:<esc", "<start_function_call>call:f{a:<esc", &[]),
        (FunctionGemma, "so <start_functio", "so <start_functio", &[]),
    ];
    for (format, answer, text, calls) in samples {
        let calls = calls.iter().map(|(name, arguments)| ((*name).to_owned(), (*arguments).to_owned()));
        let expected: All = (text.to_owned(), calls.collect());
        assert_eq!(read(format, &[answer]), expected, "{format:?} {answer}");
        for cut in (0..=answer.len()).filter(|cut| answer.is_char_boundary(*cut)) {
            let (first, second) = answer.split_at(cut);
            assert_eq!(read(format, &[first, second]), expected, "{format:?} {answer} cut at {cut}");
        }
        let letters: Vec<&str> = answer.split("").collect();
        assert_eq!(read(format, &letters), expected, "{format:?} {answer} letter by letter");
    }
}

#[test]
fn any_answer_is_read_the_same_wherever_it_is_cut() {
    const PIECES: [&str; 53] = [
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "<function=other>",
        "<function=",
        "</function>",
        "<parameter=text>",
        "<parameter=count>",
        "<parameter=any>",
        "</parameter>",
        "\n",
        " ",
        "x",
        "é",
        "12",
        "\"",
        "\\",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ",",
        ";",
        ":",
        "<",
        ">",
        "=",
        "f",
        "null",
        "{\"name\": \"f\", \"arguments\": ",
        "{\"name\": \"f\", \"parameters\": {",
        "<|python_tag|>",
        "[f(count=",
        "<|python_start|>",
        "<|python_end|>",
        "[f(), f()",
        " ,",
        "\n\u{3000} \n",
        "; {\"name\": \"f\"}",
        "<tool_call>{\"name\": \"f\"}",
        "<parameter=list>",
        "```tool_code\n",
        "```",
        "`",
        "f(count=1)",
        "f(",
        "<start_function_call>",
        "<end_function_call>",
        "call:f{",
        "<escape>",
        "count:",
    ];
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..3_000 {
        let answer: String = (0..random.usize(1..16)).map(|_| *random.choice(&PIECES).unwrap()).collect();
        for format in CallFormat::ALL {
            let whole = read(format, &[&answer]);
            let letters: Vec<&str> = answer.split("").collect();
            assert_eq!(read(format, &letters), whole, "{format:?} {answer:?}");
            let [one, two] = [(); 2].map(|()| answer.floor_char_boundary(random.usize(0..=answer.len())));
            let (one, two) = (one.min(two), one.max(two));
            let pieces = [&answer[..one], &answer[one..two], &answer[two..]];
            assert_eq!(read(format, &pieces), whole, "{format:?} {answer:?} at {one} and {two}");
        }
    }
}

#[test]
fn a_name_comes_whole_and_arguments_as_they_are_written() {
    let mut reader = CallFormat::Hermes.readers(&[]).reader();
    let mut parts = Vec::new();
    for piece in [
        "<tool_call>\n{\"na",
        "me\": \"get_",
        "weather\", \"arguments\": ",
        "{\"a\"",
        ": 1",
        "}}\n</tool",
        "_call>",
    ] {
        parts.push(reader.push(piece));
    }
    let arguments = |text: &str| AnswerPart::Arguments(text.to_owned());
    assert_eq!(
        parts,
        [
            vec![],
            vec![],
            vec![],
            vec![AnswerPart::Call("get_weather".into()), arguments("{\"a\"")],
            vec![arguments(": 1")],
            vec![arguments("}")],
            vec![]
        ]
    );
}

#[test]
fn a_template_names_its_format() {
    for (source, format) in [
        ("… <tool_call>\n{\"name\": …", Some(CallFormat::Hermes)),
        ("<tool_call>\n<function=x>\n<parameter=y>", Some(CallFormat::Qwen3Coder)),
        ("<function=x>{\"a\": 1}</function>", None),
        (
            "Respond in the format {\"name\": function name, \"parameters\": dictionary of argument name",
            Some(CallFormat::Llama),
        ),
        ("[func_name1(params_name1=params_value1", Some(CallFormat::Pythonic)),
        ("wrapped with ```tool_code\n…", Some(CallFormat::Gemma)),
        ("'<start_function_call>call:' + function['name'] + '{'", Some(CallFormat::FunctionGemma)),
        ("{{ message.content }}", None),
    ] {
        assert_eq!(CallFormat::of_template(source), format, "{source}");
    }
}

#[test]
fn names_count_as_memory_of_readers_once_or_for_each_answer() {
    let properties: serde_json::Map<String, Value> =
        (0..500).map(|at| (format!("{at:0>500}"), json!({"type": "integer"}))).collect();
    let tools = [Function { name: "n".repeat(100), parameters: json!({"properties": properties}) }];
    let memory = |format: CallFormat, answers| format.readers(&tools).memory(answers);
    let of_names = memory(CallFormat::Qwen3Coder, 1);
    assert!((500 * 500..1000 * 500).contains(&of_names), "{of_names}");
    assert_eq!(memory(CallFormat::Qwen3Coder, 128), of_names, "they share them");
    let of_tools = memory(CallFormat::Hermes, 1);
    assert!((100..1000).contains(&of_tools), "{of_tools}");
    for format in [CallFormat::Llama, CallFormat::Pythonic, CallFormat::Gemma] {
        assert!(memory(format, 128) >= of_tools + 128 * 100, "{format:?}");
    }
}

/// The byte that ends an answer.
const END: u32 = 0;

/// A compiler with times that no busy machine needs.
pub(super) fn compiler() -> Compiler {
    let hour = Duration::from_secs(3600);
    let limits = Limits { wait: hour, compile_time: hour, ..Limits::default() };
    Compiler::new(&Vocabulary::bytes(), limits).unwrap()
}

/// Draws an answer byte by byte from those that a grammar allows.
fn drawn(compiler: &Compiler, source: &host_grammar::Source, random: &mut fastrand::Rng) -> String {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let compiled = runtime.block_on(compiler.compile(0, source));
    let mut state = compiled.unwrap_or_else(|error| panic!("{error}: {source:?}")).begin(vec![END]);
    let mut answer = Vec::new();
    while answer.len() < 2000 {
        let allowed = state.mask().unwrap().tokens();
        let token =
            if allowed.contains(&END) && random.bool() { END } else { *random.choice(&allowed).unwrap() };
        if token == END {
            return String::from_utf8(answer).unwrap();
        }
        state.consume(token).unwrap();
        answer.push(u8::try_from(token).unwrap());
    }
    panic!("it does not end: {}", String::from_utf8_lossy(&answer));
}

#[test]
fn what_a_grammar_of_calls_allows_is_read_as_calls() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let compiler = compiler();
    let parameters = json!({
        "type": "object", "additionalProperties": false, "required": ["place"],
        "properties": {"place": {"type": "string", "maxLength": 5}, "days": {"$ref": "#/$defs/days"}, "exact": {"type": "boolean"}, "unit": {"$ref": "#/$defs/unit"}},
        "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}, "unit": {"enum": ["C", "F"]}},
    });
    let nothing = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let optional = json!({"type": "object", "additionalProperties": false, "properties": {"a": {"type": "null"}, "b": {"enum": [true, "x"]}}});
    let functions = [("get_weather", parameters), ("f", nothing), ("g", optional)];
    let functions: Vec<Function> =
        functions.map(|(name, parameters)| Function { name: name.into(), parameters }).to_vec();
    let names: Vec<String> = functions.iter().map(|function| function.name.clone()).collect();
    for format in CallFormat::ALL {
        for rule in [CallRule::One, CallRule::Several] {
            let source = super::calls(format, &functions, rule).unwrap();
            let mut most = 0;
            for _ in 0..30 {
                let answer = drawn(&compiler, &source, &mut random);
                let mut reader = format.readers(&functions).reader();
                let mut parts = reader.push(&answer);
                parts.extend(reader.finish());
                let (text, calls) = join(parts);
                assert!(text.is_empty() && !calls.is_empty(), "{format:?} {answer:?}: {text:?} {calls:?}");
                most = most.max(calls.len());
                for (name, arguments) in calls {
                    let arguments: Value =
                        serde_json::from_str(&arguments).unwrap_or_else(|error| panic!("{error}: {answer}"));
                    assert!(names.contains(&name) && arguments.is_object(), "{answer}");
                    if name == "get_weather" {
                        assert!(arguments["place"].is_string(), "{answer}");
                        assert!(
                            arguments.get("unit").is_none_or(|unit| unit == "C" || unit == "F"),
                            "{answer}"
                        );
                    }
                }
            }
            let several = rule == CallRule::Several && format != CallFormat::Llama;
            assert_eq!(most > 1, several, "{format:?} {rule:?}");
        }
    }
    let elsewhere = json!({"$ref": "#/definitions/x", "definitions": {"x": {"properties": {"a": {}}}}});
    let elsewhere = Function { name: "f".into(), parameters: elsewhere };
    let error = super::calls(CallFormat::Qwen3Coder, &[elsewhere], CallRule::One).unwrap_err().to_string();
    assert!(error.contains("$ref"), "{error}");
    // A definition is repeated only in schemas that refer to it. Rules that get too long are refused.
    let many = |schema: Value| {
        let properties: serde_json::Map<String, Value> =
            (0..300).map(|at| (format!("a{at}"), schema.clone())).collect();
        let definition = json!({"type": "integer", "description": "x".repeat(2_000)});
        let parameters = json!({"properties": properties, "$defs": {"x": definition}});
        super::calls(CallFormat::Qwen3Coder, &[Function { name: "f".into(), parameters }], CallRule::One)
    };
    assert!(many(json!({"type": "integer"})).is_ok());
    let error = many(json!({"$ref": "#/$defs/x"})).unwrap_err().to_string();
    assert!(error.contains("262144"), "{error}");
    for (format, name) in [
        (CallFormat::Pythonic, "a b"),
        (CallFormat::Qwen3Coder, "a>b"),
        (CallFormat::Gemma, "a-b"),
        (CallFormat::FunctionGemma, "a:b"),
        (CallFormat::FunctionGemma, "a "),
    ] {
        let odd = Function { name: "f".into(), parameters: json!({"properties": {name: {}}}) };
        let error = super::calls(format, &[odd], CallRule::One).unwrap_err().to_string();
        assert!(error.contains(&format!("{name:?}")), "{error}");
    }
}
