//! Measures the cost of masks, and of hostile grammars, over a real vocabulary.
//!
//!     cargo run --release -p host-grammar --example cost -- MODEL

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement")]
#![expect(clippy::disallowed_methods, reason = "it measures time")]

use std::path::Path;
use std::time::{Duration, Instant};

use host_front::text::TextModel;
use host_grammar::{Compiler, Limits, Source, Vocabulary};
use serde_json::{Value, json};

/// Memory that this process has in RAM, in MiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) >> 10
}

fn ordinary() -> Vec<(&'static str, Source)> {
    let person = json!({"type": "object", "required": ["name", "age", "tags"], "additionalProperties": false, "properties": {
        "name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5}}});
    vec![
        ("any JSON object", Source::json_object()),
        ("a schema", Source::json_schema(&person)),
        ("a regular expression", Source::regex(r"(\d{1,3}\.){3}\d{1,3}( [a-z]+)*")),
        ("any text", Source::regex(r"(?s:.)*")),
    ]
}

fn hostile() -> Vec<(&'static str, Source)> {
    let object = |properties: Value| json!({"type": "object", "properties": properties, "additionalProperties": false});
    let many = |count: usize, value: &dyn Fn(usize) -> Value| {
        let fields = (0..count).map(|index| (format!("property{index}"), value(index)));
        object(Value::Object(fields.collect()))
    };
    let words: Vec<String> = (0..8000).map(|index| format!("value {index:016x}")).collect();
    let chain: serde_json::Map<String, Value> = (0..2000)
        .map(|index| {
            (
                format!("d{index}"),
                json!({"anyOf": [{"$ref": format!("#/$defs/d{}", (index + 1) % 2000)}, {"type": "null"}]}),
            )
        })
        .collect();
    let pairs: Vec<Value> = (0..24)
        .map(|index| {
            let one = |value: i32| json!({"properties": {format!("p{index}"): {"const": value}}, "required": [format!("p{index}")]});
            json!({"anyOf": [one(0), one(1)]})
        })
        .collect();
    let nested = (0..30).fold(
        json!({"type": "integer"}),
        |inner, _| json!({"type": "array", "items": inner, "minItems": 2, "maxItems": 50}),
    );
    vec![
        ("nested bounds: ((a{1,300}){1,300})", Source::regex("((a{1,300}){1,300})b")),
        ("three nested bounds, refused", Source::regex("((a{1,100}){1,100}){1,100}")),
        ("(x+x+)+y", Source::regex("(x+x+)+y")),
        ("[a-q][^u-z]{13}x, a large automaton", Source::regex("(.*[a-q][^u-z]{13}x)*")),
        ("a wide bound: .{0,50000}z", Source::regex(".{0,50000}z")),
        (r"\p{L}{1000}", Source::regex(r"\p{L}{1000}")),
        ("intersections of suffixes", Source::regex("(.*a.{30}b.*|.*c.{30}d.*|.*e.{30}f.*)*g")),
        ("8,000 texts of an enum", Source::json_schema(&json!({"enum": words}))),
        ("1 MiB of schema, refused", Source::json_schema(&json!({"description": "x".repeat(1 << 20)}))),
        ("2,000 definitions in a ring", Source::json_schema(&json!({"$ref": "#/$defs/d0", "$defs": chain}))),
        ("a schema that is itself", Source::json_schema(&json!({"$ref": "#"}))),
        (
            "a tree of itself",
            Source::json_schema(&json!({"type": "array", "items": {"$ref": "#"}, "minItems": 3})),
        ),
        ("all of 24 pairs", Source::json_schema(&json!({"type": "object", "allOf": pairs}))),
        ("3,000 optional properties", Source::json_schema(&many(3000, &|_| json!({"type": "string"})))),
        (
            "500 patterns",
            Source::json_schema(&many(
                500,
                &|index| json!({"type": "string", "pattern": format!("^([a-z]+{index}|.*x{index})*$")}),
            )),
        ),
        ("a string of 1,000,000", Source::json_schema(&json!({"type": "string", "minLength": 1_000_000}))),
        ("30 lists in each other", Source::json_schema(&nested)),
        (
            "65 lists in each other, refused",
            Source {
                text: format!("{}true{}", "{\"items\":".repeat(65), "}".repeat(65)),
                ..Source::json_object()
            },
        ),
        (
            "a list of 1,000,000",
            Source::json_schema(&json!({"type": "array", "items": {"type": "null"}, "minItems": 1_000_000})),
        ),
        ("ambiguous rules", Source::lark("start: e\ne: e e e | e e | \"a\" | \"\"")),
        (
            "4,000 rules",
            Source::lark(
                (0..4000)
                    .map(|index| format!("r{index}: \"a\" r{}? | /[a-z]+{index}/\n", (index + 1) % 4000))
                    .chain(["start: r0\n".to_owned()])
                    .collect::<String>(),
            ),
        ),
    ]
}

fn main() {
    let model = std::env::args().nth(1).unwrap_or_else(|| panic!("give a model"));
    let text = TextModel::load(Path::new(&model)).unwrap();
    let tokenizer = text.tokenizer;
    let since = Instant::now();
    let vocabulary =
        Vocabulary::new(tokenizer.vocabulary(), |id| (tokenizer.token_bytes(id), tokenizer.is_special(id)));
    let compiler = Compiler::new(&vocabulary, Limits::default()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    println!("{} tokens, read in {:?}, {} MiB", vocabulary.width(), since.elapsed(), resident());
    println!(
        "| Grammar | compiled in | first mask | masks | mean | worst |\n| --- | --- | --- | --- | --- | --- |"
    );
    let mut random = fastrand::Rng::with_seed(1);
    for (name, source) in ordinary().into_iter().chain(hostile()) {
        let before = resident();
        let since = Instant::now();
        let compiled = match runtime.block_on(compiler.compile(0, &source)) {
            Ok(compiled) => compiled,
            Err(error) => {
                println!(
                    "| {name} | {:?}: {error} | | | | +{} MiB |",
                    since.elapsed(),
                    resident().saturating_sub(before)
                );
                continue;
            }
        };
        let compile = since.elapsed();
        let mut state = compiled.begin(text.end.clone());
        let mut times: Vec<Duration> = Vec::new();
        let mut stuck = String::new();
        while times.len() < 200 {
            let since = Instant::now();
            let mask = state.mask();
            times.push(since.elapsed());
            let mask = match mask {
                Ok(mask) => mask,
                Err(error) => {
                    stuck = format!(" then: {error}");
                    break;
                }
            };
            let tokens = mask.tokens();
            let going_on: Vec<u32> = tokens.into_iter().filter(|token| !text.end.contains(token)).collect();
            let Some(token) = random.choice(&going_on) else {
                state = compiled.begin(text.end.clone());
                continue;
            };
            if let Err(error) = state.consume(*token) {
                stuck = format!(" then: {error}");
                break;
            }
        }
        let mean = times.iter().sum::<Duration>() / u32::try_from(times.len()).unwrap();
        let worst = times.iter().max().unwrap();
        println!(
            "| {name} | {compile:?} | {:?} | {}{stuck} | {mean:?} | {worst:?}, +{} MiB |",
            times[0],
            times.len(),
            resident().saturating_sub(before)
        );
    }
}
