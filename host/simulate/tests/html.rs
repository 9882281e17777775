//! The page of a run.

#![allow(clippy::unwrap_used, reason = "a page that cannot be read is a test that fails")]

use std::io::Write as _;
use std::process::{Command, Stdio};

use host_simulate::workloads::{SharedPrefixes, poisson};
use host_simulate::{Cluster, Options, Recording, Report, html, record, simulate};
use serde_json::Value;

fn run() -> (Report, Recording) {
    let text = "model = 'qwen3-32b'\n[[workers]]\nrole = 'prefill'\ncount = 2\nmachine = 'b200'\ntp = 2\n\
                [[workers]]\nrole = 'decode'\nmachine = 'b200'\ntp = 2";
    let cluster = Cluster::parse("cluster.toml", text).unwrap();
    let shape =
        SharedPrefixes { prefixes: 3, prefix_tokens: 4_000, suffix_tokens: 500, answer: 60, requests: 80 };
    let workload = poisson(shape.asks(5), 8.0, 1);
    let recorded = record(&workload, &cluster, &Options::default(), &mut |_| {});
    assert_eq!(
        recorded.0,
        simulate(&workload, &cluster, &Options::default(), &mut |_| {}),
        "recording changes the run"
    );
    recorded
}

/// What the page's script reads.
fn data(page: &str) -> Value {
    let (_, rest) = page.split_once("id=\"data\">").unwrap();
    let (json, _) = rest.split_once("</script>").unwrap();
    serde_json::from_str(json).unwrap()
}

#[test]
fn a_recording_has_every_request_and_token_once() {
    let (report, recording) = run();
    assert_eq!(recording.requests.len(), report.requests.completed);
    assert_eq!(recording.seconds.iter().map(|second| second.tokens).sum::<u64>(), 80 * 60);
    assert_eq!(recording.seconds.iter().map(|second| second.answered).sum::<u64>(), 80);
    let orderly = |request: &host_simulate::recording::Request| {
        request.first.is_some_and(|first| request.sent < first && first < request.ended)
    };
    assert!(recording.requests.iter().all(orderly));
    assert_eq!(recording.ttft_ms.len(), 80);
    assert!((recording.ttft_ms[79] - report.ttft_ms.most).abs() < 0.01, "{report}");
    assert!(recording.seconds.iter().any(|second| second.used[1] > 0.0), "no pool is ever used");
}

#[test]
fn the_page_needs_nothing_from_elsewhere_and_no_name_can_leave_its_place() {
    let (report, recording) = run();
    let page = html::page("</script><script>alert(1)</script>", &report, &recording);
    for outside in ["http:", "https:", "//cdn", " src=", "href=", "@import", "url(", "fetch(", "import "] {
        assert!(!page.contains(outside), "the page has {outside:?}");
    }
    assert!(page.contains("default-src 'none'"), "a browser would let it ask for something");
    assert_eq!(page.matches("</script>").count(), 2);
    assert_eq!(data(&page)["title"], "</script><script>alert(1)</script>");
    assert_eq!(data(&page)["report"]["requests"]["completed"], 80);
}

#[test]
fn the_script_draws_every_plot() {
    let (report, recording) = run();
    let page = html::page("t", &report, &recording);
    let script = page.rsplit_once("<script>").unwrap().1.split_once("</script>").unwrap().0;
    // As much of a browser as the script asks for.
    let browser = r#"
        const made = {};
        const element = id => made[id] ??= { id, textContent: "", innerHTML: "", clientWidth: 900, clientHeight: 400,
            addEventListener() {}, getContext: () => new Proxy({}, { get: (pen, name) => name === "fillRect" ? () => { pen.bars = (pen.bars ?? 0) + 1; made.bars = pen.bars; } : pen[name] ?? (() => {}), set: (pen, name, value) => { pen[name] = value; return true; } }) };
        globalThis.document = { getElementById: element, title: "" };
        globalThis.window = { addEventListener() {} };
    "#;
    let json = serde_json::to_string(&serde_json::to_string(&data(&page)).unwrap()).unwrap();
    let program = format!(
        "{browser}\nelement('data').textContent = {json};\n{script}\n\
         for (const id of ['ttft', 'itl', 'tokens', 'answered', 'hits', 'used', 'queued'])\n\
           if (!/<(path|rect)/.test(made[id].innerHTML) || /NaN|undefined/.test(made[id].innerHTML)) throw new Error(id + ': ' + made[id].innerHTML);\n\
         console.log(made.bars);"
    );
    let node = Command::new("node").arg("-").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let Ok(mut node) = node else {
        host_tests::skip::skipped("the script of the page of a simulation: node is not installed");
        return;
    };
    node.stdin.take().unwrap().write_all(program.as_bytes()).unwrap();
    let output = node.wait_with_output().unwrap();
    assert!(output.status.success(), "the script fails");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "160", "two bars for each request");
}
