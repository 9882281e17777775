//! The worlds of these tests, and the clients in them.

use std::time::Duration;

use host_core::radix::NamespaceKey;
use host_core::request::Request;
use host_core::{Role, Time};
use host_sim::{Ask, Clients, Erratic, OpenRequest, Random, World};

use super::scene::Scene;

/// Clients of one worker that answers and of a prefill worker, unless the first worker computes prompts itself.
pub struct Talkers {
    scene: Scene,
    answers: usize,
    prefill: Option<usize>,
}

/// A prefill and a decode worker.
pub fn pair(seed: u64, scene: Scene) -> World<Talkers> {
    let kv = scene.kv(seed);
    let talkers = Talkers { scene, answers: 1, prefill: Some(0) };
    let mut world = World::new(seed, kv, scene.faults(), Erratic, talkers);
    let spread = match (scene.pressure, scene.forks) {
        (true, _) => 4,
        (false, true) => 60,
        (false, false) => 20,
    };
    for role in [Role::Prefill, Role::Decode] {
        let pages = Scene::window_pages(&kv) + 17 + world.random.below(spread) as u32;
        let (config, limits) = scene.worker(seed, role, pages);
        world.add(config, limits);
    }
    begin(&mut world);
    world
}

/// One aggregated worker.
pub fn aggregated(seed: u64, scene: Scene) -> World<Talkers> {
    let kv = scene.kv(seed);
    let talkers = Talkers { scene, answers: 0, prefill: None };
    let mut world = World::new(seed, kv, scene.faults(), Erratic, talkers);
    let pages = if scene.offload { 18 + (seed % 4) as u32 } else { 20 };
    let (config, limits) = scene.worker(seed, Role::Aggregated, pages + Scene::window_pages(&kv));
    world.add(config, limits);
    begin(&mut world);
    world
}

fn begin(world: &mut World<Talkers>) {
    let scene = world.clients.scene;
    for _ in 0..if scene.forks { 24 } else { 8 } {
        let most = match (scene.forks, scene.pressure || scene.alike) {
            (true, _) => 12_000,
            (false, true) => 300,
            (false, false) => 3_000,
        };
        let at = world.random.below(most);
        let ask = world.clients.begins(&mut world.random, at);
        world.ask(ask);
    }
}

impl Talkers {
    /// A request that continues no conversation.
    fn begins(&self, random: &mut Random, at_ms: u64) -> Ask {
        let (length, longest) = if self.scene.pressure { (20, 44) } else { (40, 12) };
        let length = 1 + random.place(length);
        let prompt = self.prompt(random, length);
        let count = 1 + random.below(longest) as u32;
        // A third of the requests are another tenant's.
        let salt = if random.chance(0.33) { "tenant" } else { "" };
        let namespace = NamespaceKey { salt: salt.into(), ..NamespaceKey::default() };
        self.asks(random, at_ms, Request { namespace, ..host_sim::request(0, &prompt, count) })
    }

    /// A request that reaches both workers at random times, and that its client may cancel later.
    fn asks(&self, random: &mut Random, at_ms: u64, request: Request) -> Ask {
        let later = |random: &mut Random, most| Duration::from_millis(at_ms + random.below(most));
        // A few clients, and 0 for an unknown one.
        let client = request.prompt.len() as u64 % 4;
        let request = Request { ignore_stop: false, no_cache: random.chance(0.1), client, ..request };
        Ask {
            request,
            leaves: random.chance(self.scene.abort).then(|| later(random, 1_500)),
            prefill: self.prefill.map(|place| (place, later(random, 300))),
            answers: (self.answers, later(random, 300)),
        }
    }

    /// A random prompt. Half of the prompts begin like one of three base prompts. With `forks`, all begin like one of two.
    fn prompt(&self, random: &mut Random, length: usize) -> Vec<u32> {
        if self.scene.alike && random.chance(0.5) {
            return (0..23).map(|token| token % self.scene.vocabulary()).collect();
        }
        let mut own = Random::new(random.word());
        let base = random.below(if self.scene.forks { 2 } else { 6 });
        let shared = if base < 3 { random.place(length + 1) } else { 0 };
        let mut alike = Random::new(base);
        let token = |place: usize| {
            let random = if place < shared { &mut alike } else { &mut own };
            random.below(u64::from(self.scene.vocabulary())) as u32
        };
        (0..length).map(token).collect()
    }
}

impl Clients for Talkers {
    /// Sends the next turn of a conversation, unless the conversation has become too long.
    fn ended(&mut self, _now: Time, open: &OpenRequest, complete: bool, random: &mut Random) -> Vec<Ask> {
        let mut conversation = [&open.request.prompt[..], &open.tokens].concat();
        let said = random.place(7);
        if !complete || !self.scene.talk || conversation.len() + said > 48 || random.below(3) == 0 {
            return Vec::new();
        }
        conversation.extend((0..said).map(|_| random.below(u64::from(self.scene.vocabulary())) as u32));
        let (at, count) = (random.below(500), 1 + random.below(8) as u32);
        let namespace = open.request.namespace.clone();
        let request = Request { namespace, ..host_sim::request(0, &conversation, count) };
        vec![self.asks(random, at, request)]
    }

    /// Sends new requests once a dead worker has been replaced.
    fn died(&mut self, _now: Time, _place: usize, random: &mut Random) -> Vec<Ask> {
        let ask = |_| {
            let at = 200 + random.below(1_000);
            self.begins(random, at)
        };
        (0..3).map(ask).collect()
    }
}
