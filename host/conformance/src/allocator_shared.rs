//! Cases for pool allocators whose components may share one pool.

use std::collections::BTreeMap;
use std::sync::Arc;

use host_plugin_api::allocator::lacking;
use host_plugin_api::{
    Budget, Component, ErrorCode, Grant, Growth, PoolAllocator, PoolOpening, PoolPage, capability,
};

use super::instance::pools;
use super::random::{SEED, seeded};
use super::{Case, Outcome, Stop, Subject, ensure};

const fn case(name: &'static str, about: &'static str, run: fn(&Subject) -> Outcome) -> Case {
    Case { name, role: Some("allocator"), capability: Some(capability::SHARED_POOL), about, run }
}

pub(super) const CASES: &[Case] = &[
    case("allocator-shared-books", "no pool page is two components' at once, and none is lost", books),
    case("allocator-shared-grants", "a page is granted as all of its parts, and counted as one", grants),
    case("allocator-shared-limits", "each component keeps to its limit, and all of them to the pool", limits),
    case("allocator-shared-free", "a page is given back for the component that has it", free),
];

/// Pool pages, which the full component alone may have.
const POOL: u32 = 96;
/// Parts of a window page.
const PARTS: u32 = 3;
/// Pages that the window component may have, of 32 that the pool could hold.
const WINDOWS: u32 = 24;
const INVALID: i32 = ErrorCode::INVALID_ARGUMENT.0;
const FULL: i32 = ErrorCode::WOULD_BLOCK.0;
const COMPONENTS: [Component; 2] = [Component::FULL, Component::WINDOW];

fn open(subject: &Subject) -> Result<(Arc<dyn PoolAllocator>, PoolOpening), Stop> {
    let mut opening = pools(POOL, WINDOWS);
    opening.components[0] = opening.components[0].sharing(1);
    opening.components[1] = opening.components[1].sharing(PARTS);
    Ok((subject.allocator(&opening)?, opening))
}

/// What both components could take, by the rules: `taken` pool pages of each.
fn expected(taken: [u32; 2]) -> [u32; 2] {
    let free = POOL - taken[0] - taken[1];
    [free, (free / PARTS).min((WINDOWS * PARTS - taken[1]) / PARTS)]
}

fn left(allocator: &Arc<dyn PoolAllocator>) -> Result<[u32; 2], Stop> {
    let mut budgets = [Budget::default(); 2];
    let count = allocator.budgets(&mut budgets);
    ensure!(count == 2, "budgets of two components answered {count}");
    let totals = [budgets[0].total, budgets[1].total];
    ensure!(totals == [POOL, WINDOWS], "the totals are {totals:?}, the opening says {:?}", [POOL, WINDOWS]);
    Ok([budgets[0].free, budgets[1].free])
}

/// A number of pages as a length.
fn entries(pages: u32) -> usize {
    pages as usize
}

fn books(subject: &Subject) -> Outcome {
    let (allocator, _) = open(subject)?;
    let mut random = seeded();
    // The owner of each pool page that is taken.
    let mut owners: BTreeMap<PoolPage, usize> = BTreeMap::new();
    let mut taken = [0u32; 2];
    for round in 0..2000 {
        let which = random.u64(..2) as usize;
        let component = COMPONENTS[which];
        let (free, parts) = (expected(taken), [1, PARTS][which]);
        if random.u64(..2) == 0 {
            let wanted = random.u64(..[30, 10][which]) as u32;
            let mut pages = vec![PoolPage::default(); entries(wanted * parts)];
            let code = allocator.alloc(component, &mut pages);
            let right = if wanted <= free[which] { 0 } else { FULL };
            ensure!(
                code == right,
                "alloc of {wanted} pages of component {} answered {code}, it should be {right} (round {round})",
                component.0
            );
            for page in pages.iter().filter(|_| code == 0) {
                ensure!(page.0 < POOL, "page {} of a pool of {POOL} was handed out", page.0);
                let before = owners.insert(*page, which);
                ensure!(
                    before.is_none(),
                    "pool page {} was handed out twice by round {round} (seed {SEED})",
                    page.0
                );
                taken[which] += 1;
            }
        } else {
            // Any of its pool pages, not only whole pages.
            let mine = owners.iter().filter(|(_, owner)| **owner == which).map(|(page, _)| *page);
            let back: Vec<PoolPage> = mine.filter(|_| random.u64(..3) == 0).collect();
            let code = allocator.free(component, &back);
            ensure!(code == 0, "free of taken pages answered {:?} in round {round}", ErrorCode(code));
            for page in &back {
                owners.remove(page);
                taken[which] -= 1;
            }
        }
        let (found, right) = (left(&allocator)?, expected(taken));
        ensure!(
            found == right,
            "{taken:?} pool pages are taken, and the budgets say {found:?} instead of {right:?} (round {round})"
        );
    }
    Ok(())
}

