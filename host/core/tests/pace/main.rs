//! A target for the time between tokens, against a made-up executor in virtual time.

mod world;

use std::time::Duration;

use host_core::{Role, Time};

use world::{Pace, Step, config};

/// 4 ms, half a millisecond per sequence of one token, and 20 µs per token of the others.
fn plain(step: Step) -> f64 {
    4e-3 + 5e-4 * step.sequences + 2e-5 * step.tokens
}

fn between(what: &str, value: f64, low: f64, high: f64) {
    println!("{what}: {value:.3}, {low} to {high}");
    assert!((low..=high).contains(&value), "{what}: {value} is not between {low} and {high}");
}

#[test]
fn the_target_is_held_and_the_room_below_it_used() {
    for role in [Role::Decode, Role::Aggregated] {
        for noise in [0.0, 0.5] {
            println!("{role:?}, noise {noise}");
            let mut world = Pace::noisy(config(role, Some(20)), noise, plain);
            world.run(60.0, 200);
            // 32 sequences take 20 ms. An aggregated worker keeps part of each step for prompts.
            let (fewest, most) = if role == Role::Decode { (28.0, 32.0) } else { (22.0, 32.0) };
            between("sequences", world.sequences(5.0, 60.0), fewest, most);
            between("time between tokens", world.itl(5.0, 60.0), 17.0, 20.2);
        }
    }
}

#[test]
fn without_a_target_as_many_run_as_fit() {
    let mut world = Pace::new(config(Role::Decode, None), plain);
    world.run(20.0, 200);
    between("sequences", world.sequences(5.0, 20.0), 150.0, 200.0);
    assert_eq!(world.stats().pace.limit, 0);
}

#[test]
fn it_begins_with_few_and_never_hurts_while_learning() {
    let mut world = Pace::new(config(Role::Decode, Some(20)), plain);
    world.run(3.0, 200);
    assert_eq!(world.seen().steps[0].1, 1, "nothing is known of the first step");
    let longest = world.seen().steps.iter().map(|(_, sequences)| *sequences).max().unwrap();
    between("sequences in the largest step", longest as f64, 25.0, 33.0);
}

#[test]
fn a_cost_that_is_no_straight_line_is_felt_out() {
    // Sequences are so cheap at first that any number seems to fit. Each sequence beyond 64 costs ten times as much.
    let cost = |step: Step| 1e-4 + 1e-4 * step.sequences + 9e-4 * (step.sequences - 64.0).max(0.0);
    let mut world = Pace::noisy(config(Role::Decode, Some(20)), 0.2, cost);
    world.run(60.0, 250);
    let mut largest = 0;
    for (_, sequences) in &world.seen().steps {
        assert!(*sequences <= largest * 5 / 4 + 1, "{sequences} after at most {largest}");
        largest = largest.max(*sequences);
    }
    between("time between tokens", world.itl(10.0, 60.0), 17.0, 20.5);
    between("sequences", world.sequences(10.0, 60.0), 70.0, 78.0);
}

#[test]
fn a_cost_that_changes_is_followed_in_both_directions() {
    // Twice as slow from second 30 to 60.
    let cost = |step: Step| plain(step) * if (30.0..60.0).contains(&step.at) { 2.0 } else { 1.0 };
    let mut world = Pace::noisy(config(Role::Decode, Some(20)), 0.2, cost);
    world.run(90.0, 200);
    between("before", world.itl(5.0, 30.0), 18.0, 20.2);
    // Requests that run when steps become slow are not preempted, so adapting takes as long as an answer.
    between("slow", world.itl(34.0, 60.0), 17.0, 20.4);
    between("sequences while slow", world.sequences(34.0, 60.0), 9.0, 12.5);
    between("after", world.itl(64.0, 90.0), 18.0, 20.2);
    between("sequences after", world.sequences(64.0, 90.0), 28.0, 32.0);
}

