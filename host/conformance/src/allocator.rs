//! Cases for pool allocators.

use std::collections::BTreeSet;
use std::sync::Arc;

use host_plugin_api::allocator::{first_live_page, lacking};
use host_plugin_api::{
    Budget, Component, ErrorCode, Grant, Growth, PoolAllocator, PoolOpening, PoolPage, capability,
};

use super::instance::pools;
use super::random::{SEED, seeded};
use super::{Case, Outcome, Stop, Subject, ensure, hot};

const fn case(name: &'static str, about: &'static str, run: fn(&Subject) -> Outcome) -> Case {
    Case { name, role: Some("allocator"), capability: None, about, run }
}

pub(super) const CASES: &[Case] = &[
    case("allocator-books", "no page is handed out twice, and none is lost", books),
    case("allocator-grants", "extend, extend_tail and step grant the pages that are lacking", grants),
    case("allocator-all-or-nothing", "a request that does not fit changes nothing", all_or_nothing),
    case("allocator-free", "pages that are not taken cannot be given back", free),
    case("allocator-threads", "several threads take and give back at once", threads),
    case("allocator-hot-allocations", "no call allocates memory", no_allocations),
    case("allocator-panics", "wrong input is answered with a code, not with a panic", panics),
];

const PAGES: u32 = 256;
const INVALID: i32 = ErrorCode::INVALID_ARGUMENT.0;
const FULL: i32 = ErrorCode::WOULD_BLOCK.0;

/// Free pages of the two components.
fn left(allocator: &Arc<dyn PoolAllocator>) -> Result<[u32; 2], Stop> {
    let mut budgets = [Budget::default(); 2];
    let count = allocator.budgets(&mut budgets);
    ensure!(count == 2, "budgets of two components answered {count}");
    Ok([budgets[0].free, budgets[1].free])
}

fn open(subject: &Subject) -> Result<(Arc<dyn PoolAllocator>, PoolOpening), Stop> {
    let opening = pools(PAGES, PAGES);
    Ok((subject.allocator(&opening)?, opening))
}

fn books(subject: &Subject) -> Outcome {
    let (allocator, _) = open(subject)?;
    let mut random = seeded();
    let mut taken = [Vec::new(), Vec::new()];
    for round in 0..2000 {
        let which = random.u64(..2) as usize;
        let component = [Component::FULL, Component::WINDOW][which];
        let held: &mut Vec<PoolPage> = &mut taken[which];
        if random.u64(..2) == 0 {
            let mut pages = vec![PoolPage::default(); random.u64(..40) as usize];
            let code = allocator.alloc(component, &mut pages);
            let fits = held.len() + pages.len() <= PAGES as usize;
            let expected = if fits { 0 } else { FULL };
            ensure!(code == expected, "alloc answered {code} instead of {expected} in round {round}");
            if fits {
                held.extend(pages);
            }
        } else {
            let keep = random.u64(..held.len() as u64 + 1) as usize;
            let back = held.split_off(keep);
            let code = allocator.free(component, &back);
            ensure!(code == 0, "free of taken pages answered {:?} in round {round}", ErrorCode(code));
        }
        let distinct: BTreeSet<_> = held.iter().copied().collect();
        ensure!(distinct.len() == held.len(), "a page was handed out twice by round {round} (seed {SEED})");
        ensure!(
            held.iter().all(|page| page.0 < PAGES),
            "a page beyond the pool was handed out in round {round}"
        );
        let free = left(&allocator)?[which] as usize;
        ensure!(
            free + held.len() == PAGES as usize,
            "{free} pages free and {} taken are not {PAGES}",
            held.len()
        );
    }
    Ok(())
}

