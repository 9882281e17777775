//! Random sequences come, grow and go, against books kept the naive way.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use host_plugin_api::{Component, ErrorCode, Growth, PoolAllocator, PoolPage};

use super::pool::{Opened, Pool};

const COMPONENTS: [Component; 2] = [Component::FULL, Component::WINDOW];
/// Of every tenth call, one is nonsense.
const NONSENSE: u64 = 10;

/// A sequence with its two lists, as a host has them.
struct Sequence {
    tokens: u32,
    full: Vec<PoolPage>,
    /// Token page of the first window page.
    first: u32,
    windows: Vec<PoolPage>,
}

/// The naive books: the owner of each page of each component.
struct Model {
    opened: Opened,
    /// Component (0 for both where they share) and page, to component and sequence.
    owners: BTreeMap<(usize, PoolPage), (usize, u64)>,
    sequences: BTreeMap<u64, Sequence>,
    /// Pages that were given back at some time, and may have been handed out again since.
    stale: Vec<(usize, PoolPage)>,
}

impl Model {
    fn space(&self, which: usize) -> usize {
        if self.opened.pool.shared.is_some() { 0 } else { which }
    }

    /// Entries that each component has.
    fn used(&self) -> [usize; 2] {
        [0, 1].map(|which| self.owners.values().filter(|(of, _)| *of == which).count())
    }

    /// Pages that each component could take, by the rules.
    fn free(&self) -> [u32; 2] {
        let (pool, used) = (self.opened.pool, self.used());
        let used = used.map(|used| u32::try_from(used).unwrap());
        match pool.shared {
            None => [pool.full - used[0], pool.windows - used[1]],
            Some(parts) => {
                let total = pool.full.max(pool.windows * parts);
                let left = total - used[0] - used[1];
                [left.min(pool.full - used[0]), (left / parts).min((pool.windows * parts - used[1]) / parts)]
            }
        }
    }

    fn fits(&self, full: u32, windows: u32) -> bool {
        let (free, parts) = (self.free(), self.opened.pool.shared);
        let together = parts.is_none_or(|parts| {
            let pool = self.opened.pool;
            let used: usize = self.used().iter().sum();
            let left = pool.full.max(pool.windows * parts) - u32::try_from(used).unwrap();
            full + windows * parts <= left
        });
        full <= free[0] && windows <= free[1] && together
    }

    fn own(&mut self, which: usize, name: u64, pages: &[PoolPage], context: &str) {
        let pool = self.opened.pool;
        let most = match pool.shared {
            Some(parts) => pool.full.max(pool.windows * parts),
            None => [pool.full, pool.windows][which],
        };
        for page in pages {
            assert!(page.0 < most, "{context}: page {} of {most}", page.0);
            let before = self.owners.insert((self.space(which), *page), (which, name));
            assert_eq!(before, None, "{context}: page {} is two sequences'", page.0);
        }
    }

    fn disown(&mut self, which: usize, pages: &[PoolPage], context: &str) {
        self.opened.give(COMPONENTS[which], pages).unwrap_or_else(|code| panic!("{context}: {code:?}"));
        for page in pages {
            assert!(self.owners.remove(&(self.space(which), *page)).is_some(), "{context}");
            self.stale.push((which, *page));
        }
        let many = self.stale.len().saturating_sub(64);
        self.stale.drain(..many);
    }

    /// What a growth lacks, by enumeration of tokens.
    fn lacks(&self, held: u32, target: u32, tail: bool) -> [u32; 2] {
        let Pool { page_tokens, window, .. } = self.opened.pool;
        let new = |first: u32| {
            (held.div_ceil(page_tokens)..target.div_ceil(page_tokens)).filter(|page| *page >= first).count()
        };
        let read = (0..=target).find(|token| token + window > target).unwrap_or(0);
        let first = if tail { read / page_tokens } else { 0 };
        [new(0), new(first)].map(|count| u32::try_from(count).unwrap())
    }

    fn grow(&mut self, name: u64, tokens: u32, tail: bool, context: &str) -> bool {
        let held = self.sequences.get(&name).map_or(0, |sequence| sequence.tokens);
        let target = held + tokens;
        let lacks = self.lacks(held, target, tail);
        let grown = self.opened.grow(Growth { held, target }, tail);
        let fits = self.fits(lacks[0], lacks[1]);
        let Ok((grants, [full, windows])) = grown else {
            assert_eq!(grown.err(), Some(ErrorCode::WOULD_BLOCK.0), "{context}");
            assert!(!fits, "{context}: {lacks:?} pages fit and were refused");
            return false;
        };
        assert!(fits, "{context}: more pages than there are");
        assert_eq!([grants[0].pages, grants[1].pages], lacks, "{context}");
        self.own(0, name, &full, context);
        self.own(1, name, &windows, context);
        let sequence = self.sequences.entry(name).or_insert(Sequence {
            tokens: 0,
            full: Vec::new(),
            first: grants[1].first,
            windows: Vec::new(),
        });
        if sequence.windows.is_empty() {
            sequence.first = grants[1].first;
        }
        sequence.tokens = target;
        sequence.full.extend(full);
        sequence.windows.extend(windows);
        true
    }