#[test]
fn long_contexts_count() {
    let cost = |step: Step| 2e-3 + 1e-4 * step.sequences + 1e-6 * step.context;
    let mut world = Pace::new(config(Role::Decode, Some(20)), cost);
    world.world.clients.prompt = 1_000;
    world.run(30.0, 40);
    between("short", world.itl(5.0, 30.0), 17.5, 20.2);
    world.world.clients.prompt = 4_000;
    world.run(60.0, 40);
    between("long", world.itl(40.0, 60.0), 17.0, 20.4);
    between("sequences", world.sequences(40.0, 60.0), 3.5, 4.6);
}

#[test]
fn prompts_take_only_what_the_target_leaves() {
    let mut world = Pace::new(config(Role::Aggregated, Some(12)), plain);
    world.world.clients.prompt = 2_000;
    world.run(60.0, 80);
    between("time between tokens", world.itl(5.0, 60.0), 8.0, 12.3);
    assert!(world.seen().finished > 100, "prompts came to nothing: {} answers", world.seen().finished);
    let mut free = Pace::new(config(Role::Aggregated, None), plain);
    free.world.clients.prompt = 2_000;
    free.run(60.0, 80);
    println!("with a target {} answers, without {}", world.seen().finished, free.seen().finished);
    between("time between tokens without a target", free.itl(5.0, 60.0), 20.0, 100.0);
}

#[test]
fn a_target_out_of_reach_is_said_and_one_at_a_time_goes_on() {
    let cost = |_| 50e-3;
    let mut world = Pace::new(config(Role::Decode, Some(20)), cost);
    world.run(200.0, 4);
    let pace = world.stats().pace;
    assert!(pace.out_of_reach);
    assert_eq!(pace.limit, 1);
    assert!(world.seen().finished > 50, "{} answers", world.seen().finished);
    assert!(world.seen().steps.iter().all(|(_, sequences)| *sequences <= 1));
}

#[test]
fn the_limit_does_not_flap() {
    let mut world = Pace::noisy(config(Role::Decode, Some(20)), 0.3, plain);
    world.run(10.0, 200);
    let mut limits = Vec::new();
    for tenth in 0..300 {
        world.run(10.0 + f64::from(tenth) / 10.0, 200);
        limits.push(world.stats().pace.limit);
    }
    let (low, high) = (limits.iter().min().unwrap(), limits.iter().max().unwrap());
    println!("limits {low} to {high}");
    assert!(high - low <= 6, "{limits:?}");
}

#[test]
fn no_request_waits_for_ever_and_the_oldest_comes_first() {
    let mut world = Pace::new(config(Role::Decode, Some(20)), plain);
    world.run(60.0, 100);
    // 100 clients, about 30 of them served at a time, an answer takes about 60 x 20 ms: a wait is about 3 s.
    let waits = || world.seen().waits.iter().filter(|(at, _)| *at > 10.0).map(|(_, wait)| *wait);
    let longest = waits().fold(0.0, f64::max);
    let mean = waits().sum::<f64>() / waits().count() as f64;
    between("longest wait over the mean", longest / mean, 1.0, 1.5);
}

#[test]
fn the_same_input_gives_the_same_decisions() {
    let run = || {
        let mut world = Pace::noisy(config(Role::Decode, Some(20)), 0.4, plain);
        world.run(10.0, 100);
        (world.seen().steps.clone(), world.seen().gaps.clone())
    };
    assert!(run() == run());
}

#[test]
fn an_idle_hour_is_no_step() {
    let mut world = Pace::new(config(Role::Aggregated, Some(20)), plain);
    world.run(1.0, 1);
    // The only request is cancelled at its next token, between two of its steps.
    world.world.clients.leave = true;
    world.run(2.0, 0);
    assert!(world.world.scheduler(0).is_idle());
    world.world.clients.leave = false;
    world.world.run_until(Time(Duration::from_secs(3600)));
    world.run(3601.0, 1);
    let steps = world.stats().pace.steps.sum();
    assert!(steps < Duration::from_secs(3), "{steps:?} of steps in two seconds of work");
}
