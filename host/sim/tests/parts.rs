//! The parts that worlds are made of.

use std::time::Duration;

use host_core::window::WindowPages;
use host_core::{Batch, PageId, Room, Sequence};
use host_sim::{Agenda, Kv, Memory, Random, request};

#[test]
fn random_words_are_those_of_splitmix64() {
    // The values of the reference implementation for seed 1234567.
    let mut random = Random::new(1_234_567);
    let words = [(); 3].map(|()| random.word());
    assert_eq!(words, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
}

#[test]
fn chances_are_as_likely_as_they_say() {
    let mut random = Random::new(3);
    assert!((0..1000).all(|_| !random.chance(0.0) && random.chance(1.0)));
    let often = (0..10_000).filter(|_| random.chance(0.3)).count();
    assert!((2_800..3_200).contains(&often), "{often}");
    assert!((0..1000).all(|_| random.up_to(Duration::from_micros(5)) < Duration::from_micros(5)));
    assert_eq!(random.up_to(Duration::ZERO), Duration::ZERO);
}

#[test]
fn things_happen_in_the_order_of_time_and_then_of_putting_off() {
    let ms = Duration::from_millis;
    let mut agenda = Agenda::default();
    for (wait, what) in [(5, "c"), (3, "a"), (5, "d"), (3, "b"), (9, "gone"), (9, "e")] {
        agenda.after(ms(wait), what);
    }
    assert_eq!(agenda.take_due(), None, "no time has passed");
    assert_eq!(agenda.take_where(|what| *what == "gone"), ["gone"]);
    let mut order = Vec::new();
    while let Some(next) = agenda.next() {
        agenda.go_to(next);
        order.extend(std::iter::from_fn(|| agenda.take_due()).map(|what| (next.0, what)));
    }
    let expected = [(3, "a"), (3, "b"), (5, "c"), (5, "d"), (9, "e")].map(|(at, what)| (ms(at), what));
    assert_eq!(order, expected);
    assert!(agenda.is_empty());
}

#[test]
fn a_damaged_word_anywhere_changes_digest_and_answer() {
    let kv = Kv { page_tokens: 4, layers: 3, vocabulary: 1 << 30, sliding: None, words: true };
    let prompt = [7, 8, 9, 10, 11, 12];
    let pages = [PageId(2), PageId(0)];
    let sequence = Sequence {
        room: Room(1),
        tokens: prompt.to_vec(),
        start: 0,
        pages: pages.to_vec(),
        window: WindowPages::default(),
        recompute: 0..0,
        drafted: 0,
        sample: Some(request(1, &prompt, 1).sampling.into()),
        scored: None,
    };
    let batch = Batch { id: 1, sequences: vec![sequence], layer_group: 0 };
    let computed = || {
        let mut memory = Memory::new(kv, 3);
        memory.compute(&batch, 0..3);
        memory
    };
    let drawn = |memory: &Memory| memory.outputs(&batch)[0].sampled[0].token;
    let intact = computed();
    assert_eq!(vec![drawn(&intact)], kv.answer_to(&prompt, 1));
    for (page, layer) in pages.into_iter().flat_map(|page| (0..3).map(move |layer| (page, layer))) {
        let mut damaged = computed();
        damaged.flip(page, layer, 9);
        assert_ne!(damaged.sum(&pages, 0, 0..3), intact.sum(&pages, 0, 0..3), "{page:?}, layer {layer}");
        assert_ne!(drawn(&damaged), drawn(&intact), "{page:?}, layer {layer}");
    }
}
