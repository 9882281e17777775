//! Worlds of many workers, and what makes them deterministic.

use std::time::Duration;

use host_core::layer_groups::LayerGroups;
use host_core::message::{Body, Message};
use host_core::pool::PoolLimits;
use host_core::radix::Policy;
use host_core::{Config, Event, Instance, Role, Time};
use host_sim::{
    Ask, Clients, Erratic, Faults, Kv, OpenRequest, Outcome, PAGE, Random, Times, Work, World, config,
    request,
};

const SEEDS: u64 = if cfg!(debug_assertions) { 60 } else { 600 };
const MS: Duration = Duration::from_millis(1);

/// Clients that send a limited number of requests to random workers.
struct Crowd {
    prefill: Vec<usize>,
    answers: Vec<usize>,
    left: u32,
    dead: Vec<usize>,
}

impl Crowd {
    fn ask(&self, random: &mut Random) -> Ask {
        let prompt: Vec<u32> = (0..1 + random.below(30)).map(|_| random.below(4) as u32).collect();
        let prefill = (!self.prefill.is_empty()).then(|| self.prefill[random.place(self.prefill.len())]);
        Ask {
            request: request(0, &prompt, 1 + random.below(10) as u32),
            answers: (self.answers[random.place(self.answers.len())], random.up_to(300 * MS)),
            prefill: prefill.map(|place| (place, random.up_to(300 * MS))),
            leaves: random.chance(0.1).then(|| random.up_to(1000 * MS)),
        }
    }
}

impl Clients for Crowd {
    fn ended(&mut self, _now: Time, _open: &OpenRequest, _complete: bool, random: &mut Random) -> Vec<Ask> {
        if self.left == 0 {
            return Vec::new();
        }
        self.left -= 1;
        vec![self.ask(random)]
    }

    fn died(&mut self, _now: Time, place: usize, _random: &mut Random) -> Vec<Ask> {
        self.dead.push(place);
        Vec::new()
    }
}

fn words() -> Kv {
    Kv { page_tokens: PAGE, layers: 3, vocabulary: 4, sliding: None, words: true }
}

/// A world of so many prefill and decode workers, or of aggregated ones, with requests for each of them.
fn crowd(
    seed: u64,
    (kv, faults, times): (Kv, Faults, impl Times + 'static),
    (prefill, answers): (usize, usize),
) -> World<Crowd> {
    let crowd = Crowd {
        prefill: (0..prefill).collect(),
        answers: (prefill..prefill + answers).collect(),
        left: 6 * (prefill + answers) as u32,
        dead: Vec::new(),
    };
    let mut world = World::new(seed, kv, faults, times, crowd);
    for place in 0..prefill + answers {
        let role = match (prefill, place < prefill) {
            (0, _) => Role::Aggregated,
            (_, true) => Role::Prefill,
            (_, false) => Role::Decode,
        };
        let pages = 24;
        let config = Config {
            vocabulary: 4,
            max_tokens: 64,
            radix_cache: Some(Policy::Lru),
            layer_groups: LayerGroups::off(kv.layers),
            cache_events: true,
            reserved_decode_tokens: 4,
            ..config(role, pages)
        };
        world.add(config, PoolLimits::shared(pages));
    }
    for _ in 0..2 * (prefill + answers) {
        let ask = world.clients.ask(&mut world.random);
        world.ask(ask);
    }
    world
}

fn of_every_kind() -> Faults {
    Faults {
        loss: 0.1,
        repeat: 0.1,
        flip: 0.05,
        death: 0.003,
        decode_death: 0.003,
        disconnect: 0.005,
        executor: 0.02,
        flush: 0.005,
        staged: 0.5,
        read_early: 0.5,
        ..Faults::default()
    }
}

#[test]
fn workers_of_both_roles_talk_die_and_come_back_and_no_answer_is_wrong() {
    let mut total = Outcome::default();
    let mut dead = [0; 5];
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let mut world = crowd(seed, (words(), of_every_kind(), Erratic), (3, 2));
        world.run();
        total += world.outcome();
        world.clients.dead.iter().for_each(|place| dead[*place] += 1);
    }
    println!("{total:?}, deaths {dead:?}");
    assert!(dead.iter().all(|deaths| *deaths > 0), "not every worker died once: {dead:?}");
    assert!(total.finished > SEEDS * 10 && total.failed > 0 && total.copies > 0);
    assert!(total.disconnects > 0 && total.fences_failed > 0 && total.integrity_failures > 0);
    assert!(total.cached_tokens > 0 && total.flushed_in_use > 0 && total.retractions > 0);
}

#[test]
fn workers_that_freeze_lag_jump_ahead_and_are_cut_off_one_way_give_no_wrong_answer() {
    let faults = Faults {
        partition: 0.003,
        freeze: 0.003,
        slow: 0.003,
        clock: 0.003,
        write: 0.05,
        stream: 0.003,
        decode_executor: 0.02,
        more_deaths: 2,
        until: Some(Time(Duration::from_secs(40))),
        ..of_every_kind()
    };
    let mut kinds = vec![
        ("is cut", 0),
        ("stands still", 0),
        ("is slow", 0),
        ("jumps ahead", 0),
        ("a write fails", 0),
        ("loses the streams", 0),
        ("a batch of worker", 0),
    ];
    let mut total = Outcome::default();
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let mut world = crowd(seed, (words(), faults, Erratic), (2, 2));
        world.keep_mishaps();
        world.run();
        total += world.outcome();
        for (kind, struck) in &mut kinds {
            *struck += world.mishaps().iter().filter(|mishap| mishap.what.contains(*kind)).count();
        }
        assert!(world.mishaps().iter().all(|mishap| mishap.at < faults.until.unwrap()));
    }
    println!("{total:?} {kinds:?}");
    assert!(kinds.iter().all(|(_, struck)| *struck > 0), "{kinds:?}");
    assert!(total.finished > SEEDS * 5 && total.deaths > SEEDS / 2, "{total:?}");
}

