//! The memory of compiled grammars, as it is allocated and as the cache counts it. It is the only test of its program, because all
//! threads are counted.

#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering};
use std::time::Duration;

use host_grammar::{Compiler, Limits, Source, Vocabulary};
use serde_json::{Map, Value, json};

/// Counts the bytes that are allocated.
struct Counting;

static BYTES: AtomicIsize = AtomicIsize::new(0);

fn count(bytes: isize) {
    BYTES.fetch_add(bytes, Ordering::SeqCst);
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

#[test]
fn a_compiled_grammar_takes_no_more_than_the_cache_counts() {
    let hour = Duration::from_secs(3600);
    let limits = Limits { wait: hour, compile_time: hour, ..Limits::default() };
    let compiler = Compiler::new(&Vocabulary::bytes(), limits).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let object = |count: usize, value: &dyn Fn(usize) -> Value| {
        let fields: Map<String, Value> = (0..count).map(|at| (format!("p{at}"), value(at))).collect();
        Source::json_schema(&json!({"type": "object", "properties": fields, "additionalProperties": false}))
    };
    let rules: String =
        (0..1000).map(|at| format!("r{at}: \"a\" r{}? | /[a-z]+{at}/\n", (at + 1) % 1000)).collect();
    let words: Vec<String> = (0..4000).map(|at| format!("value {at:016x}")).collect();
    let grammars = [
        ("a person", object(3, &|_| json!({"type": "string"}))),
        ("optional properties", object(1000, &|_| json!({"type": "string"}))),
        (
            "properties with expressions",
            object(200, &|at| json!({"type": "string", "pattern": format!("^([a-z]+{at}|x{at})*$")})),
        ),
        ("an enum", Source::json_schema(&json!({"enum": words}))),
        ("rules", Source::lark(format!("start: r0\n{rules}"))),
        ("short alternatives", Source::lark(format!("start: \"b\" x\nx: {}\"c\"", "\"a\"|".repeat(10_000)))),
        ("short words", Source::lark(format!("start: \"b\" x\nA: \"a\"\nx: {}\"c\"", "A ".repeat(10_000)))),
        ("bounds", Source::regex("((a{1,300}){1,300})b")),
        ("one word", Source::lark(format!("start: \"{}\"", "a".repeat(50_000)))),
    ];
    // What is made once is made now.
    let first = runtime.block_on(compiler.compile(0, &Source::regex("a"))).unwrap();
    let mut wrong = Vec::new();
    for (name, source) in grammars {
        let before = BYTES.load(Ordering::SeqCst);
        let compiled = runtime.block_on(compiler.compile(0, &source));
        let compiled = compiled.unwrap_or_else(|error| panic!("{name}: {error}"));
        let taken = BYTES.load(Ordering::SeqCst) - before;
        let (taken, counted) = (usize::try_from(taken).unwrap_or(0), compiled.memory());
        println!("{name}: {} bytes of text, {taken} allocated, {counted} counted", source.text.len());
        // Too much by far would keep few grammars.
        if taken > counted || counted > 20 * taken + (1 << 20) {
            wrong.push((name, taken, counted));
        }
    }
    drop(first);
    assert!(wrong.is_empty(), "{wrong:?}");
}
