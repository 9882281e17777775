//! The memory that a request's JSON takes, whatever it contains.

#![allow(clippy::unwrap_used, reason = "a test stops where its assumptions break")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use host_front::http::fuzzing;
use host_front::text::CallFormat;
use host_front::text::calls::{CallRule, Function, calls};
use serde_json::{Map, Value, json};

/// Counts the bytes that a thread has allocated.
struct Counting;

thread_local! {
    /// Bytes now, and the most since the last reset.
    static BYTES: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
    /// All bytes since the last reset, of memory that was given back, too.
    static ALL_BYTES: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // A thread that ends does not count any more.
    let _ended = BYTES.try_with(|counted| {
        let (now, most) = counted.get();
        counted.set((now + bytes, most.max(now + bytes)));
    });
    let _ended = ALL_BYTES.try_with(|all| all.set(all.get() + bytes.max(0)));
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size.cast_signed() - layout.size().cast_signed());
        // SAFETY: the caller's promise, passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Largest body by default.
const BODY: usize = 8 << 20;
/// Most memory for reading a body of that size.
const MOST: isize = 128 << 20;

/// Numbers of endpoints in [`fuzzing::body`].
const COMPLETIONS: u8 = 0;
const CHAT: u8 = 1;
const GENERATE: u8 = 2;
const RESPONSES: u8 = 4;

/// Most bytes while a body is read, beyond the body, and whether it was accepted.
fn cost(body: &[u8]) -> (isize, bool) {
    cost_at(CHAT, body)
}

/// The same at an endpoint.
fn cost_at(endpoint: u8, body: &[u8]) -> (isize, bool) {
    let input = [&[endpoint], body].concat();
    BYTES.with(|counted| counted.set((0, 0)));
    let accepted = fuzzing::body(&input);
    (BYTES.with(Cell::get).1, accepted)
}

