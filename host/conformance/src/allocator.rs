//! Cases for pool allocators.

use std::collections::BTreeMap;
use std::sync::Arc;

use host_plugin_api::allocator::{MAX_COMPONENTS, sharing};
use host_plugin_api::{
    Component, ComponentId, ErrorCode, LayerGroup, LayerKind, PoolAllocator, PoolOpening, PoolPage, Retains,
    capability,
};

use super::instance::pool;
use super::random::{SEED, seeded};
use super::{Case, Outcome, Stop, Subject, ensure, hot};

const fn case(name: &'static str, about: &'static str, run: fn(&Subject) -> Outcome) -> Case {
    Case { name, role: Some("allocator"), capability: None, about, run }
}

const fn of_kind(
    name: &'static str,
    about: &'static str,
    capability: &'static str,
    run: fn(&Subject) -> Outcome,
) -> Case {
    Case { name, role: Some("allocator"), capability: Some(capability), about, run }
}

pub(super) const CASES: &[Case] = &[
    case(
        "allocator-components",
        "each group of layers has one component that retains what it keeps",
        components,
    ),
    of_kind("allocator-window", "a window retains its newest tokens", capability::WINDOW, windows),
    of_kind("allocator-state", "a state is retained as one", capability::STATE, states),
    case("allocator-unknown-layers", "layers that it does not declare are refused", unknown_layers),
    case("allocator-books", "no page is handed out twice, and none is lost", books),
    case("allocator-limits", "each component keeps to its budget, and all of them to the pool", limits),
    case("allocator-free", "pages that a component does not have cannot be given back", free),
    case("allocator-threads", "several threads take and give back at once", threads),
    case("allocator-hot-allocations", "no call allocates memory", no_allocations),
    case("allocator-panics", "wrong input is answered with a code, not with a panic", panics),
];

/// Pages of the pool.
const PAGES: u32 = 256;
const INVALID: i32 = ErrorCode::INVALID_ARGUMENT.0;
const TOO_FEW: i32 = ErrorCode::WOULD_BLOCK.0;

const FULL: LayerGroup = LayerGroup { kind: LayerKind::FULL, layers: 2, window: 0, parts: 1 };
const WINDOW: LayerGroup = LayerGroup { kind: LayerKind::WINDOW, layers: 6, window: 40, parts: 3 };
const STATE: LayerGroup = LayerGroup { kind: LayerKind::STATE, layers: 4, window: 0, parts: 2 };

/// The groups of layers of each model that the allocator declares to serve.
fn models(subject: &Subject) -> Vec<Vec<LayerGroup>> {
    let declares = |name| subject.declares("allocator", name);
    let mut all = vec![vec![FULL]];
    if declares(capability::WINDOW) {
        all.push(vec![FULL, WINDOW]);
    }
    if declares(capability::STATE) {
        all.push(vec![FULL, STATE]);
    }
    all
}

/// An open allocator, and the components that it declares.
struct Opened {
    allocator: Arc<dyn PoolAllocator>,
    opening: PoolOpening,
    components: Vec<Component>,
}

impl Opened {
    fn new(subject: &Subject, groups: &[LayerGroup]) -> Result<Self, Stop> {
        let opening = pool(PAGES, groups);
        let allocator = subject.allocator(&opening)?;
        let mut room = [Component::default(); MAX_COMPONENTS];
        let code = allocator.components(&mut room);
        ensure!(
            usize::try_from(code) == Ok(groups.len()),
            "components of {} groups of layers answered {code}",
            groups.len()
        );
        let components = room[..groups.len()].to_vec();
        for (place, of) in components.iter().enumerate() {
            ensure!((of.group as usize) < groups.len(), "{of:?} is of none of the {} groups", groups.len());
            let twin = components[..place].iter().find(|other| other.group == of.group || other.id == of.id);
            ensure!(twin.is_none(), "{of:?} has the group or the name of {twin:?}");
        }
        Ok(Self { allocator, opening, components })
    }

    /// Number of pool pages in one page of a component.
    fn parts(&self, which: usize) -> u32 {
        self.opening.groups[self.components[which].group as usize].parts
    }

    /// Pool pages that a component may have at most.
    fn budget(&self, which: usize) -> u32 {
        self.components[which].pages.saturating_mul(self.parts(which))
    }

    fn alloc(&self, which: usize, pages: &mut [PoolPage]) -> i32 {
        self.allocator.alloc(self.components[which].id, pages)
    }

    fn free(&self, which: usize, pages: &[PoolPage]) -> i32 {
        self.allocator.free(self.components[which].id, pages)
    }

