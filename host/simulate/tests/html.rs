//! The page of a run.

#![allow(clippy::unwrap_used, reason = "a page that cannot be read is a test that fails")]

use std::io::Write as _;
use std::process::{Command, Stdio};

use host_simulate::comparison::Comparison;
use host_simulate::goodput::{self, Limits, Search};
use host_simulate::headline::{Arm, Cell, Fitted, Row, Table};
use host_simulate::html::Compared;
use host_simulate::plan::{Wish, plan};
use host_simulate::workloads::{SharedPrefixes, poisson};
use host_simulate::{Cluster, Options, Recording, Report, Workload, html, record, simulate};
use serde_json::Value;

fn cluster() -> Cluster {
    let text = "model = 'qwen3-32b'\n[[workers]]\nrole = 'prefill'\ncount = 2\nmachine = 'b200'\ntp = 2\n\
                [[workers]]\nrole = 'decode'\nmachine = 'b200'\ntp = 2";
    Cluster::parse("cluster.toml", text).unwrap()
}

fn options() -> Options {
    Options::default()
}

fn workload(rate: f64) -> Workload {
    let shape =
        SharedPrefixes { prefixes: 3, prefix_tokens: 4_000, suffix_tokens: 500, answer: 60, requests: 80 };
    poisson(shape.asks(5), rate, 1)
}

fn run() -> (Report, Recording) {
    let (workload, cluster) = (workload(8.0), cluster());
    let recorded = record(&workload, &cluster, &options(), &mut |_| {});
    let alone = simulate(&workload, &cluster, &options(), &mut |_| {});
    assert_eq!(recorded.0, alone, "recording changes the run");
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
    assert_eq!(recording.requests.len(), report.figures.requests.completed);
    assert_eq!(recording.seconds.iter().map(|second| second.tokens).sum::<u64>(), 80 * 60);
    assert_eq!(recording.seconds.iter().map(|second| second.answered).sum::<u64>(), 80);
    let orderly = |request: &host_simulate::recording::Request| {
        request.first.is_some_and(|first| request.sent < first && first < request.ended)
    };
    assert!(recording.requests.iter().all(orderly));
    assert_eq!(recording.curves.ttft_ms.len(), 80);
    assert!((recording.curves.ttft_ms[79] - report.figures.ttft_ms.most).abs() < 0.01, "{report}");
    assert!(recording.seconds.iter().any(|second| second.used[1] > 0.0), "no pool is ever used");
}

#[test]
fn the_page_needs_nothing_from_elsewhere_and_no_name_can_leave_its_place() {
    let (report, recording) = run();
    let page = html::page("</script><script>alert(1)</script>", &report, &recording, None);
    for outside in ["http:", "https:", "//cdn", " src=", "href=", "@import", "url(", "fetch(", "import "] {
        assert!(!page.contains(outside), "the page has {outside:?}");
    }
    assert!(page.contains("default-src 'none'"), "a browser would let it ask for something");
    assert_eq!(page.matches("</script>").count(), 2);
    assert_eq!(data(&page)["title"], "</script><script>alert(1)</script>");
    assert_eq!(data(&page)["report"]["requests"]["completed"], 80);
}

