//! Small clusters, simulated whole.

use host_simulate::cluster::{Link, Named, Tier};
use host_simulate::goodput::{Limits, Search, search};
use host_simulate::workloads::{SharedPrefixes, conversations, poisson, unshared};
use host_simulate::{Cluster, Options, Report, Workload, simulate};

const PAIR: &str = "
    model = 'qwen3-32b'
    kv = 'fp8'
    [[workers]]
    role = 'prefill'
    count = 2
    machine = 'b200'
    tp = 2
    PREFILL
    [[workers]]
    role = 'decode'
    count = 2
    machine = 'b200'
    tp = 2
    DECODE
";

/// Two prefill and two decode workers, with these lines for each kind.
fn pair(prefill: &str, decode: &str) -> Cluster {
    let text = PAIR.replace("PREFILL", prefill).replace("DECODE", decode);
    Cluster::parse("cluster.toml", &text).unwrap_or_else(|error| panic!("{error}"))
}

fn run(workload: &Workload, cluster: &Cluster) -> Report {
    simulate(workload, cluster, &Options::default(), &mut |_| {})
}

/// Requests that share one of three beginnings, 40 at a time.
fn shared(requests: usize) -> Workload {
    let shape =
        SharedPrefixes { prefixes: 3, prefix_tokens: 4_000, suffix_tokens: 500, answer: 60, requests };
    Workload::Closed { asks: shape.asks(5), concurrency: 40 }
}

#[test]
fn equal_runs_give_equal_reports_that_are_those_written_down() {
    let tight = "pool_tokens = 40_000\nhost_memory_gib = 1.5";
    let mut cluster = pair(tight, tight);
    cluster.tiers = Cluster::parse(
        "tiers.toml",
        "model = 'qwen3-32b'\n[[workers]]\nrole = 'aggregated'\nmachine = 'b200'\ntp = 2\n\
         [[tiers]]\ngigabytes_per_second = 20\nlatency_us = 300\nshared = true",
    )
    .unwrap()
    .tiers;
    for (name, workload) in [
        ("shared", shared(150)),
        ("turns", conversations(12, &[3_000, 700, 1_500], 40, 8)),
        ("poisson", poisson(unshared(60, 3_333, 50), 4.0, 9)),
    ] {
        let report = run(&workload, &cluster);
        assert_eq!(report.figures.requests.completed, workload.requests(), "{name}: {report}");
        let found = report.json();
        assert_eq!(found, run(&workload, &cluster).json(), "{name}");
        let path = format!("{}/tests/golden/{name}.json", env!("CARGO_MANIFEST_DIR"));
        let wanted = std::fs::read_to_string(&path).unwrap_or_default();
        if found != wanted {
            let new = format!("{}/{name}.json", env!("CARGO_TARGET_TMPDIR"));
            std::fs::write(&new, found).unwrap();
            panic!("the report differs from {path}; where that is meant to be, put {new} in its place");
        }
    }
}

#[test]
fn every_request_of_a_small_pool_is_answered() {
    let report = run(&shared(300), &pair("", "pool_tokens = 24_000"));
    assert_eq!((report.figures.requests.completed, report.figures.requests.failed), (300, 0));
    assert_eq!(report.figures.itl_ms.count, 300 * 59);
    assert!(report.workers[2].queued_mean > 1.0, "the pool is not what requests wait for: {report}");
}

#[test]
fn a_cache_on_decode_workers_saves_what_is_shared_from_being_sent() {
    let [without, with] =
        ["radix_cache = false", ""].map(|decode| run(&shared(300), &pair("", decode)).transfers.pages);
    assert!(with * 3 < without, "{with} and {without} pages");
}

#[test]
fn requests_that_fetch_a_shared_prefix_themselves_move_more_pages() {
    let workload = shared(300);
    let cluster = |share_transfers| Cluster { share_transfers, ..pair("", "") };
    let [shares, alone] = [true, false].map(|shares| run(&workload, &cluster(shares)));
    assert!(shares.transfers.shared > 0 && alone.transfers.shared == 0, "{shares}{alone}");
    assert!(shares.transfers.pages * 3 < alone.transfers.pages * 2, "{shares}{alone}");
    assert_eq!(alone.figures.requests.completed, 300);
}