    /// Takes whole pages of a component until there are no more, and gives them back. Returns the number of pool pages.
    fn room(&self, which: usize) -> Result<u32, Stop> {
        let mut page = vec![PoolPage::default(); self.parts(which) as usize];
        let mut all = Vec::new();
        loop {
            match self.alloc(which, &mut page) {
                0 => all.extend_from_slice(&page),
                TOO_FEW => break,
                code => return Err(Stop::Fail(format!("alloc of one page answered {:?}", ErrorCode(code)))),
            }
            ensure!(all.len() <= PAGES as usize, "more pages than the pool has were handed out");
        }
        let code = self.free(which, &all);
        ensure!(code == 0, "free of all {} pages answered {:?}", all.len(), ErrorCode(code));
        Ok(all.len() as u32)
    }

    /// Checks that each component can take its whole budget again: no page is lost, and none is still taken.
    fn is_whole(&self, when: &str) -> Outcome {
        for which in 0..self.components.len() {
            let (room, budget) = (self.room(which)?, self.budget(which));
            ensure!(
                room == budget,
                "{when}, component {} can have {room} pool pages of its budget of {budget}",
                self.components[which].id.0
            );
        }
        Ok(())
    }
}

fn components(subject: &Subject) -> Outcome {
    for groups in models(subject) {
        let opened = Opened::new(subject, &groups)?;
        for (which, of) in opened.components.iter().enumerate() {
            let group = groups[of.group as usize];
            let fits = match (group.kind, of.retains) {
                (LayerKind::FULL, Retains::ALL) | (LayerKind::STATE, Retains::STATE) => of.tokens == 0,
                (LayerKind::WINDOW, Retains::NEWEST) => of.tokens >= group.window,
                _ => false,
            };
            ensure!(fits, "{of:?} does not retain what its layers keep, {group:?}");
            ensure!(
                of.pages > 0 && opened.budget(which) <= PAGES,
                "{of:?} has a budget of {} pool pages in a pool of {PAGES}",
                opened.budget(which)
            );
            ensure!(of.reserved == [0; 3], "{of:?} has reserved fields that are not zero");
        }
        let mut again = [Component::default(); MAX_COMPONENTS];
        for _ in 0..3 {
            let code = opened.allocator.components(&mut again);
            ensure!(
                code == groups.len() as i32 && again[..groups.len()] == opened.components,
                "components answered {:?} first and {:?} later",
                opened.components,
                &again[..groups.len()]
            );
        }
        let code = opened.allocator.components(&mut again[..groups.len() - 1]);
        ensure!(code == INVALID, "components without room for all answered {code}, not INVALID_ARGUMENT");
        opened.is_whole("in a new pool")?;
    }
    Ok(())
}

/// The component of a group that is beside the full one.
fn beside(subject: &Subject, group: LayerGroup) -> Result<Component, Stop> {
    let opened = Opened::new(subject, &[FULL, group])?;
    let of = opened.components.iter().find(|of| of.group == 1).copied();
    of.ok_or_else(|| Stop::Fail(format!("{:?} has no component of {group:?}", opened.components)))
}

fn windows(subject: &Subject) -> Outcome {
    for window in [1, 40, 4096] {
        let of = beside(subject, LayerGroup { window, ..WINDOW })?;
        ensure!(
            of.retains == Retains::NEWEST && of.tokens >= window,
            "window is declared, and of layers that see {window} tokens {of:?} is retained"
        );
    }
    Ok(())
}

fn states(subject: &Subject) -> Outcome {
    let of = beside(subject, STATE)?;
    ensure!(of.retains == Retains::STATE, "state is declared, and of layers with a state {of:?} is retained");
    Ok(())
}

fn unknown_layers(subject: &Subject) -> Outcome {
    let unknown = LayerGroup { kind: LayerKind(4711), ..STATE };
    let mut strange = vec![unknown];
    for (group, name) in [(WINDOW, capability::WINDOW), (STATE, capability::STATE)] {
        if !subject.declares("allocator", name) {
            strange.push(group);
        }
    }
    for group in strange {
        let opened = match subject.allocator(&pool(PAGES, &[FULL, group])) {
            Ok(opened) => opened,
            // The allocator may need a configuration for all other groups, too.
            Err(Stop::Skip(why)) => return Err(Stop::Skip(why)),
            Err(_) => continue,
        };
        let mut room = [Component::default(); MAX_COMPONENTS];
        let code = opened.components(&mut room);
        let all = if code == 2 { sharing(&[FULL, group], PAGES) } else { None };
        ensure!(
            all.is_some_and(|_| room[..2].iter().any(|of| of.group == 1)),
            "layers of kind {} were taken, and components answered {code}",
            group.kind.0
        );
    }
    Ok(())
}

