//! Capacity planning.

#![allow(clippy::unwrap_used, reason = "a cluster that cannot be read is a test that fails")]

use host_simulate::goodput::Limits;
use host_simulate::plan::{Plan, Wish, plan};
use host_simulate::workloads::{SharedPrefixes, poisson};
use host_simulate::{Cluster, Options, Workload, simulate};

fn like() -> Cluster {
    let text = "model = 'qwen3-32b'\nkv = 'fp8'\n[[workers]]\nrole = 'aggregated'\nmachine = 'h200'";
    Cluster::parse("cluster.toml", text).unwrap()
}

fn workload() -> Workload {
    let shape = SharedPrefixes {
        prefixes: 20,
        prefix_tokens: 4_000,
        suffix_tokens: 1_000,
        answer: 120,
        requests: 150,
    };
    poisson(shape.asks(5), 6.0, 1)
}

fn planned(limits: Limits, most_devices: usize) -> Plan {
    let wish = Wish { limits, tp: vec![1, 2], host_memory_gib: vec![0.0], most_devices };
    plan(&workload(), &like(), &wish, &Options::default(), &mut |_| {})
}

#[test]
fn the_fewest_workers_keep_the_limits_and_one_less_does_not() {
    let limits = Limits { ttft_p99_ms: 1_500.0, itl_p99_ms: 60.0 };
    let plan = planned(limits, 12);
    println!("{plan}");
    assert_eq!(plan.rows.len(), 2 * 3);
    let devices: Vec<usize> =
        plan.rows.iter().filter_map(|row| Some(row.fewest.as_ref().ok()?.devices)).collect();
    assert!(devices.len() >= 2 && devices.is_sorted(), "{plan}");
    for row in &plan.rows {
        let Ok(fewest) = &row.fewest else { continue };
        assert!(limits.hold(&fewest.report), "{plan}");
        if row.arrangement.prefill_tp.is_none() && fewest.answers > 1 {
            let mut smaller = like();
            smaller.workers[0].count = fewest.answers - 1;
            smaller.workers[0].tp = row.arrangement.answers_tp;
            let report = simulate(&workload(), &smaller, &Options::default(), &mut |_| {});
            assert!(!limits.hold(&report), "{} workers are enough, too: {plan}", fewest.answers - 1);
        }
    }
}

#[test]
fn what_cannot_be_is_said_with_the_reason() {
    // Reading the weights once takes longer than this limit for ITL.
    let plan = planned(Limits { ttft_p99_ms: 1_500.0, itl_p99_ms: 1.0 }, 4);
    let text = plan.to_string();
    assert!(plan.rows.iter().all(|row| row.fewest.is_err()), "{text}");
    assert!(text.contains("not within 4 devices: TTFT p99"), "{text}");
    let small =
        "model = 'qwen3-32b'\n[[workers]]\nrole = 'aggregated'\nmachine = 'h100'\nmemory_share = 0.8\ntp = 2";
    let wish = Wish {
        limits: Limits { ttft_p99_ms: 1e9, itl_p99_ms: 1e9 },
        tp: vec![1],
        host_memory_gib: vec![0.0],
        most_devices: 2,
    };
    let small = Cluster::parse("c.toml", small).unwrap();
    let plan = plan_of(&small, &wish);
    assert!(plan.to_string().contains("64.0 GB of weights leave no page"), "{plan}");
}

fn plan_of(like: &Cluster, wish: &Wish) -> Plan {
    plan(&workload(), like, wish, &Options::default(), &mut |_| {})
}
