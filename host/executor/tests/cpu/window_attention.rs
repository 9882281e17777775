//! Models with sliding layers: answers depend on the sequence alone. They depend on the bytes in the window, and on none outside
//! it.

use std::path::Path;

use super::world::{Computes, Kind, Table, World};
use host_core::layout::KvOrder;
use host_core::window::WindowPages;
use host_core::{Dtype, PageId, Sequence};
use host_executor::Sliding;
use host_executor::cpu::{CpuExecutor, CpuOptions};
use host_executor::group::Seat;
use host_executor::synthetic::{Cost, Synthetic, SyntheticShape};
use host_tests::model::{TinyModel, tiny_gemma3};

const WINDOW: usize = 20;
/// Lengths of prompts: shorter than the window, equal, one more, and 60 windows.
const LENGTHS: [usize; 4] = [WINDOW - 3, WINDOW, WINDOW + 1, 60 * WINDOW];
/// Tokens after the prompt, one by one.
const STEPS: usize = 30;

fn tokens(seed: u32, length: usize) -> Vec<u32> {
    (0..length as u32)
        .map(|i| (i + seed * 10_000).wrapping_mul(2_654_435_761) >> 8)
        .map(|t| t % 500)
        .collect()
}

fn gemma3(directory: &Path, threads: usize, seat: Seat) -> CpuExecutor {
    CpuExecutor::load_rank(directory, CpuOptions { threads, ..CpuOptions::default() }, seat).unwrap()
}

fn synthetic(seat: Seat) -> Synthetic {
    let sliding = Some(Sliding { layers: 5, window: WINDOW });
    let shape =
        SyntheticShape { layers: 7, sliding, kv_heads: 2, vocabulary: 1 << 30, ..SyntheticShape::default() };
    Synthetic::for_rank(shape, Cost::default(), seat).unwrap()
}

/// Pages for a prompt that is computed in chunks of this size. The window needs no more pages for a longer prompt.
fn enough<E: Computes>(world: &World<E>, length: usize, chunk: usize, page_tokens: usize) -> usize {
    let live = world.most_live(page_tokens) + chunk.min(length).div_ceil(page_tokens) + 1;
    length.div_ceil(page_tokens) + world.window.parts as usize * live
}

/// Compares all logits of a prompt and of the tokens behind it, with the whole prompt in one chunk, with every other way.
#[test]
fn a_gemma3s_logits_are_the_same_bits_for_all_chunks_pages_layouts_threads_and_ranks() {
    let directory = tempfile::tempdir().unwrap();
    TinyModel { heads: 8, kv_heads: 4, ..TinyModel::gemma3() }.write(directory.path()).unwrap();
    for (length, dtype) in
        LENGTHS.iter().flat_map(|length| [Dtype::F32, Dtype::Bf16].map(|dtype| (*length, dtype)))
    {
        let tokens = tokens(length as u32, length + STEPS);
        let whole = Kind { dtype, ..Kind::PLAIN };
        let mut world = World::new(whole, |seat| gemma3(directory.path(), 2, seat));
        let expected = world.run(&mut Table::default(), &tokens, &[length, 1]);
        assert!(expected.iter().all(|bits| f32::from_bits(*bits).is_finite()), "{length} {dtype}");
        for (ranks, page_tokens, order, threads, chunks) in [
            (1, 5, KvOrder::LayerKvPageTokenHeadDim, 1, &[1][..]),
            (1, 16, KvOrder::PageHeadLayerKvTokenDim, 4, &[7, 1, 30]),
            (1, 64, KvOrder::PageLayerHeadKvTokenDim, 1, &[64]),
            (1, 1, KvOrder::PageHeadLayerKvTokenDim, 1, &[100]),
            (2, 8, KvOrder::PageHeadLayerKvTokenDim, 1, &[WINDOW]),
            (4, 16, KvOrder::LayerKvPageTokenHeadDim, 1, &[33, 2]),
            (8, 8, KvOrder::PageHeadLayerKvTokenDim, 1, &[50]),
        ] {
            let most = chunks.iter().copied().max().unwrap();
            let pages = enough(&world, tokens.len(), most, page_tokens);
            let kind = Kind { ranks, order, dtype, page_tokens, pages };
            let mut other = World::new(kind, |seat| gemma3(directory.path(), threads, seat));
            let found = other.run(&mut Table::default(), &tokens, chunks);
            assert!(found == expected, "{length} tokens, {threads} threads, chunks {chunks:?}, {kind:?}");
        }
    }
}