fn books(subject: &Subject) -> Outcome {
    for groups in models(subject) {
        let opened = Opened::new(subject, &groups)?;
        let mut random = seeded();
        // The component that owns each taken pool page.
        let mut owners: BTreeMap<PoolPage, usize> = BTreeMap::new();
        let mut taken = vec![0u32; groups.len()];
        for round in 0..2000 {
            let which = random.u64(..groups.len() as u64) as usize;
            let (name, parts) = (opened.components[which].id.0, opened.parts(which));
            if random.u64(..2) == 0 {
                let wanted = random.u64(..40) as u32 * parts;
                let mut pages = vec![PoolPage::default(); wanted as usize];
                let code = opened.alloc(which, &mut pages);
                let fits =
                    taken[which] + wanted <= opened.budget(which) && owners.len() as u32 + wanted <= PAGES;
                let right = if fits { 0 } else { TOO_FEW };
                ensure!(
                    code == right,
                    "alloc of {wanted} pool pages of component {name} answered {code}, it should be {right} (round {round})"
                );
                for page in pages.iter().filter(|_| code == 0) {
                    ensure!(page.0 < PAGES, "page {} of a pool of {PAGES} was handed out", page.0);
                    let before = owners.insert(*page, which);
                    ensure!(
                        before.is_none(),
                        "page {} was handed out twice by round {round} (seed {SEED})",
                        page.0
                    );
                    taken[which] += 1;
                }
            } else {
                // Gives back any of the pool pages, also parts of pages.
                let mine = owners.iter().filter(|(_, owner)| **owner == which).map(|(page, _)| *page);
                let back: Vec<PoolPage> = mine.filter(|_| random.u64(..3) == 0).collect();
                let code = opened.free(which, &back);
                ensure!(code == 0, "free of taken pages answered {:?} in round {round}", ErrorCode(code));
                for page in &back {
                    owners.remove(page);
                    taken[which] -= 1;
                }
            }
        }
        for which in 0..groups.len() {
            let mine = owners.iter().filter(|(_, owner)| **owner == which);
            let rest: Vec<PoolPage> = mine.map(|(page, _)| *page).collect();
            let code = opened.free(which, &rest);
            ensure!(code == 0, "free of all that is left answered {:?}", ErrorCode(code));
        }
        opened.is_whole("when everything was given back")?;
    }
    Ok(())
}

fn limits(subject: &Subject) -> Outcome {
    for groups in models(subject) {
        let opened = Opened::new(subject, &groups)?;
        for which in 0..groups.len() {
            let (parts, budget) = (opened.parts(which), opened.budget(which));
            let name = opened.components[which].id.0;
            if parts > 1 {
                let mut half = vec![PoolPage::default(); parts as usize - 1];
                let code = opened.alloc(which, &mut half);
                ensure!(code == INVALID, "alloc of a part of a page answered {code}, not INVALID_ARGUMENT");
            }
            let mut more = vec![PoolPage::default(); (budget + parts) as usize];
            let code = opened.alloc(which, &mut more);
            ensure!(
                code == TOO_FEW,
                "alloc of a page more than the budget of component {name} answered {code}, not WOULD_BLOCK"
            );
            let mut all = vec![PoolPage::default(); budget as usize];
            let code = opened.alloc(which, &mut all);
            ensure!(code == 0, "alloc of the whole budget of component {name} answered {code}");
            // The rest of the pool limits the room of another component.
            for other in (0..groups.len()).filter(|other| *other != which) {
                let (of, left) = (opened.parts(other), PAGES - budget);
                let fits = (left / of * of).min(opened.budget(other));
                let room = opened.room(other)?;
                ensure!(
                    room == fits,
                    "beside {budget} pages of component {name} in a pool of {PAGES}, component {} got {room} instead of \
                     {fits}",
                    opened.components[other].id.0
                );
            }
            let code = opened.free(which, &all);
            ensure!(code == 0, "free of the whole budget answered {:?}", ErrorCode(code));
        }
        opened.is_whole("after allocs that did not fit")?;
    }
    Ok(())
}