/// Has the script of a page draw into as much of a browser as it asks for. All `plots` have to be drawn. Returns the number of bars
/// on the line of time, or nothing without a program that runs scripts.
fn drawn(page: &str, plots: &[&str]) -> Option<String> {
    let script = page.rsplit_once("<script>").unwrap().1.split_once("</script>").unwrap().0;
    let browser = r#"
        const made = {};
        const element = id => made[id] ??= { id, textContent: "", innerHTML: "", hidden: true, clientWidth: 900, clientHeight: 400,
            addEventListener() {}, getContext: () => new Proxy({}, { get: (pen, name) => name === "fillRect" ? () => { pen.bars = (pen.bars ?? 0) + 1; made.bars = pen.bars; } : pen[name] ?? (() => {}), set: (pen, name, value) => { pen[name] = value; return true; } }) };
        globalThis.document = { getElementById: element, title: "" };
        globalThis.window = { addEventListener() {} };
    "#;
    let json = serde_json::to_string(&serde_json::to_string(&data(page)).unwrap()).unwrap();
    let program = format!(
        "{browser}\nelement('data').textContent = {json};\n{script}\n\
         for (const id of {plots:?})\n\
           if (!/<(path|rect)/.test(made[id].innerHTML) || /NaN|undefined|Infinity/.test(made[id].innerHTML)) throw new Error(id + ': ' + made[id].innerHTML);\n\
         console.log(made.bars);"
    );
    let node = Command::new("node").arg("-").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let Ok(mut node) = node else {
        host_tests::skip::skipped("the script of a page of a simulation: node is not installed");
        return None;
    };
    node.stdin.take().unwrap().write_all(program.as_bytes()).unwrap();
    let output = node.wait_with_output().unwrap();
    assert!(output.status.success(), "the script fails");
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

const PLOTS: [&str; 7] = ["ttft", "itl", "tokens", "answered", "hits", "used", "queued"];

#[test]
fn the_script_draws_every_plot() {
    let (report, recording) = run();
    if let Some(bars) = drawn(&html::page("t", &report, &recording, None), &PLOTS) {
        assert_eq!(bars, "160", "two bars for each request");
    }
}

#[test]
fn a_search_for_goodput_is_drawn_with_all_rates_that_were_tried() {
    let limits = Limits { ttft_p99_ms: 900.0, itl_p99_ms: 60.0 };
    let found =
        goodput::search(&workload, &cluster(), limits, Search { from: 4.0, ..Search::default() }, &options());
    assert!(found.requests_per_s > 0.0, "{found}");
    let rates: Vec<f64> = found.tried.iter().map(|tried| tried.requests_per_s).collect();
    assert!(rates.is_sorted() && rates.len() > 3, "{rates:?}");
    let holding = found.tried.iter().filter(|tried| tried.holds).map(|tried| tried.requests_per_s);
    assert_eq!(holding.fold(0.0, f64::max), found.requests_per_s);
    let (report, recording) = record(&workload(found.requests_per_s), &cluster(), &options(), &mut |_| {});
    assert_eq!(report, found.report);
    let page = html::page("t", &report, &recording, Some(&found));
    assert_eq!(data(&page)["goodput"]["tried"].as_array().unwrap().len(), rates.len());
    let plots: Vec<&str> = PLOTS.into_iter().chain(["goodput"]).collect();
    let _bars = drawn(&page, &plots);
}

#[test]
fn a_plan_is_drawn_with_all_clusters_that_were_tried() {
    for most_devices in [1, 8] {
        let wish = Wish {
            limits: Limits { ttft_p99_ms: 1_500.0, itl_p99_ms: 60.0 },
            tp: vec![1, 2],
            host_memory_gib: vec![0.0],
            most_devices,
        };
        let plan = plan(&workload(3.0), &cluster(), &wish, &options(), &mut |_| {});
        let tried: usize = plan.rows.iter().map(|row| row.tried.len()).sum();
        assert_eq!(tried, plan.runs, "{plan}");
        for row in &plan.rows {
            let best = row.tried.iter().filter(|cluster| cluster.holds).map(|cluster| cluster.devices).min();
            assert_eq!(best, row.fewest.as_ref().ok().map(|fewest| fewest.devices), "{row}");
        }
        let page = html::plan("</script>", &plan);
        assert_eq!(
            (page.matches("</script>").count(), data(&page)["title"].as_str()),
            (2, Some("</script>"))
        );
        // Where nothing was simulated there is nothing to draw.
        let _none = drawn(&page, if most_devices == 1 { &[] } else { &["fewest", "ttft", "itl"] });
    }
}

#[test]
fn published_tables_are_drawn_with_the_error_of_each_cell_and_the_goodput_of_each_arm() {
    let limits = [(500.0, 60.0), (2_000.0, 60.0), (2_000.0, 200.0)];
    let limits = limits.map(|(ttft_p99_ms, itl_p99_ms)| Limits { ttft_p99_ms, itl_p99_ms });
    let from = Search { from: 4.0, precision: 0.3, ..Search::default() };
    let goodput = goodput::frontier(&workload, &cluster(), &limits, from, &options());
    let cell = |name, published, simulated, fitted| Cell { name, published, simulated, fitted };
    let cells = vec![
        cell("ITL mean, ms", Some(65.6), 65.6, true),
        cell("TTFT p50, s", Some(9.0), 0.01, false),
        cell("requests/s", None, 3.0, false),
    ];
    let table = Table {
        title: "</script>".to_owned(),
        constants: vec![Fitted { name: "link", value: 9.0, unit: "GB/s", cell: "requests/s" }],
        rows: vec![Row { name: "baseline".to_owned(), cells }],
        goodput: vec![Arm { name: "cache".to_owned(), goodput }],
    };
    let page = html::tables("t", &[table.clone(), table]);
    assert_eq!(page.matches("</script>").count(), 2);
    let _bars = drawn(&page, &["errors-0", "errors-1", "goodput-0-0", "goodput-0-1", "goodput-1-1"]);
}

#[test]
fn runs_on_real_workers_are_drawn_beside_their_simulation_or_without_one() {
    let (report, recording) = run();
    let comparison = |simulated| Comparison {
        name: "shared".to_owned(),
        live: report.figures.clone(),
        live_found: 0.5,
        simulated,
    };
    let runs = [
        Compared {
            comparison: comparison(Some(report.clone())),
            live_curves: recording.curves.clone(),
            simulated_curves: Some(recording.curves.clone()),
        },
        Compared {
            comparison: comparison(None),
            live_curves: recording.curves.clone(),
            simulated_curves: None,
        },
    ];
    let page = html::live("t", &runs);
    let text = data(&page)["table"].as_str().unwrap().to_owned();
    assert_eq!((text.matches("TTFT p50").count(), text.matches("simulated").count()), (2, 1), "{text}");
    let _bars = drawn(&page, &["ttft-0", "itl-0", "ttft-1", "itl-1"]);
}
