//! The declarations of an allocator for a pool, and the plan that follows from them.
//!
//! The layers of a model come in groups. The allocator declares for each group what its component retains of a sequence, and
//! its budget. From that the scheduler computes how many pages a sequence takes, at admission and later ([`WindowShape`]).
//! The allocator answers which pages these are ([`PageSource`](super::PageSource)). No other code knows of groups.
//!
//! The scheduler serves one group that retains every token, and at most one beside it.

use super::PoolLimits;
use crate::window::WindowShape;

/// The part of a sequence that stays in a component's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Retained {
    /// Every token.
    All,
    /// So many of the newest tokens, the last one included.
    Newest(u32),
    /// A state of fixed size, computed from the state before and a token.
    State,
}

/// Layers that need the same part of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerGroup {
    /// The part of a sequence that the layers need.
    pub needs: Retained,
    /// Number of layers.
    pub layers: u32,
    /// Pages of the pool, at least 1, that these layers take for one page of tokens, or for one state.
    pub parts: u32,
}

impl LayerGroup {
    /// Whether the group keeps every token, in one page of the pool for each page of tokens.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.needs == Retained::All && self.parts == 1
    }
}

/// The allocator's declaration for one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Declared {
    /// The part of a sequence that the group's component retains.
    pub retains: Retained,
    /// Most pages of its own that the component has at a time, each made of [`LayerGroup::parts`] pages of the pool.
    pub budget: u32,
}

/// How a pool is divided, and the component beside the full layers, if there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolPlan {
    /// Most pages of each component.
    pub limits: PoolLimits,
    /// The component beside the full one.
    pub window: Option<WindowShape>,
}

/// Declares that all groups share the pool: each may fill it, in whole pages of its own.
#[must_use]
pub fn sharing(pages: u32, groups: &[LayerGroup]) -> Vec<Declared> {
    let declared = |of: &LayerGroup| Declared { retains: of.needs, budget: pages / of.parts.max(1) };
    groups.iter().map(declared).collect()
}

impl PoolPlan {
    /// A pool of so many pages for layers that keep every token.
    #[must_use]
    pub fn full(pages: u32) -> Self {
        Self { limits: PoolLimits::shared(pages), window: None }
    }

    /// The plan of a pool of `pages` pages, from the declarations for the groups, in their order.
    ///
    /// # Errors
    /// As the end of a sentence that begins with the allocator's name: what it declares and why that cannot be served.
    pub fn new(
        pages: u32,
        page_tokens: u32,
        groups: &[LayerGroup],
        declared: &[Declared],
    ) -> Result<Self, String> {
        if groups.len() != declared.len() {
            return Err(format!(
                "declares {} components for {} groups of layers",
                declared.len(),
                groups.len()
            ));
        }
        let each = || groups.iter().zip(declared);
        for (place, (of, declared)) in each().enumerate() {
            let retained = match (of.needs, declared.retains) {
                (Retained::Newest(needed), Retained::Newest(kept)) => kept >= needed,
                (needed, kept) => needed == kept,
            };
            if !retained {
                return Err(format!(
                    "declares that it retains {} of group {place}, whose layers need {}",
                    declared.retains, of.needs
                ));
            }
            let most = u64::from(declared.budget) * u64::from(of.parts);
            if declared.budget == 0 || most > u64::from(pages) {
                return Err(format!(
                    "declares a budget of {} pages of {} pool pages each for group {place}, in a pool of {pages}",
                    declared.budget, of.parts
                ));
            }
        }
        let mut full = each().filter(|(of, _)| of.is_full());
        let mut beside = each().filter(|(of, _)| !of.is_full());
        let (Some((_, full)), None, beside, None) = (full.next(), full.next(), beside.next(), beside.next())
        else {
            return Err(format!(
                "cannot serve {} groups of layers: the scheduler serves one group that keeps every token in one pool page \
                 for each page of tokens, and at most one group beside it",
                groups.len()
            ));
        };
        let Some((of, declared)) = beside else {
            return Ok(Self {
                limits: PoolLimits { total: pages, full: full.budget, window: 0 },
                window: None,
            });
        };
        let window = match declared.retains {
            Retained::State => WindowShape::state(of.parts),
            Retained::Newest(tokens) => WindowShape { tokens, parts: of.parts, layers: of.layers },
            Retained::All => {
                return Err("declares nothing that is ever given back beside the full layers".to_owned());
            }
        };
        let least = window.most_kept(1, page_tokens as usize);
        if (declared.budget as usize) < least {
            return Err(format!(
                "declares a budget of {} pages for layers of which one sequence keeps {least}: {}",
                declared.budget, declared.retains
            ));
        }
        let limits = PoolLimits { total: pages, full: full.budget, window: declared.budget * of.parts };
        Ok(Self { limits, window: Some(window) })
    }

