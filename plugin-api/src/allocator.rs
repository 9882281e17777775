//! The allocator role: declares the components of a model's KV in the pool, and chooses the pages that each of them gets.
//!
//! A worker has one pool of *pool pages*, named 0, 1, .. below [`PoolOpening::pages`]. The layers of its model come in
//! groups ([`LayerGroup`]): those that attend to every token, those with a window, those with a state. The allocator
//! declares *components* ([`Component`]), one for each group. A component says what it retains of a sequence and how much
//! of the pool it may have. From this data alone the host computes *how many* pages a sequence takes: at admission, with
//! each token, when KV is handed over, and when a sequence gives pages up. The allocator decides *which* pages.
//!
//! ```text
//! pool pages      0 1 2 3 4 5 6 7 8 9
//! FULL, 1 part    F F F . . . . . . .      a page of the component is 1 pool page
//! WINDOW, 2 parts . . . . . . W W W W      a page of the component is 2 pool pages, any two
//! ```
//!
//! What a component retains of a sequence, in pages of [`PoolOpening::page_tokens`] tokens:
//!
//! | [`Retains`] | Pages |
//! | --- | --- |
//! | [`ALL`](Retains::ALL) | one for each page of tokens, as long as the sequence lives |
//! | [`NEWEST`](Retains::NEWEST) | those that the newest [`Component::tokens`] tokens lie in |
//! | [`STATE`](Retains::STATE) | the state after the newest token, and the state after the last whole page of tokens |
//!
//! Threads: every method may be called from any thread. All methods are **hot**: they neither block nor allocate. They
//! compute only, and use no files, no network and no threads of their own.

use abi_stable::StableAbi;

use crate::error::ErrorCode;

/// Most groups of layers, and so most components.
pub const MAX_COMPONENTS: usize = 16;

/// What a group of layers keeps of a sequence. An open set.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, StableAbi)]
pub struct LayerKind(pub u32);

impl LayerKind {
    /// The layers attend to every earlier token.
    pub const FULL: LayerKind = LayerKind(0);
    /// The layers attend to the newest [`LayerGroup::window`] tokens.
    pub const WINDOW: LayerKind = LayerKind(1);
    /// The layers keep a state of fixed size, computed from the previous state and a token, as recurrent layers do.
    pub const STATE: LayerKind = LayerKind(2);
}

/// A group of layers of a model that keep the same of a sequence: all tokens, a window, or a state.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, StableAbi)]
pub struct LayerGroup {
    /// What the layers keep.
    pub kind: LayerKind,
    /// How many layers.
    pub layers: u32,
    /// For [`LayerKind::WINDOW`]: tokens that a layer attends to, the newest included. Else 0.
    pub window: u32,
    /// Pool pages that hold what the group keeps of one page of tokens, or one state for [`LayerKind::STATE`]. At least 1.
    pub parts: u32,
}

/// Names a component of one allocator.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, StableAbi)]
pub struct ComponentId(pub u32);

/// What a component retains of a sequence. An open set.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, StableAbi)]
pub struct Retains(pub u32);

impl Retains {
    /// Every token, as long as the sequence lives.
    pub const ALL: Retains = Retains(0);
    /// The newest [`Component::tokens`] tokens.
    pub const NEWEST: Retains = Retains(1);
    /// A state of fixed size for each sequence.
    pub const STATE: Retains = Retains(2);
}

/// What an allocator declares for one group of layers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, StableAbi)]
pub struct Component {
    /// Its name in [`alloc`](PoolAllocator::alloc) and [`free`](PoolAllocator::free).
    pub id: ComponentId,
    /// Index of its group in [`PoolOpening::groups`]. Each group has one component.
    pub group: u32,
    /// What it retains of a sequence.
    pub retains: Retains,
    /// For [`Retains::NEWEST`]: how many tokens it retains, at least the group's window. Else 0.
    pub tokens: u32,
    /// Its budget: the most pages that it has at a time. Each page takes [`parts`](LayerGroup::parts) pool pages.
    /// Budgets may add up to more than the pool. Components may use what another component leaves free.
    pub pages: u32,
    /// Zero.
    pub reserved: [u32; 3],
}