fn grants(subject: &Subject) -> Outcome {
    let (allocator, opening) = open(subject)?;
    let tails = subject.declares("allocator", capability::TAIL_EXTEND);
    let mut random = seeded();
    for round in 0..300 {
        let held = random.u64(..200) as u32;
        let growth = Growth { held, target: held + random.u64(..200) as u32 };
        let tail = tails && random.u64(..2) == 1;
        let of = |growth| opening.components.iter().map(move |pool| (growth, pool));
        let right: Vec<Grant> = of(growth)
            .filter_map(|(growth, pool)| lacking(growth, pool.window, opening.page_tokens, tail))
            .collect();
        let total = right[0].pages + right[1].pages * PARTS;
        let mut need = [0; 2];
        let code = allocator.need(&[growth], u32::from(tail), &mut need);
        ensure!(
            code == 2 && need == [right[0].pages, right[1].pages],
            "need of {growth:?} says {need:?}, the pages that are lacking are {right:?}"
        );
        let (mut given, mut pages) = ([Grant::default(); 2], [PoolPage::default(); 2 * POOL as usize]);
        let (name, code) = match tail {
            true => ("extend_tail", allocator.extend_tail(&[growth], &mut given, &mut pages)),
            false => ("extend", allocator.extend(&[growth], &mut given, &mut pages)),
        };
        ensure!(
            code == total as i32,
            "{name} of {growth:?} answered {code}: {right:?} are {total} entries (round {round})"
        );
        ensure!(given[..] == right, "{name} of {growth:?} granted {given:?}, not {right:?}");
        let (full, window) = pages[..entries(total)].split_at(entries(right[0].pages));
        for (component, these) in COMPONENTS.into_iter().zip([full, window]) {
            let code = allocator.free(component, these);
            ensure!(
                code == 0,
                "free of granted pages answered {:?}: they are not component {}'s",
                ErrorCode(code),
                component.0
            );
        }
        ensure!(left(&allocator)? == expected([0, 0]), "pages were lost in round {round}");
    }
    Ok(())
}

fn limits(subject: &Subject) -> Outcome {
    let (allocator, _) = open(subject)?;
    let mut windows = [PoolPage::default(); (WINDOWS * PARTS) as usize];
    let mut one = [PoolPage::default(); PARTS as usize];
    let code = allocator.alloc(Component::WINDOW, &mut one[..2]);
    ensure!(code == INVALID, "alloc of two thirds of a page answered {code}, not INVALID_ARGUMENT");
    ensure!(left(&allocator)? == expected([0, 0]), "an alloc that was refused kept pages");
    let code = allocator.alloc(Component::WINDOW, &mut windows);
    ensure!(code == 0, "alloc of all {WINDOWS} pages that windows may have answered {code}");
    let code = allocator.alloc(Component::WINDOW, &mut one);
    ensure!(
        code == FULL,
        "alloc of a page more than windows may have answered {code}, not WOULD_BLOCK; the pool has room"
    );
    // What windows leave is less than the full component may have.
    let mut rest = [PoolPage::default(); (POOL - WINDOWS * PARTS) as usize];
    let code = allocator.alloc(Component::FULL, &mut rest);
    ensure!(code == 0, "alloc of what windows leave of the pool answered {code}");
    let code = allocator.alloc(Component::FULL, &mut one[..1]);
    ensure!(code == FULL, "alloc from a pool that windows have filled answered {code}, not WOULD_BLOCK");
    ensure!(left(&allocator)? == [0, 0], "in a full pool the budgets say {:?}", left(&allocator)?);
    // Three window pages come back: 9 pool pages, of which a token page takes 4.
    let code = allocator.free(Component::WINDOW, &windows[..9]);
    ensure!(code == 0, "free of three window pages answered {:?}", ErrorCode(code));
    let before = left(&allocator)?;
    let (mut given, mut pages) = ([Grant::default(); 2], [PoolPage::default(); 16]);
    let code = allocator.extend(&[Growth { held: 0, target: 48 }], &mut given, &mut pages);
    ensure!(code == FULL, "extend by 12 pool pages of 9 answered {code}, not WOULD_BLOCK");
    ensure!(left(&allocator)? == before, "an extend that did not fit kept pages");
    let code = allocator.extend(&[Growth { held: 0, target: 32 }], &mut given, &mut pages);
    ensure!(code == 8, "extend by 8 pool pages of 9 answered {code}");
    Ok(())
}

fn free(subject: &Subject) -> Outcome {
    let (allocator, _) = open(subject)?;
    let (mut full, mut window) = ([PoolPage::default(); 2], [PoolPage::default(); PARTS as usize]);
    let codes =
        (allocator.alloc(Component::FULL, &mut full), allocator.alloc(Component::WINDOW, &mut window));
    ensure!(codes == (0, 0), "alloc from an empty pool answered {codes:?}");
    let before = left(&allocator)?;
    for (what, component, wrong) in [
        ("a window's page for the full component", Component::FULL, vec![full[0], window[0]]),
        ("a full page for the window component", Component::WINDOW, vec![window[0], window[1], full[1]]),
        ("a page beyond the pool", Component::WINDOW, vec![PoolPage(POOL)]),
    ] {
        let code = allocator.free(component, &wrong);
        ensure!(code == INVALID, "free of {what} answered {code}, not INVALID_ARGUMENT");
        ensure!(left(&allocator)? == before, "free of {what} took pages back");
    }
    // Given back, and handed out again to the other component: the first no longer has it.
    ensure!(allocator.free(Component::WINDOW, &window) == 0, "free of a window page failed");
    let mut all = [PoolPage::default(); POOL as usize - 2];
    ensure!(allocator.alloc(Component::FULL, &mut all) == 0, "alloc of all that is free failed");
    let code = allocator.free(Component::WINDOW, &window);
    ensure!(
        code == INVALID,
        "free of a window's pages that were handed out again answered {code}, not INVALID_ARGUMENT"
    );
    Ok(())
}