#[test]
fn synthetic_answers_are_the_same_for_all_chunks_pages_layouts_and_ranks() {
    // The answers of the synthetic executor depend on the page size, as digests of pages do.
    let page_tokens = Kind::PLAIN.page_tokens;
    for length in LENGTHS {
        let tokens = tokens(length as u32, length + STEPS);
        let mut world = World::new(Kind::PLAIN, synthetic);
        let mut table = Table::default();
        let mut answers = world.run(&mut table, &tokens[..length], &[length]);
        answers.extend(world.run(&mut table, &tokens, &[1]));
        assert_eq!(answers.len(), STEPS + 1);
        for (ranks, order, chunk) in [
            (1, KvOrder::LayerKvPageTokenHeadDim, 1),
            (2, KvOrder::PageHeadLayerKvTokenDim, 7),
            (4, KvOrder::PageLayerHeadKvTokenDim, 33),
        ] {
            let pages = enough(&world, tokens.len(), chunk, page_tokens);
            let kind = Kind { ranks, order, pages, ..Kind::PLAIN };
            let mut other = World::new(kind, synthetic);
            let mut table = Table::default();
            let first = other.run(&mut table, &tokens[..length], &[chunk]);
            let rest = other.run(&mut table, &tokens, &[1]);
            assert_eq!(first.last(), answers.first(), "{length} tokens, chunk {chunk}, {kind:?}");
            assert_eq!(rest, answers[1..], "{length} tokens, chunk {chunk}, {kind:?}");
        }
    }
}

/// Checks that decode goes on from the full part and the tail of the window, on other pages and other ranks.
fn goes_on_from_the_tail<E: Computes>(load: impl Fn(Seat) -> E + Copy) {
    for length in LENGTHS {
        let tokens = tokens(length as u32, length + STEPS);
        let mut one = World::new(Kind::PLAIN, load);
        let mut table = Table::default();
        one.run(&mut table, &tokens[..length], &[64]);
        let expected = one.run(&mut table, &tokens, &[1]);
        for (prefill, decode) in [(1, 1), (4, 2), (1, 4), (2, 1)] {
            let mut source = World::new(Kind { ranks: prefill, ..Kind::PLAIN }, load);
            let mut computed = Table::default();
            source.run(&mut computed, &tokens[..length], &[50]);
            let order = KvOrder::LayerKvPageTokenHeadDim;
            let pages = enough(&source, tokens.len(), 1, 8);
            let mut target = World::new(Kind { ranks: decode, order, pages, ..Kind::PLAIN }, load);
            let mut arrived = target.arrive(&source, &computed);
            let tail = target.held() - length.div_ceil(8);
            assert!(tail <= target.window.parts as usize * target.most_live(8), "{tail} pages of the window");
            let found = target.run(&mut arrived, &tokens, &[1]);
            assert!(found == expected, "{length} tokens, ranks {prefill} to {decode}");
        }
    }
}

#[test]
fn a_prompt_whose_window_tail_arrived_is_as_good_as_computed() {
    let directory = tempfile::tempdir().unwrap();
    tiny_gemma3(directory.path(), 3).unwrap();
    goes_on_from_the_tail(|seat| gemma3(directory.path(), 1, seat));
    goes_on_from_the_tail(synthetic);
}

/// Compares pages of a window's parts that were computed in two ways, on pages that had different content before.
fn parts_depend_on_the_tokens_alone<E: Computes>(load: impl Fn(Seat) -> E + Copy) {
    let tokens = tokens(5, 60);
    let made = |ranks: usize, before: u8, chunks: &[usize]| {
        let mut world = World::new(Kind { ranks, pages: 80, ..Kind::PLAIN }, load);
        (0..80 * 8 * 2).for_each(|at| {
            world.change(PageId(at / 16), at as usize % 8, at as usize / 8 % 2, |row| row.fill(before))
        });
        let mut table = Table::default();
        world.run(&mut table, &tokens, chunks);
        (world, table.window)
    };
    let (one, window) = made(1, 0x11, &[60]);
    let (other, others) = made(2, 0x22, &[7, 1]);
    let parts = one.window.parts as usize;
    // Token pages 5 and 6 are whole, and in both windows.
    let at = |window: &WindowPages, part| window.pages[(5 - window.first as usize) * parts + part];
    for part in 0..2 * parts {
        assert!(one.same(at(&window, part), &other, at(&others, part)), "part {part}");
    }
}

#[test]
fn what_goes_by_a_pages_name_is_the_same_whatever_the_page_held_before() {
    let directory = tempfile::tempdir().unwrap();
    tiny_gemma3(directory.path(), 3).unwrap();
    parts_depend_on_the_tokens_alone(|seat| gemma3(directory.path(), 1, seat));
    parts_depend_on_the_tokens_alone(synthetic);
}