fn grants(subject: &Subject) -> Outcome {
    let (allocator, opening) = open(subject)?;
    let tails = subject.declares("allocator", capability::TAIL_EXTEND);
    let mut random = seeded();
    for round in 0..300 {
        let growths: Vec<Growth> = (0..1 + random.u64(..3))
            .map(|_| {
                let held = random.u64(..200) as u32;
                Growth { held, target: held + random.u64(..300) as u32 }
            })
            .collect();
        let held: Vec<u32> = growths.iter().map(|growth| growth.held).collect();
        let stepped: Vec<Growth> = held.iter().map(|h| Growth { held: *h, target: h + 1 }).collect();
        let mut given = vec![Grant::default(); growths.len() * 2];
        let mut pages = [PoolPage::default(); 2 * PAGES as usize];
        let kind = random.u64(..if tails { 3 } else { 2 });
        let (name, tail, wanted) =
            [("extend", false, &growths), ("step", false, &stepped), ("extend_tail", true, &growths)]
                [kind as usize];
        let expected: Vec<Grant> = wanted
            .iter()
            .flat_map(|growth| opening.components.iter().map(move |pool| (growth, pool)))
            .filter_map(|(growth, pool)| lacking(*growth, pool.window, opening.page_tokens, tail))
            .collect();
        let total: u32 = expected.iter().map(|grant| grant.pages).sum();
        let mut need = [0; 2];
        let code = allocator.need(wanted, u32::from(tail), &mut need);
        ensure!(
            code == 2 && need.iter().sum::<u32>() == total,
            "need of {wanted:?} says {need:?}, {total} are lacking"
        );
        let code = match kind {
            0 => allocator.extend(&growths, &mut given, &mut pages),
            1 => allocator.step(&held, &mut given, &mut pages),
            _ => allocator.extend_tail(&growths, &mut given, &mut pages),
        };
        ensure!(
            code == total as i32,
            "{name} of {wanted:?} answered {code}, {total} pages are lacking (round {round})"
        );
        ensure!(given == expected, "{name} of {wanted:?} granted {given:?}, not {expected:?}");
        // Back to their components, in the order of the grants.
        let mut rest = &pages[..total as usize];
        for (at, grant) in given.iter().enumerate() {
            let (these, others) = rest.split_at(grant.pages as usize);
            rest = others;
            let component = opening.components[at % 2].component;
            let code = allocator.free(component, these);
            ensure!(
                code == 0,
                "free of granted pages answered {:?}: they are not component {}'s",
                ErrorCode(code),
                component.0
            );
        }
        ensure!(left(&allocator)? == [PAGES, PAGES], "pages were lost in round {round}");
    }
    for tokens in [0, 1, 39, 40, 41, 100, 1000] {
        for pool in &opening.components {
            let expected = first_live_page(tokens, pool.window, opening.page_tokens) as i32;
            let found = allocator.first_live(pool.component, tokens);
            ensure!(
                found == expected,
                "first_live of {tokens} tokens in component {} is {found}, not {expected}",
                pool.component.0
            );
        }
    }
    Ok(())
}

fn all_or_nothing(subject: &Subject) -> Outcome {
    let opening = pools(64, 4);
    let allocator = subject.allocator(&opening)?;
    let (mut given, mut pages) = ([Grant::default(); 4], [PoolPage::default(); 256]);
    let growths = [Growth { held: 0, target: 32 }, Growth { held: 0, target: 64 }];
    // The window's component has room for the first growth only.
    let code = allocator.extend(&growths, &mut given, &mut pages);
    ensure!(code == FULL, "extend with too few pages in one component answered {code}, not WOULD_BLOCK");
    ensure!(left(&allocator)? == [64, 4], "an extend that did not fit kept pages");
    let code = allocator.extend(&growths[..1], &mut given[..1], &mut pages);
    ensure!(code == INVALID, "extend without room for its grants answered {code}, not INVALID_ARGUMENT");
    let code = allocator.extend(&growths[..1], &mut given, &mut pages[..1]);
    ensure!(code == INVALID, "extend without room for its pages answered {code}, not INVALID_ARGUMENT");
    ensure!(left(&allocator)? == [64, 4], "an extend that was refused kept pages");
    let mut many = [PoolPage::default(); 5];
    let code = allocator.alloc(Component::WINDOW, &mut many);
    ensure!(code == FULL, "alloc of more pages than there are answered {code}, not WOULD_BLOCK");
    ensure!(left(&allocator)? == [64, 4], "an alloc that did not fit kept pages");
    Ok(())
}

