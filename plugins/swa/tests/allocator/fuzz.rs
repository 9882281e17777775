//! Random calls, against books kept the naive way.

use std::collections::BTreeMap;

use fastrand::Rng;
use host_plugin_api::{ErrorCode, PoolPage};

use super::pool::{Opened, Pool};

/// The component that has each page that is taken.
struct Model {
    opened: Opened,
    owners: BTreeMap<PoolPage, usize>,
}

impl Model {
    fn taken(&self, which: usize) -> u32 {
        u32::try_from(self.owners.values().filter(|of| **of == which).count()).unwrap()
    }

    /// Whether `pages` more pages of a component fit.
    fn fits(&self, which: usize, pages: u32) -> bool {
        let parts = [1, self.opened.pool.parts][which];
        let budget = self.opened.components[which].pages * parts;
        let free = self.opened.pool.pages - u32::try_from(self.owners.len()).unwrap();
        self.taken(which) + pages * parts <= budget && pages * parts <= free
    }

    fn take(&mut self, which: usize, pages: u32, context: &str) {
        let fits = self.fits(which, pages);
        match self.opened.take(which, pages) {
            Ok(taken) => {
                assert!(fits, "{context}: more pages than there are");
                for page in taken {
                    assert!(page.0 < self.opened.pool.pages, "{context}: {page:?} is beyond the pool");
                    let before = self.owners.insert(page, which);
                    assert_eq!(before, None, "{context}: {page:?} has two owners");
                }
            }
            Err(code) => {
                assert_eq!(code, ErrorCode::WOULD_BLOCK, "{context}");
                assert!(!fits, "{context}: {pages} pages fit and were refused");
            }
        }
    }

    fn give(&mut self, which: usize, random: &mut Rng, context: &str) {
        let mine = self.owners.iter().filter(|(_, of)| **of == which).map(|(page, _)| *page);
        // Any of its pool pages, not only whole pages.
        let some: Vec<PoolPage> = mine.filter(|_| random.u8(..3) == 0).collect();
        assert_eq!(self.opened.give(which, &some), Ok(()), "{context}");
        self.owners.retain(|page, _| !some.contains(page));
    }

    /// Gives back pages that are free, named twice, or the other component's, after some that are right.
    fn nonsense(&mut self, which: usize, random: &mut Rng, context: &str) {
        let page = PoolPage(random.u32(..self.opened.pool.pages + 2));
        let mine = self.owners.get(&page) == Some(&which);
        let right = self.owners.iter().filter(|(_, of)| **of == which).map(|(page, _)| *page).take(2);
        let mut wrong: Vec<PoolPage> = right.collect();
        wrong.push(page);
        if mine && wrong[..wrong.len() - 1].iter().all(|other| *other != page) {
            wrong.push(page);
        }
        assert_eq!(self.opened.give(which, &wrong), Err(ErrorCode::INVALID_ARGUMENT), "{context}: {wrong:?}");
    }
}

fn run(pool: Pool, seed: u64) {
    println!("seed {seed}, {pool:?}");
    let mut random = Rng::with_seed(seed);
    let mut model = Model { opened: pool.open(), owners: BTreeMap::new() };
    for call in 0..1000 {
        let context = format!("seed {seed}, call {call}, {pool:?}");
        let which = usize::from(random.bool());
        match random.u8(..8) {
            0..=3 => model.take(which, random.u32(..30), &context),
            4..=6 => model.give(which, &mut random, &context),
            _ => model.nonsense(which, &mut random, &context),
        }
    }
}

#[test]
fn no_page_has_two_owners_and_no_budget_is_exceeded_by_random_calls() {
    let shared = Pool { page_tokens: 16, window: 40, pages: 120, parts: 1, ratio: None };
    for seed in 0..20 {
        for (parts, ratio) in [(1, None), (2, None), (5, None), (1, Some(0.5)), (3, Some(1.0))] {
            run(Pool { parts, ratio, ..shared }, seed);
        }
    }
}
