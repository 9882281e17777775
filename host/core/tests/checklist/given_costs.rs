//! A configured cost model: decisions that otherwise follow from measured times follow from the given costs, however long
//! anything takes.

use std::collections::BTreeSet;
use std::time::Duration;

use host_core::Role;
use host_core::hierarchy::{CostModel, Direction, HierarchyConfig, PageEnd, TierAction};
use host_core::radix::PageHash;
use host_sim::Leg;

use super::leg::tokens;
use super::storage::{hierarchy, with_offload};

const MS: Duration = Duration::from_millis(1);

/// Reading and copying nine pages takes 118 ms.
fn costs(compute_token: Duration, send_page: Duration) -> HierarchyConfig {
    let costs = CostModel { compute_token, send_page, copy_page: MS, read: 100 * MS, read_page: MS };
    HierarchyConfig { costs: Some(costs), ..hierarchy(32, 1) }
}

fn reads(leg: &Leg) -> usize {
    leg.pending(|action| matches!(action, TierAction::Read { .. }))
}

/// Lets all work end, and empties all caches but storage.
fn end(leg: &mut Leg, stored: &mut BTreeSet<PageHash>) {
    leg.serve(stored);
    leg.compute_all();
    leg.serve(stored);
    leg.scheduler.flush_cache();
}

#[test]
fn what_was_measured_changes_no_decision_to_restore_instead_of_computing() {
    // Nine pages have 36 tokens.
    for (compute_token, restores) in [(10 * MS, true), (MS, false)] {
        let mut leg = Leg::with(with_offload(Role::Aggregated, 64, costs(compute_token, MS)));
        let mut stored = BTreeSet::new();
        for room in 0..20 {
            leg.submit(room, &tokens(0..40), 1);
            leg.answer_query(|name| stored.contains(name));
            assert_eq!(reads(&leg) > 0, restores && room > 0, "{compute_token:?}, request {room}");
            // Times are the opposite of what the cost model predicts: a minute for reads where it prefers reads, a minute
            // for computing where it prefers computing.
            leg.wait(if restores { 60_000 * MS } else { MS });
            leg.serve(&mut stored);
            leg.wait(if restores { MS } else { 60_000 * MS });
            end(&mut leg, &mut stored);
            // A trial would be due now if measured times decided.
            leg.wait(61_000 * MS);
        }
        leg.serve(&mut stored);
        leg.offload_at_rest();
    }
}

#[test]
fn what_was_measured_changes_no_decision_to_restore_instead_of_being_sent() {
    // Eleven pages would be sent.
    for (send_page, restores) in [(20 * MS, true), (MS, false)] {
        let mut leg = Leg::with(with_offload(Role::Decode, 64, costs(MS, send_page)));
        let mut stored = BTreeSet::new();
        for room in 0..20 {
            leg.submit(room, &tokens(0..44), 1);
            leg.answer_query(|name| stored.contains(name));
            assert_eq!(reads(&leg) > 0, restores && room > 0, "{send_page:?}, request {room}");
            leg.serve(&mut stored);
            leg.wait(if restores { MS } else { 4_000 * MS });
            leg.answer_messages();
            leg.deliver(room);
            end(&mut leg, &mut stored);
            leg.answer_messages();
            leg.wait(61_000 * MS);
        }
        leg.serve(&mut stored);
        leg.offload_at_rest();
    }
}

#[test]
fn what_was_measured_changes_no_decision_to_copy_from_host_memory() {
    for (copy_page, restores) in [(MS, true), (1_000 * MS, false)] {
        let given = CostModel { compute_token: 10 * MS, send_page: MS, copy_page, read: MS, read_page: MS };
        let offload = HierarchyConfig { costs: Some(given), ..hierarchy(64, 0) };
        let mut leg = Leg::with(with_offload(Role::Aggregated, 12, offload));
        // The two prompts evict each other from the pool.
        for room in 0..20 {
            let first = room as u32 % 2 * 100;
            leg.submit(room, &tokens(first..first + 40), 1);
            let loads =
                leg.pending(|action| matches!(action, TierAction::Copy { direction: Direction::Load, .. }));
            assert_eq!(loads > 0, restores && room > 1, "{copy_page:?}, request {room}");
            leg.wait(if restores { 60_000 * MS } else { MS });
            leg.serve(&mut BTreeSet::new());
            leg.wait(if restores { MS } else { 60_000 * MS });
            leg.compute_all();
            leg.serve(&mut BTreeSet::new());
            leg.wait(61_000 * MS);
        }
        leg.offload_at_rest();
    }
}

#[test]
fn a_tier_is_too_slow_after_four_times_its_given_cost_and_then_rests() {
    let mut leg = Leg::with(with_offload(Role::Aggregated, 64, costs(100 * MS, MS)));
    let mut stored = BTreeSet::new();
    leg.submit(0, &tokens(0..40), 1);
    leg.serve(&mut stored);
    end(&mut leg, &mut stored);
    leg.submit(1, &tokens(0..40), 1);
    leg.answer_query(|name| stored.contains(name));
    let (tag, pages) = leg.take_read();
    assert_eq!(pages.len(), 9);
    let cancels = |leg: &Leg| leg.pending(|action| matches!(action, TierAction::Cancel { .. }));
    // Four times the given cost (100 ms and 1 ms for each of 9 pages), and 50 ms.
    leg.wait(485 * MS);
    assert_eq!(cancels(&leg), 0);
    leg.wait(2 * MS);
    assert_eq!(cancels(&leg), 1);
    leg.submit(2, &tokens(500..540), 1);
    assert_eq!(leg.pending(|action| matches!(action, TierAction::Query { .. })), 0, "it rests for a second");
    leg.all_end(tag, pages.len(), PageEnd::Failed);
    end(&mut leg, &mut stored);
    leg.wait(61_000 * MS);
    leg.serve(&mut stored);
    leg.offload_at_rest();
}

#[test]
fn a_request_waits_as_long_as_the_given_costs_of_doing_without() {
    let mut leg = Leg::with(with_offload(Role::Aggregated, 64, costs(10 * MS, MS)));
    let mut stored = BTreeSet::new();
    leg.submit(0, &tokens(0..40), 1);
    leg.serve(&mut stored);
    end(&mut leg, &mut stored);
    leg.submit(1, &tokens(0..40), 1);
    leg.answer_query(|name| stored.contains(name));
    assert_eq!(reads(&leg), 1);
    leg.wait(359 * MS);
    assert!(leg.batch.is_none(), "36 tokens at 10 ms each");
    leg.wait(2 * MS);
    assert!(leg.batch.is_some(), "it goes on without");
    leg.serve(&mut stored);
    end(&mut leg, &mut stored);
    leg.offload_at_rest();
}