fn free(subject: &Subject) -> Outcome {
    let (allocator, _) = open(subject)?;
    let mut pages = [PoolPage::default(); 3];
    ensure!(allocator.alloc(Component::FULL, &mut pages) == 0, "alloc of 3 pages of {PAGES} failed");
    let [a, b, c] = pages;
    let before = left(&allocator)?;
    for (what, wrong) in [
        ("a page named twice", vec![a, b, a]),
        ("a page beyond the pool", vec![a, PoolPage(PAGES)]),
        (
            "a page that is free",
            vec![a, PoolPage((0..PAGES).find(|p| !pages.contains(&PoolPage(*p))).unwrap_or(0))],
        ),
    ] {
        let code = allocator.free(Component::FULL, &wrong);
        ensure!(code == INVALID, "free of {what} answered {code}, not INVALID_ARGUMENT");
        ensure!(left(&allocator)? == before, "free of {what} took pages back");
    }
    ensure!(allocator.free(Component::FULL, &[c, a, b]) == 0, "free of taken pages in another order failed");
    Ok(())
}

fn threads(subject: &Subject) -> Outcome {
    let (allocator, _) = open(subject)?;
    let failed = std::thread::scope(|scope| {
        let work = |allocator: Arc<dyn PoolAllocator>| {
            move || {
                let mut pages = [PoolPage::default(); 16];
                (0..500).all(|_| {
                    allocator.alloc(Component::FULL, &mut pages) == 0
                        && allocator.free(Component::FULL, &pages) == 0
                })
            }
        };
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(work(Arc::clone(&allocator)))).collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).filter(|fine| !fine).count()
    });
    ensure!(failed == 0, "in {failed} of 4 threads a page could not be taken or given back");
    ensure!(left(&allocator)? == [PAGES, PAGES], "4 threads gave everything back, and pages are lacking");
    Ok(())
}

fn no_allocations(subject: &Subject) -> Outcome {
    let (allocator, _) = open(subject)?;
    let (mut given, mut pages) = ([Grant::default(); 4], [PoolPage::default(); 64]);
    let growths = [Growth { held: 0, target: 100 }, Growth { held: 16, target: 40 }];
    let mut budgets = [Budget::default(); 2];
    let calls = ["extend", "free", "alloc", "free of those", "need", "budgets"];
    hot::allocate_nothing(subject, calls, |_round, call| match call {
        0 => allocator.extend(&growths, &mut given, &mut pages),
        1 => {
            let mut rest = &pages[..];
            let each = given.iter().enumerate().map(|(number, grant)| {
                let (these, others) = rest.split_at(grant.pages as usize);
                rest = others;
                allocator.free([Component::FULL, Component::WINDOW][number % 2], these)
            });
            each.min().unwrap_or(0)
        }
        2 => allocator.alloc(Component::FULL, &mut pages[..8]),
        3 => allocator.free(Component::FULL, &pages[..8]),
        4 => allocator.need(&growths, 1, &mut [0; 2]),
        _ => allocator.budgets(&mut budgets),
    })
}

fn panics(subject: &Subject) -> Outcome {
    let (allocator, _) = open(subject)?;
    let nowhere = Component(99);
    let shrinking = [Growth { held: 5, target: 4 }];
    let endless = [Growth { held: 0, target: u32::MAX }];
    let (mut given, mut pages) = ([Grant::default(); 4], [PoolPage::default(); 4]);
    for (what, answer) in [
        ("budgets without room", allocator.budgets(&mut [])),
        ("alloc of an unknown component", allocator.alloc(nowhere, &mut pages)),
        ("free to an unknown component", allocator.free(nowhere, &[PoolPage(u32::MAX)])),
        ("need of a growth that shrinks", allocator.need(&shrinking, 0, &mut [0; 2])),
        ("extend of a growth that shrinks", allocator.extend(&shrinking, &mut given, &mut pages)),
        ("extend to the end of all numbers", allocator.extend(&endless, &mut given, &mut pages)),
        ("step at the end of all numbers", allocator.step(&[u32::MAX], &mut given, &mut [])),
        ("first_live of an unknown component", allocator.first_live(nowhere, u32::MAX)),
    ] {
        ensure!(answer != ErrorCode::PANICKED.0, "{what} made the plugin panic");
        let step = what.starts_with("step");
        ensure!(answer < 0 || step, "{what} answered {answer}, it should be an error");
    }
    let code = allocator.first_live(Component::WINDOW, u32::MAX);
    ensure!(code >= 0, "first_live at the end of all numbers answered {:?}", ErrorCode(code));
    Ok(())
}