/// Changes each position of each window page in turn, and checks the next answer: it differs if a sliding layer sees the
/// position, and is the same otherwise.
fn sees_its_window<E: Computes>(load: impl Fn(Seat) -> E, change: impl Fn(&mut [u8]) + Copy) {
    const PAGE: usize = 8;
    for length in [WINDOW - 3, WINDOW, WINDOW + 1, 3 * WINDOW + 5] {
        let tokens = tokens(7, length + 1);
        let mut world = World::new(Kind { pages: 80, ..Kind::PLAIN }, &load);
        let mut table = Table::default();
        world.run(&mut table, &tokens[..length], &[length]);
        world.turn(&mut table, length, length + 1);
        let next = world.sequence(&table, &tokens[length..]);
        let right = world.compute(vec![next.clone()]);
        let parts = world.window.parts as usize;
        let first = table.window.first as usize;
        let mut seen = 0;
        for position in first * PAGE..length {
            let visible = position + WINDOW > length;
            seen += usize::from(visible);
            // Five sliding layers beside two others: the third part has one layer only.
            for sliding in 0..5 {
                let page = table.window.pages[(position / PAGE - first) * parts + sliding / 2];
                world.change(page, position % PAGE, sliding % 2, change);
                let found = world.compute(vec![next.clone()]);
                assert_eq!(
                    found != right,
                    visible,
                    "position {position} of {length}, sliding layer {sliding}"
                );
                world.change(page, position % PAGE, sliding % 2, change);
            }
        }
        assert_eq!(seen, length.min(WINDOW - 1), "beside the new position itself");
        for position in [0, length / 2, length - 1] {
            world.change(table.pages[position / PAGE], position % PAGE, 1, change);
            assert_ne!(
                world.compute(vec![next.clone()]),
                right,
                "position {position} of {length}, full part"
            );
            world.change(table.pages[position / PAGE], position % PAGE, 1, change);
        }
        assert_eq!(world.compute(vec![next]), right);
    }
}

#[test]
fn an_answer_depends_on_what_the_window_holds_and_on_nothing_that_left_it() {
    let directory = tempfile::tempdir().unwrap();
    tiny_gemma3(directory.path(), 3).unwrap();
    // The sign and the high bits of the exponent of every element.
    let turned = |row: &mut [u8]| row.iter_mut().skip(3).step_by(4).for_each(|byte| *byte ^= 0x83);
    sees_its_window(|seat| gemma3(directory.path(), 1, seat), turned);
    sees_its_window(synthetic, |row: &mut [u8]| row[11] ^= 0x10);
}

#[test]
fn sequences_that_do_not_name_their_window_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    tiny_gemma3(directory.path(), 3).unwrap();
    refuses(World::new(Kind { pages: 80, ..Kind::PLAIN }, |seat| gemma3(directory.path(), 1, seat)));
    refuses(World::new(Kind { pages: 80, ..Kind::PLAIN }, synthetic));
}

fn refuses<E: Computes>(mut world: World<E>) {
    let mut table = Table::default();
    let tokens = tokens(9, 60);
    world.run(&mut table, &tokens[..50], &[50]);
    world.turn(&mut table, 50, 60);
    let good = world.sequence(&table, &tokens[50..]);
    // Positions 50 to 59 see 31 on: token pages 3 to 7.
    assert_eq!((good.window.first, good.window.pages.len()), (3, 5 * 3));
    type Spoil = fn(&mut Sequence);
    let cases: [(Spoil, &str); 6] = [
        (|sequence| sequence.window = Default::default(), "0 window pages, 3 for each token page from 0 on"),
        (|sequence| sequence.window.first = 4, "15 window pages, 3 for each token page from 4 on"),
        (|sequence| sequence.window.pages.truncate(12), "see token pages 3 to 7 in a window of 20 tokens"),
        (|sequence| sequence.window.pages.truncate(14), "14 window pages"),
        (|sequence| sequence.window.pages[4] = PageId(80), "page 80 of a pool of 80"),
        (|sequence| sequence.pages.truncate(7), "7 pages of 8 tokens for 60 positions"),
    ];
    for (spoil, says) in cases {
        let mut bad = good.clone();
        spoil(&mut bad);
        let error = world.refusal(bad);
        assert!(error.contains(says), "{error:?} does not say {says:?}");
    }
    let mut more = good.clone();
    more.window.first = 2;
    more.window.pages.splice(0..0, [0, 1, 2].map(PageId));
    assert_eq!(world.compute(vec![more]), world.compute(vec![good]), "pages before the window are not read");
}