/// Bodies with one item many times: as many as a body has room for, and as many as the limits allow.
fn repeated(item: &str) -> [Vec<u8>; 2] {
    let (begin, end) = (r#"{"messages":["#, "]}");
    let room = (BODY - begin.len() - end.len() - item.len()) / (item.len() + 1);
    let of = |letters: &[char]| item.matches(letters).count();
    // The body and its field are lists, too.
    let lists = ((1 << 16) - 2_usize).checked_div(of(&['[', '{'])).unwrap_or(usize::MAX);
    let values = ((1 << 20) - 3) / (of(&['[', '{', ',']) + 1);
    let body = |count| format!("{begin}{}{item}{end}", format!("{item},").repeat(count)).into_bytes();
    [body(room), body(room.min(lists - 1).min(values - 1))]
}

#[test]
fn no_body_takes_more_than_its_share_of_memory() {
    let deep = |count| "[".repeat(count) + &"]".repeat(count);
    let deep_objects = r#"{"":"#.repeat(100) + "0" + &"}".repeat(100);
    let message = r#"{"role":"user","content":""}"#;
    let keys: Vec<String> = (0..700_000).map(|key| format!("\"{key:x}\":0")).collect();
    let mut all = vec![("keys", format!("{{\"metadata\":{{{}}}}}", keys.join(",")).into_bytes())];
    let deep = deep(100);
    let pairs = r#"{"":0,"a":0,"b":0,"c":0}"#;
    for item in ["0", "[]", "[0]", "{}", r#"{"":0}"#, r#""""#, r#""a""#, &deep, &deep_objects, message, pairs]
    {
        all.extend(repeated(item).map(|body| (item, body)));
    }
    let mut large = Vec::new();
    for (name, body) in all {
        assert!(body.len() <= BODY, "{name}");
        let (bytes, accepted) = cost(&body);
        let each = bytes as f64 / body.len() as f64;
        println!(
            "{:.20}, {} bytes: {bytes} bytes, {each:.1} for each of the body, accepted: {accepted}",
            name,
            body.len()
        );
        if bytes > MOST {
            large.push(name);
        }
    }
    assert!(large.is_empty(), "{large:?}");
}

#[test]
fn tools_have_no_more_values_than_a_prompt_is_made_of() {
    let body = |keys: usize| {
        let keys: Vec<String> = (0..keys).map(|key| format!("\"{key:x}\":0")).collect();
        let tool = format!(r#"{{"name":"f","parameters":{{"x":{{{}}}}}}}"#, keys.join(","));
        format!(
            r#"{{"messages":[{{"role":"user","content":"a"}}],"tools":[{{"type":"function","function":{tool}}}]}}"#
        )
    };
    // The tool has six values beside the keys, and its type is added to its schema after the check.
    let (bytes, accepted) = cost(body((1 << 16) - 6).as_bytes());
    assert!(accepted && bytes < MOST, "{bytes} bytes, accepted: {accepted}");
    for keys in [(1 << 16) - 5, 700_000] {
        let (bytes, accepted) = cost(body(keys).as_bytes());
        assert!(!accepted && bytes < MOST, "{keys} keys: {bytes} bytes, accepted: {accepted}");
    }
}

#[test]
fn long_conversations_and_long_lists_of_tokens_are_taken() {
    let messages = |count| vec![r#"{"role":"user","content":[{"type":"text","text":"a"}]}"#; count].join(",");
    for (count, taken) in [(4096, true), (4097, false)] {
        let (_, accepted) = cost(format!("{{\"messages\":[{}]}}", messages(count)).as_bytes());
        assert_eq!(accepted, taken, "{count} messages");
    }
    let call = r#"{"function":{"name":"f","arguments":"{}"}}"#;
    for (count, taken) in [(4095, true), (4096, false)] {
        let calls = vec![call; count].join(",");
        let body = format!("{{\"messages\":[{{\"role\":\"assistant\",\"tool_calls\":[{calls}]}}]}}");
        assert_eq!(cost(body.as_bytes()).1, taken, "{count} calls in a message");
    }
    let tokens = vec!["7"; 1_000_000].join(",");
    let of_completions = format!("\0{{\"prompt\":[{tokens}]}}");
    assert!(fuzzing::body(of_completions.as_bytes()));
}

#[test]
fn what_is_given_once_is_not_kept_for_each_of_many_answers() {
    let prompts = vec!["\"a\""; 128].join(",");
    let list = |item: &str, count: usize| vec![item; count].join(",");
    let settings = |settings: &str| format!("{{\"text\":[{prompts}],\"sampling_params\":{{{settings}}}}}");
    let words = list(&format!("\"{}\"", "w".repeat(256)), 1000);
    let nested = |item: &str| format!("{{\\\"a\\\":[{}]}}", list(item, 1_900_000));
    let call = |text: &str| {
        format!(
            "{{\"messages\":[{{\"role\":\"assistant\",\"tool_calls\":[{{\"function\":{{\"name\":\"f\",\"arguments\":\"{text}\"}}}}]}}]}}"
        )
    };
    let long = "r".repeat(7 << 20);
    let named = |rid: &str| format!("{{\"text\":[\"a\"],\"sampling_params\":{{\"n\":128}},\"rid\":{rid}}}");
    let ids = list("65", 1_000_000);
    let results = |name: &str, count| {
        let call = format!(
            "{{\"type\":\"function_call\",\"call_id\":\"a\",\"name\":\"{name}\",\"arguments\":\"{{}}\"}}"
        );
        let result = list("{\"type\":\"function_call_output\",\"call_id\":\"a\",\"output\":\"\"}", count);
        format!("{{\"input\":[{call},{result}]}}")
    };
    let attacks = [
        ("settings of many values", GENERATE, settings(&format!("\"x\":[{}]", list("0", 1_000_000)))),
        ("many bad words", GENERATE, settings(&format!("\"bad_words\":[{words}]"))),
        ("a long name", GENERATE, named(&format!("\"{long}\""))),
        ("a long name in a list", GENERATE, named(&format!("[\"{long}\"]"))),
        ("lists in arguments of a call", CHAT, call(&nested("[0]"))),
        ("numbers in arguments of a call", CHAT, call(&nested("0"))),
        ("results of a call with a long name", RESPONSES, results(&"n".repeat(4 << 20), 1_000)),
        ("results of a call with a name", RESPONSES, results(&"n".repeat(256), 60_000)),
        (
            "a prompt of tokens, repeated",
            COMPLETIONS,
            format!("{{\"prompt\":[{ids}],\"echo\":true,\"n\":128}}"),
        ),
    ];
    let mut large = Vec::new();
    for (name, endpoint, body) in attacks {
        assert!(body.len() <= BODY, "{name}: {} bytes", body.len());
        let (bytes, accepted) = cost_at(endpoint, body.as_bytes());
        println!("{name}: {} bytes take {bytes}, accepted: {accepted}", body.len());
        if bytes > MOST {
            large.push((name, bytes));
        }
    }
    assert!(large.is_empty(), "{large:?}");
}

/// Most bytes during some work, and all bytes that it allocated one after the other.
fn cost_of<T>(work: impl FnOnce() -> T) -> (T, isize, isize) {
    BYTES.with(|counted| counted.set((0, 0)));
    ALL_BYTES.with(|all| all.set(0));
    let done = work();
    (done, BYTES.with(Cell::get).1, ALL_BYTES.with(Cell::get))
}

#[test]
fn rules_and_readers_of_calls_take_no_more_than_the_schemas_of_the_tools() {
    let tool = |count: usize, schema: &dyn Fn(usize) -> Value, required: bool, more: (String, Value)| {
        let mut properties: Map<String, Value> =
            (0..count).map(|at| (format!("a{at}"), schema(at))).collect();
        let names: Vec<String> = properties.keys().filter(|_| required).cloned().collect();
        let mut parameters = json!({"type": "object", "required": names});
        if more.0 == "$defs" {
            parameters["$defs"] = more.1;
        } else {
            properties.insert(more.0, more.1);
        }
        parameters["properties"] = Value::Object(properties);
        Function { name: "f".to_owned(), parameters }
    };
    let none = || ("z".to_owned(), json!({}));
    let long = "k".repeat(50_000);
    let circle = json!({"$ref": format!("#/properties/{long}")});
    let definitions = json!({"x": {"enum": [long.as_str()]}, "y": {"enum": [1]}});
    let texts = json!({"anyOf": vec![json!({"$ref": "#/$defs/x"}); 100]});
    let refers = json!({"$ref": "#/$defs/y"});
    let tools = [
        ("many that are optional", tool(10_000, &|_| json!({"type": "integer"}), false, none())),
        ("many that are required", tool(10_000, &|_| json!({"type": "integer"}), true, none())),
        ("many texts", tool(10_000, &|_| json!({"type": "string"}), false, none())),
        (
            "a long reference in a circle",
            tool(200, &|_| circle.clone(), false, (long.clone(), circle.clone())),
        ),
        ("long definitions", tool(500, &|_| refers.clone(), true, ("$defs".to_owned(), definitions.clone()))),
        (
            "a long text, many times",
            tool(500, &|_| texts.clone(), false, ("$defs".to_owned(), definitions.clone())),
        ),
    ];
    let mut large = Vec::new();
    for (name, tool) in tools {
        let tool = [tool];
        for format in CallFormat::ALL {
            let (rules, most, all) = cost_of(|| calls(format, &tool, CallRule::Several));
            let (_readers, of_readers, all_of_readers) = cost_of(|| format.readers(&tool));
            let accepted = rules.is_ok_and(|rules| rules.check().is_ok());
            println!(
                "{name}, {format:?}: {most} bytes of {all}, readers {of_readers} of {all_of_readers}, accepted: {accepted}"
            );
            if most.max(of_readers) > 16 << 20 || all.max(all_of_readers) > 64 << 20 {
                large.push((name, format));
            }
        }
    }
    assert!(large.is_empty(), "{large:?}");
}