#[test]
fn pages_that_a_tier_fails_to_give_are_requested_of_prefill() {
    let tier = Tier { gigabytes_per_second: 20.0, latency_us: 300.0, shared: true };
    let cluster = |tier_failures| {
        let tight = "pool_tokens = 20_000\nhost_memory_gib = 10";
        let link = Named::Itself(Link::new(1.0, 20.0, 0.0));
        Cluster { tier_failures, link, tiers: vec![tier], ..pair("host_memory_gib = 40", tight) }
    };
    let workload = conversations(24, &[3_000, 700, 1_500, 800], 40, 12);
    let [whole, failing] = [0.0, 0.02].map(|failures| run(&workload, &cluster(failures)));
    assert!(whole.prompts.found_l2 > 0 && whole.transfers.renegotiated == 0, "{whole}");
    assert!(
        failing.transfers.renegotiated > 0 && failing.transfers.pages > whole.transfers.pages,
        "{failing}"
    );
    assert_eq!(failing.figures.requests.completed, 96, "{failing}");
}

#[test]
fn a_target_keeps_the_time_between_tokens_under_it() {
    let shape =
        SharedPrefixes { prefixes: 3, prefix_tokens: 20_000, suffix_tokens: 500, answer: 200, requests: 200 };
    let workload = Workload::Closed { asks: shape.asks(5), concurrency: 60 };
    let mean = |decode| run(&workload, &pair("", decode)).figures.itl_ms.mean;
    let (free, target) = (mean(""), mean("target_itl_ms = 13"));
    assert!(free > 15.0 && target < 13.2, "{free} ms without, {target} ms with a target of 13 ms");
}

#[test]
fn routes_by_prefix_find_more_than_routes_in_turn() {
    // Each of the two pools holds half of the beginnings.
    let shape =
        SharedPrefixes { prefixes: 12, prefix_tokens: 4_000, suffix_tokens: 500, answer: 20, requests: 300 };
    let workload = Workload::Closed { asks: shape.asks(5), concurrency: 6 };
    let mut cluster = pair("pool_tokens = 40_000", "");
    let found = |cluster: &Cluster| run(&workload, cluster).prompts.found_l1;
    let prefix = found(&cluster);
    cluster.router = host_simulate::cluster::Policy::RoundRobin;
    let turns = found(&cluster);
    assert!(prefix * 10 > turns * 13, "{prefix} and {turns} tokens");
}

#[test]
fn the_next_turn_finds_the_answer_before_it() {
    let workload = conversations(4, &[2_000, 500], 400, 4);
    let found = run(&workload, &pair("", "")).prompts.not_sent;
    // The first prompt, and the answer without the tokens of its last, partial page.
    assert!((4 * 2_300..=4 * 2_400).contains(&found), "{found} tokens");
}

#[test]
fn pages_that_travel_while_layers_are_computed_come_earlier() {
    let workload = Workload::Closed { asks: unshared(10, 8_000, 2), concurrency: 1 };
    let first = |groups| {
        let cluster = Cluster { layer_groups: groups, ..pair("", "") };
        run(&workload, &cluster).figures.ttft_ms.p50
    };
    // The pages have 1 GB, and the link 35.5 GB/s.
    let (whole, groups) = (first(1), first(8));
    assert!(whole - groups > 15.0, "{whole} ms whole, {groups} ms in 8 groups");
}