/// A page of the pool.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, StableAbi)]
pub struct PoolPage(pub u32);

/// What the host gives an allocator when it opens it.
#[derive(Clone, Debug)]
pub struct PoolOpening {
    /// The worker's name, for messages.
    pub name: String,
    /// The plugin's own table of the configuration, as TOML text. Empty when there is none.
    pub config: String,
    /// Tokens in a page, at least 1.
    pub page_tokens: u32,
    /// Pages of the pool.
    pub pages: u32,
    /// The model's layers, 1 to [`MAX_COMPONENTS`] groups.
    pub groups: Vec<LayerGroup>,
}

/// A pool allocator.
pub trait PoolAllocator: Send + Sync + 'static {
    /// Writes the components, one for each group of the opening. Returns how many, or `INVALID_ARGUMENT` when the slice
    /// is too short. An instance always writes the same components.
    fn components(&self, components: &mut [Component]) -> i32;

    /// Takes pool pages for one component, as many as `pages` has entries. Returns 0 or a code: `WOULD_BLOCK` when the
    /// pool has fewer free pages or the component would exceed its budget, `INVALID_ARGUMENT` for an unknown component
    /// or a number of pool pages that is no multiple of the group's parts. With a code, no page was taken.
    fn alloc(&self, component: ComponentId, pages: &mut [PoolPage]) -> i32;

    /// Gives back pool pages of one component: any of its pages, in any order. Returns 0, or `INVALID_ARGUMENT` for a
    /// page that is free already, named twice, of another component, or unknown. With a code, no page was taken back.
    fn free(&self, component: ComponentId, pages: &[PoolPage]) -> i32;
}

/// Answer of a request that finds too few pages. The request has then changed nothing.
pub const TOO_FEW_PAGES: i32 = ErrorCode::WOULD_BLOCK.0;

/// Declares components that share the whole pool: the budget of each is the whole pool, in whole pages of the component.
///
/// The id of a component is the index of its group. The component retains what the layers of the group keep. Returns
/// `None` when this version of the API does not know the kind of a group.
#[must_use]
pub fn sharing(groups: &[LayerGroup], pages: u32) -> Option<Vec<Component>> {
    let component = |(place, group): (usize, &LayerGroup)| {
        let (retains, tokens) = match group.kind {
            LayerKind::FULL => (Retains::ALL, 0),
            LayerKind::WINDOW => (Retains::NEWEST, group.window),
            LayerKind::STATE => (Retains::STATE, 0),
            _ => return None,
        };
        let place = u32::try_from(place).ok()?;
        let pages = pages / group.parts.max(1);
        Some(Component { id: ComponentId(place), group: place, retains, tokens, pages, reserved: [0; 3] })
    };
    groups.iter().enumerate().map(component).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_that_share_retain_what_their_layers_keep_and_may_fill_the_pool() {
        let full = LayerGroup { kind: LayerKind::FULL, layers: 2, window: 0, parts: 1 };
        let window = LayerGroup { kind: LayerKind::WINDOW, layers: 5, window: 40, parts: 3 };
        let state = LayerGroup { kind: LayerKind::STATE, layers: 1, window: 0, parts: 2 };
        let of = sharing(&[full, window, state], 100).unwrap();
        let found: Vec<_> = of.iter().map(|of| (of.id.0, of.retains, of.tokens, of.pages)).collect();
        let expected = [(0, Retains::ALL, 0, 100), (1, Retains::NEWEST, 40, 33), (2, Retains::STATE, 0, 50)];
        assert_eq!(found, expected);
        assert_eq!(sharing(&[full, LayerGroup { kind: LayerKind(9), ..state }], 100), None);
    }
}