fn free(subject: &Subject) -> Outcome {
    for groups in models(subject) {
        let opened = Opened::new(subject, &groups)?;
        let mut pages = [PoolPage::default(); 3];
        ensure!(opened.alloc(0, &mut pages) == 0, "alloc of 3 pages of {PAGES} failed");
        let [a, b, c] = pages;
        let unused = (0..PAGES).map(PoolPage).find(|page| !pages.contains(page)).unwrap_or(a);
        for (what, wrong) in [
            ("a page named twice", vec![a, b, a]),
            ("a page beyond the pool", vec![a, PoolPage(PAGES)]),
            ("a page that is free", vec![a, unused]),
        ] {
            let code = opened.free(0, &wrong);
            ensure!(code == INVALID, "free of {what} answered {code}, not INVALID_ARGUMENT");
        }
        for other in 1..groups.len() {
            let mut theirs = vec![PoolPage::default(); opened.parts(other) as usize];
            ensure!(opened.alloc(other, &mut theirs) == 0, "alloc of one page beside 3 failed");
            for (what, which, wrong) in [
                ("another component's page", 0, vec![a, theirs[0]]),
                ("the first component's page", other, vec![theirs[0], b]),
            ] {
                let code = opened.free(which, &wrong);
                ensure!(code == INVALID, "free of {what} answered {code}, not INVALID_ARGUMENT");
            }
            // The pages are given back and handed out again to the first component. The other component does not own them any more.
            ensure!(opened.free(other, &theirs) == 0, "free of a page that was taken failed");
            let mut rest = vec![PoolPage::default(); (opened.budget(0) - 3) as usize];
            ensure!(opened.alloc(0, &mut rest) == 0, "alloc of all that is free failed");
            if theirs.iter().all(|page| rest.contains(page)) {
                let code = opened.free(other, &theirs);
                ensure!(
                    code == INVALID,
                    "free of pages that were handed out again answered {code}, not INVALID_ARGUMENT"
                );
            }
            ensure!(opened.free(0, &rest) == 0, "free of all that was taken failed");
        }
        ensure!(opened.free(0, &[c, a, b]) == 0, "free of taken pages in another order failed");
        opened.is_whole("after frees that were refused")?;
    }
    Ok(())
}

fn threads(subject: &Subject) -> Outcome {
    let opened = Opened::new(subject, &[FULL])?;
    let name = opened.components[0].id;
    let failed = std::thread::scope(|scope| {
        let work = |allocator: Arc<dyn PoolAllocator>| {
            move || {
                let mut pages = [PoolPage::default(); 16];
                (0..500).all(|_| allocator.alloc(name, &mut pages) == 0 && allocator.free(name, &pages) == 0)
            }
        };
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(work(Arc::clone(&opened.allocator)))).collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).filter(|fine| !fine).count()
    });
    ensure!(failed == 0, "in {failed} of 4 threads a page could not be taken or given back");
    opened.is_whole("when 4 threads gave everything back")
}

fn no_allocations(subject: &Subject) -> Outcome {
    for groups in models(subject) {
        let opened = Opened::new(subject, &groups)?;
        let last = groups.len() - 1;
        let mut pages = vec![PoolPage::default(); 8 * opened.parts(last) as usize];
        let mut all = [Component::default(); MAX_COMPONENTS];
        let calls = ["alloc", "free", "components", "alloc of too many"];
        let mut too_many = vec![PoolPage::default(); (PAGES + opened.parts(last)) as usize];
        hot::allocate_nothing(subject, calls, |_round, call| match call {
            0 => opened.alloc(last, &mut pages),
            1 => opened.free(last, &pages),
            2 => opened.allocator.components(&mut all).min(0),
            _ => (opened.alloc(last, &mut too_many) == 0).into(),
        })?;
    }
    Ok(())
}

fn panics(subject: &Subject) -> Outcome {
    let opened = Opened::new(subject, &[FULL])?;
    let allocator = &opened.allocator;
    let names = || (99..).map(ComponentId).find(|name| opened.components.iter().all(|of| of.id != *name));
    let nowhere = names().unwrap_or_default();
    let mut pages = [PoolPage::default(); 4];
    for (what, answer) in [
        ("components without room", allocator.components(&mut [])),
        ("alloc of an unknown component", allocator.alloc(nowhere, &mut pages)),
        ("free to an unknown component", allocator.free(nowhere, &[PoolPage(u32::MAX)])),
        ("free of the last of all numbers", opened.free(0, &[PoolPage(u32::MAX)])),
    ] {
        ensure!(answer != ErrorCode::PANICKED.0, "{what} made the plugin panic");
        ensure!(answer < 0, "{what} answered {answer}, it should be an error");
    }
    for (what, answer) in [("alloc", opened.alloc(0, &mut [])), ("free", opened.free(0, &[]))] {
        ensure!(answer == 0, "{what} of no pages answered {answer}, it should be 0");
    }
    Ok(())
}