/// A pair of workers with different numbers of ranks, an expensive run, and this line for the cluster.
fn divided(line: &str) -> Cluster {
    let text = format!(
        "model = 'qwen3-0.6b'\n{line}\nlink = {{ gigabytes_per_second = 35.5, latency_us = 20, run_us = 0.5 }}\n\
         [[workers]]\nrole = 'prefill'\nmachine = 'h200'\ntp = 2\n[[workers]]\nrole = 'decode'\nmachine = 'h200'\ntp = 4"
    );
    Cluster::parse("cluster.toml", &text).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn short_runs_cost_what_staging_saves_and_the_default_order_has_none() {
    let workload = Workload::Closed { asks: unshared(10, 1_000, 2), concurrency: 1 };
    let first = |line: &str| run(&workload, &divided(line)).figures.ttft_ms.p50;
    let engines = "kv_layout = 'layer-kv-page-token-head-dim'";
    let [direct, staged] =
        ["never", "auto"].map(|staging| first(&format!("{engines}\nstaging = '{staging}'")));
    let pages = first("staging = 'never'");
    // 16 pages of 64 tokens, 28 layers, K and V, and two lanes for each of the two senders: 114,688 runs of half a microsecond.
    let more = direct - pages;
    assert!((57.0..58.0).contains(&more), "{direct} ms in runs, {pages} ms in pages");
    assert!(staged - pages < 2.0, "{staged} ms staged, {pages} ms in pages");
}

#[test]
fn a_router_that_takes_time_serves_one_request_after_the_other() {
    let workload = Workload::Open(unshared(50, 100, 2));
    let first = |us| {
        let cluster = Cluster { router_us: us, ..pair("", "") };
        run(&workload, &cluster).figures.ttft_ms
    };
    let (at_once, later) = (first(0.0), first(10_000.0));
    let more = later.most - at_once.most;
    assert!((400.0..=500.0).contains(&more), "{} ms more for the last of 50 requests", more);
}

const SLIDING: &str = "
    model = { parameters = 1e9, layers = 4, heads = 8, kv_heads = 8, head_dim = 128SLIDES }
    [[workers]]
    role = 'prefill'
    machine = 'h200'
    POOL
    [[workers]]
    role = 'decode'
    machine = 'h200'
    POOL
    [[tiers]]
    gigabytes_per_second = 20
    latency_us = 300
";

/// A pair of workers of a model of 4 layers, and 12 more that slide over 128 tokens where `slides`.
fn sliding(slides: bool, pool: &str) -> Cluster {
    let more = if slides { ", sliding = { layers = 12, tokens = 128 }" } else { "" };
    let text = SLIDING.replace("SLIDES", more).replace("POOL", pool);
    Cluster::parse("cluster.toml", &text).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn of_sliding_layers_the_tail_of_a_prompt_is_sent() {
    let workload = Workload::Closed { asks: unshared(20, 6_400, 10), concurrency: 4 };
    let sent = |slides| run(&workload, &sliding(slides, "radix_cache = false")).transfers.pages;
    // A window of 128 tokens is two pages of 64, and 12 layers take three pages of four layers.
    assert_eq!((sent(false), sent(true)), (20 * 100, 20 * (100 + 2 * 3)));
}

#[test]
fn conversations_of_a_model_with_sliding_layers_return_from_every_tier() {
    let workload = conversations(40, &[3_000, 700, 1_500], 40, 20);
    // The pool has 937 pages, and host memory 512 or 2,048: less than the pool, or more.
    for (gib, more) in [(0.5, false), (2.0, true)] {
        let workers = format!("pool_tokens = 60_000\nhost_memory_gib = {gib}");
        let report = run(&workload, &sliding(true, &workers));
        assert_eq!(report.figures.requests.completed, 120, "{report}");
        let found = if more { report.prompts.found_l2 } else { report.prompts.found_l3 };
        assert!(found > 10_000, "{gib} GiB: {found} tokens found: {report}");
    }
}

#[test]
fn goodput_is_the_highest_rate_that_keeps_the_limits() {
    let asks =
        SharedPrefixes { prefixes: 3, prefix_tokens: 8_000, suffix_tokens: 500, answer: 60, requests: 120 };
    let workload = |rate| poisson(asks.asks(5), rate, 2);
    let (cluster, options) = (pair("", "radix_cache = false"), Options::default());
    let limits = Limits { ttft_p99_ms: 1_000.0, itl_p99_ms: 15.0 };
    let holds = |rate: f64| limits.hold(&simulate(&workload(rate), &cluster, &options, &mut |_| {}));
    for from in [0.25, 64.0] {
        let found = search(&workload, &cluster, limits, Search { from, ..Search::default() }, &options);
        let rate = found.requests_per_s;
        assert!(rate > 0.25 && rate < 64.0 && holds(rate) && !holds(rate * 1.3), "from {from}: {found}");
    }
    let never = Limits { ttft_p99_ms: 1.0, ..limits };
    let found = search(&workload, &cluster, never, Search { slowest: 0.4, ..Search::default() }, &options);
    let tried: Vec<f64> = found.tried.iter().map(|tried| tried.requests_per_s).collect();
    assert_eq!((found.requests_per_s, tried), (0.0, vec![0.5, 1.0]));
}

#[test]
fn requests_that_warm_caches_up_are_not_measured() {
    let (workload, cluster) = (shared(100), pair("", ""));
    let all = run(&workload, &cluster);
    let warm = simulate(&workload, &cluster, &Options { warm_up: 60, ..Options::default() }, &mut |_| {});
    assert_eq!((warm.figures.requests.completed, warm.figures.itl_ms.count), (40, 40 * 59));
    assert_eq!((warm.transfers, warm.prompts), (all.transfers, all.prompts), "the run is the same");
    assert!(
        warm.figures.ttft_ms.most < all.figures.ttft_ms.most
            && warm.figures.duration_s < all.figures.duration_s
    );
}

#[test]
fn a_wrong_cluster_is_refused_with_the_line_or_the_key() {
    let good = PAIR.replace("PREFILL", "").replace("DECODE", "");
    let shape = |heads: &str| format!("{{ parameters = 1e9, layers = 2, {heads} }}");
    for (from, to, said) in [
        ("kv = 'fp8'", "kv = 'fp7'", "c.toml: line 3: unknown variant `fp7`"),
        ("count = 2", "cuont = 2", "c.toml: line 6: unknown field `cuont`"),
        ("'qwen3-32b'", "'qwen4'", "c.toml: model: there is no \"qwen4\": take one of qwen3-32b"),
        ("tp = 2", "tp = 0", "c.toml: workers[0].tp: 0 is not from 1 to 1024"),
        ("'b200'", "'h100'", "c.toml: workers[0].tp: 64.0 GB of weights leave no page"),
        ("'decode'", "'aggregated'", "c.toml: workers: there must be prefill and decode workers"),
        ("kv = 'fp8'", "layer_groups = 7", "c.toml: layer_groups: 7 does not divide the model's 64 layers"),
        (
            "kv = 'fp8'",
            "link = { gigabytes_per_second = -1, latency_us = 0 }",
            "c.toml: link.gigabytes_per_second",
        ),
        (
            "kv = 'fp8'",
            "staging = 'sometimes'",
            "unknown staging mode \"sometimes\": use auto, always or never",
        ),
        ("kv = 'fp8'", "kv_layout = 'pages'", "unknown KV layout \"pages\""),
        ("kv = 'fp8'", "router_us = -1", "c.toml: router_us: -1 is not from 0 to 1e9"),
        ("kv = 'fp8'", "tier_failures = 1.1", "c.toml: tier_failures: 1.1 is not from 0 to 1"),
        ("kv = 'fp8'", "router_us = 1e26", "c.toml: router_us: 1e26"),
        ("kv = 'fp8'", "page_tokens = 0", "c.toml: page_tokens: 0"),
        ("'qwen3-32b'", &shape("heads = 4, kv_heads = 0, head_dim = 8"), "c.toml: model.kv_heads: 0"),
        ("'qwen3-32b'", &shape("heads = 0, kv_heads = 2, head_dim = 8"), "c.toml: model.heads: 0"),
        ("'qwen3-32b'", &shape("heads = 4, kv_heads = 2, head_dim = 0"), "c.toml: model.head_dim: 0"),
        ("tp = 2", "tp = 4000000", "c.toml: workers[0].tp: 4000000 is not from 1 to 1024"),
        ("tp = 2", "tp = 2\nmax_batch = 1000000000", "c.toml: workers[0].max_batch: 1e9"),
        ("tp = 2", "tp = 2\npool_tokens = 0", "c.toml: workers[0].pool_tokens: 0"),
        ("count = 2", "count = 100000", "c.toml: workers: pages of all together: "),
        ("kv = 'fp8'", "layer_groups = 64", "c.toml: layer_groups: 64 does not divide"),
        ("tp = 2", "tp = 2\nhost_memory_gib = inf", "c.toml: workers[0].host_memory_gib: inf"),
        (
            "tp = 2",
            "tp = 2\nstep = { base_us = 0, prompt_token_us = 1, sequence_us = 0 }",
            "c.toml: workers[0].step: 0 is not",
        ),
        (
            "kv = 'fp8'",
            "link = { gigabytes_per_second = 1e-300, latency_us = 0 }",
            "c.toml: link.gigabytes_per_second",
        ),
        ("kv = 'fp8'", "link = { gigabytes_per_second = 1, latency_us = 1e300 }", "c.toml: link.latency_us"),
        ("tp = 2", "tp = 2\nhost_memory_gib = 1\nradix_cache = false", "workers[0].host_memory_gib"),
    ] {
        // 64 GB of weights fit one H100, with nothing beside them.
        let text =
            if to == "'h100'" { good.replace("tp = 2", "tp = 1\nmemory_share = 0.8") } else { good.clone() };
        let error = Cluster::parse("c.toml", &text.replacen(from, to, 1)).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}