    /// Tokens of the longest sequence that the pool can hold.
    #[must_use]
    pub fn most_positions(&self, page_tokens: u32) -> u64 {
        let full = u64::from(self.limits.full) * u64::from(page_tokens);
        self.window.map_or(full, |window| {
            full.min(window.most_positions(self.limits.total as usize, page_tokens as usize) as u64)
        })
    }
}

impl std::fmt::Display for Retained {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Retained::All => f.write_str("every token"),
            Retained::Newest(tokens) => write!(f, "the newest {tokens} tokens"),
            Retained::State => f.write_str("a state"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: LayerGroup = LayerGroup { needs: Retained::All, layers: 2, parts: 1 };
    const WINDOW: LayerGroup = LayerGroup { needs: Retained::Newest(40), layers: 5, parts: 3 };
    const STATE: LayerGroup = LayerGroup { needs: Retained::State, layers: 3, parts: 2 };

    fn plan(groups: &[LayerGroup], declared: &[Declared]) -> Result<PoolPlan, String> {
        PoolPlan::new(100, 16, groups, declared)
    }

    #[test]
    fn what_shares_the_pool_may_fill_it_in_whole_pages() {
        let of = |groups: &[LayerGroup]| plan(groups, &sharing(100, groups)).unwrap();
        assert_eq!(of(&[FULL]).limits, PoolLimits { total: 100, full: 100, window: 0 });
        let found = of(&[FULL, WINDOW]);
        assert_eq!(found.limits, PoolLimits { total: 100, full: 100, window: 99 });
        assert_eq!(found.window, Some(WindowShape { tokens: 40, parts: 3, layers: 5 }));
        let found = of(&[STATE, FULL]);
        assert_eq!((found.limits.window, found.window), (100, Some(WindowShape::state(2))));
    }

    #[test]
    fn budgets_and_longer_windows_are_the_allocators_to_choose() {
        let declared = [
            Declared { retains: Retained::All, budget: 70 },
            Declared { retains: Retained::Newest(64), budget: 10 },
        ];
        let found = plan(&[FULL, WINDOW], &declared).unwrap();
        assert_eq!(found.limits, PoolLimits { total: 100, full: 70, window: 30 });
        assert_eq!(found.window.unwrap().tokens, 64);
    }

    #[test]
    fn what_cannot_be_served_is_refused_with_the_reason() {
        let of = |retains, budget| Declared { retains, budget };
        let full = of(Retained::All, 100);
        for (groups, declared, says) in [
            (vec![FULL], vec![], "declares 0 components for 1 groups of layers"),
            (
                vec![FULL],
                vec![of(Retained::State, 1)],
                "retains a state of group 0, whose layers need every token",
            ),
            (
                vec![FULL, WINDOW],
                vec![full, of(Retained::Newest(39), 9)],
                "retains the newest 39 tokens of group 1, whose layers need the newest 40 tokens",
            ),
            (
                vec![FULL],
                vec![of(Retained::All, 101)],
                "a budget of 101 pages of 1 pool pages each for group 0",
            ),
            (vec![FULL], vec![of(Retained::All, 0)], "a budget of 0 pages"),
            (vec![FULL, WINDOW], vec![full, of(Retained::Newest(40), 34)], "34 pages of 3 pool pages each"),
            (vec![FULL, FULL], vec![full, full], "one group that keeps every token"),
            (vec![WINDOW], vec![of(Retained::Newest(40), 9)], "one group that keeps every token"),
            (
                vec![FULL, WINDOW, STATE],
                vec![full, of(Retained::Newest(40), 9), of(Retained::State, 9)],
                "at most one group beside it",
            ),
            (
                vec![FULL, WINDOW],
                vec![full, of(Retained::Newest(40), 3)],
                "a budget of 3 pages for layers of which one sequence keeps 4: the newest 40 tokens",
            ),
            (vec![FULL, STATE], vec![full, of(Retained::State, 1)], "one sequence keeps 2: a state"),
        ] {
            let said = plan(&groups, &declared).unwrap_err();
            assert!(said.contains(says), "{said}");
        }
    }
}