    /// Gives back what the window has left behind.
    fn slide(&mut self, name: u64, context: &str) {
        let parts = self.opened.pool.parts()[1];
        let Some(sequence) = self.sequences.get_mut(&name) else { return };
        let live = self.opened.allocator.first_live(Component::WINDOW, sequence.tokens);
        let live = u32::try_from(live).unwrap();
        let dead = (live.saturating_sub(sequence.first) as usize * parts).min(sequence.windows.len());
        let dead: Vec<_> = sequence.windows.drain(..dead).collect();
        sequence.first = sequence.first.max(live);
        self.disown(1, &dead, context);
    }

    fn end(&mut self, name: u64, context: &str) {
        let Some(sequence) = self.sequences.remove(&name) else { return };
        self.disown(0, &sequence.full, context);
        self.disown(1, &sequence.windows, context);
    }

    /// Gives back pages that are free, or that another sequence has.
    fn nonsense(&mut self, random: &mut Rng, context: &str) {
        let before = self.opened.free_pages();
        let which = random.u64(..2) as usize;
        let mine: Vec<PoolPage> =
            self.owners.iter().filter(|(_, (of, _))| *of == which).map(|((_, page), _)| *page).collect();
        let stale = self.stale.iter().filter(|(of, page)| {
            // Recycled for the same component it would be a right one.
            *of == which && self.owners.get(&(self.space(which), *page)).is_none_or(|(of, _)| *of != which)
        });
        let wrong: Vec<PoolPage> = match (random.u64(..3), mine.first()) {
            (0, Some(page)) => vec![*page, *page],
            (1, Some(page)) => vec![*page, PoolPage(u32::MAX)],
            _ => mine.iter().copied().take(3).chain(stale.map(|(_, page)| *page).take(1)).collect(),
        };
        let distinct: BTreeSet<_> = wrong.iter().collect();
        if distinct.len() == wrong.len() && wrong.iter().all(|page| mine.contains(page)) {
            return;
        }
        let refused = self.opened.give(COMPONENTS[which], &wrong);
        assert_eq!(refused, Err(ErrorCode::INVALID_ARGUMENT), "{context}: {wrong:?}");
        assert_eq!(self.opened.free_pages(), before, "{context}: {wrong:?}");
    }
}

fn run(pool: Pool, seed: u64, calls: u64) {
    println!("seed {seed}, {pool:?}");
    let mut random = Rng::with_seed(seed);
    let mut model =
        Model { opened: pool.open(), owners: BTreeMap::new(), sequences: BTreeMap::new(), stale: Vec::new() };
    let (mut refused, mut grown) = (0, 0);
    for call in 0..calls {
        let context = format!("seed {seed}, call {call}");
        let some = model.sequences.keys().copied().nth(random.u64(..8) as usize);
        match (random.u64(..10), some) {
            (0 | 1, _) => {
                // One that arrives: its KV comes from elsewhere, or is computed here.
                let prompt = 1 + u32::try_from(random.u64(..400)).unwrap();
                match model.grow(call, prompt, random.u64(..2) == 0, &context) {
                    true => grown += 1,
                    false => refused += 1,
                }
            }
            (2..=6, Some(name)) => {
                let tokens = if random.u64(..8) == 0 { random.u64(..100) } else { 1 };
                model.grow(name, u32::try_from(tokens).unwrap(), false, &context);
                model.slide(name, &context);
            }
            (7, Some(name)) => model.end(name, &context),
            (8, Some(name)) => model.slide(name, &context),
            _ if random.u64(..NONSENSE) < 5 => model.nonsense(&mut random, &context),
            _ => {}
        }
        assert_eq!(model.opened.free_pages(), model.free(), "{context}");
    }
    assert!(refused > 10 && grown > 10, "seed {seed}: {refused} refused, {grown} grown: nothing was short");
    let names: Vec<u64> = model.sequences.keys().copied().collect();
    for name in names {
        model.end(name, "at the end");
    }
    assert!(model.owners.is_empty());
    assert_eq!(model.opened.free_pages(), model.free());
}

#[test]
fn no_page_is_two_sequences_and_no_budget_is_exceeded_by_random_arrivals() {
    let independent = Pool { page_tokens: 16, window: 40, full: 120, windows: 30, shared: None };
    for seed in 0..20 {
        run(independent, seed, 2000);
        for (parts, windows) in [(1, 120), (2, 20), (5, 30)] {
            run(Pool { shared: Some(parts), windows, ..independent }, seed, 2000);
        }
        run(Pool { page_tokens: 1, full: 900, windows: 200, ..independent }, seed, 500);
    }
}