#[test]
fn a_page_that_is_given_away_while_a_write_may_land_is_found_before_it_lands() {
    let times = |_now: Time, work: Work<'_>, _random: &mut Random| match work {
        Work::Write { .. } => 1000 * MS,
        _ => Duration::ZERO,
    };
    let crowd = Crowd { prefill: Vec::new(), answers: Vec::new(), left: 0, dead: Vec::new() };
    let mut world = World::new(1, words(), Faults::default(), times, crowd);
    let layers = LayerGroups::off(words().layers);
    for role in [Role::Prefill, Role::Decode] {
        // One request fits.
        let config = Config { vocabulary: 4, layer_groups: layers, ..config(role, 4) };
        world.add(config, PoolLimits::shared(4));
    }
    let ask = |prompt: &[u32], leaves| Ask {
        request: request(0, prompt, 2),
        answers: (1, Duration::ZERO),
        prefill: Some((0, Duration::ZERO)),
        leaves,
    };
    let room = world.ask(ask(&[1; 12], Some(100 * MS)));
    world.run_until(Time(200 * MS));
    world.ask(ask(&[2; 12], None));
    world.run_until(Time(300 * MS));
    // A false answer to the abort, which was sent after the reserve: it says that nothing is in flight.
    let drained = Message { id: 99, answers: Some(2), room, attempt: 1, body: Body::Drained };
    world.lie(1, Event::Message { from: Instance(1), floor: 0, message: drained });
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.run()));
    let text = caught.unwrap_err().downcast_ref::<String>().cloned().unwrap_or_default();
    assert!(text.contains("may still land"), "{text}");
    assert!(world.now() < Time(1000 * MS), "only when it landed: {:?}", world.now());
}

#[test]
fn without_faults_all_of_many_workers_answer_everything() {
    let mut world = crowd(1, (words(), Faults::default(), Erratic), (8, 5));
    let requests = 8 * 13;
    world.run();
    let outcome = world.outcome();
    assert_eq!(outcome.finished + outcome.failed, requests, "{outcome:?}");
    assert!(outcome.finished > requests / 2 && outcome.integrity_failures == 0, "{outcome:?}");
}

#[test]
fn equal_seeds_give_equal_runs_and_other_seeds_give_others() {
    let trace = |seed| {
        let mut world = crowd(seed, (words(), of_every_kind(), Erratic), (2, 2));
        world.keep_trace();
        world.run();
        world.trace().to_vec()
    };
    for seed in 0..5 {
        println!("seed {seed}");
        assert!(trace(seed).len() > 100);
        assert_eq!(trace(seed), trace(seed));
        assert_ne!(trace(seed), trace(seed + 1));
    }
}

#[test]
fn an_answer_takes_what_the_models_say() {
    // Two chunks of the prompt and four more steps, or the same with a transfer between the second and the third of
    // these steps.
    let prompt: Vec<u32> = (0..12).collect();
    for (prefill, expected) in [(0, 6 * 10), (1, 6 * 10 + 3 + 100 + 7)] {
        let times = |_now: Time, work: Work<'_>, _random: &mut Random| match work {
            Work::Step { .. } => 10 * MS,
            // The reserve is the only message that the answer waits for.
            Work::Message { .. } => 3 * MS,
            Work::Write { .. } => 100 * MS,
            Work::Verify { .. } => 7 * MS,
            _ => Duration::ZERO,
        };
        let crowd = Crowd { prefill: Vec::new(), answers: Vec::new(), left: 0, dead: Vec::new() };
        let mut world = World::new(1, Kv::blank(PAGE, 1000), Faults::default(), times, crowd);
        if prefill > 0 {
            world.add(config(Role::Prefill, 20), PoolLimits::shared(20));
        }
        let role = if prefill > 0 { Role::Decode } else { Role::Aggregated };
        let answers = world.add(config(role, 20), PoolLimits::shared(20));
        world.ask(Ask {
            request: request(0, &prompt, 5),
            answers: (answers, Duration::ZERO),
            prefill: (prefill > 0).then_some((0, Duration::ZERO)),
            leaves: None,
        });
        while world.outcome().finished == 0 {
            assert!(world.step());
        }
        assert_eq!(world.now(), Time(expected * MS), "{role:?}");
    }
}

#[test]
fn pages_without_contents_serve_a_thousand_workers() {
    let times = |_now: Time, work: Work<'_>, _random: &mut Random| match work {
        Work::Step { batch, .. } => MS * batch.tokens() as u32,
        _ => Duration::ZERO,
    };
    let mut world = crowd(1, (Kv::blank(PAGE, 4), Faults::default(), times), (0, 1000));
    world.audit_every(1000);
    world.run();
    let outcome = world.outcome();
    assert_eq!(outcome.finished + outcome.failed, 8000, "{outcome:?}");
}
