//! The allocator role: which pages of the KV pools a sequence gets.
//!
//! A pool has one or more *components*: the full-attention layers' pages, the sliding-window layers' pages, and so on. The
//! host owns the sequences and their page tables; the allocator owns which pages are free. A sequence is described by two
//! lengths in tokens, before and after.
//!
//! A component has pages of its own, named 0, 1, .. below its count; or it *shares* (since 0.1.4,
//! [`ComponentPool::sharing`]). All that share have one pool of *pool pages*, and a page of each is made of some of them:
//!
//! ```text
//! pool pages      0 1 2 3 4 5 6 7 8 9      named 0, 1, .. below shared_pages() = the largest of pages * parts
//! FULL, 1 part    F F F . . . . . . .      a page is 1 pool page
//! WINDOW, 2 parts . . . . . . W W W W      a page is 2 pool pages, any two; at most `pages` pages at a time
//! ```
//!
//! What one of them does not use the other may have, up to its own [`ComponentPool::pages`]. Wherever pages of such a
//! component are written or given back, a page is [`parts`](ComponentPool::parts) entries, one for each of its pool pages;
//! wherever pages are *counted* ([`Grant`], [`Budget`], [`PoolAllocator::need`]), it is one.
//!
//! Requests are batched and all or nothing: `WOULD_BLOCK` leaves everything as it was. What they hand out goes into
//! memory of the caller: one [`Grant`] per growth and component, in the order growth first, component second (as in
//! [`PoolOpening::components`]), and the granted pages one grant after the other.
//!
//! Threads: every method may be called from any thread, neither blocks nor allocates, and computes only: no files, no
//! network, no threads. All are **hot**.

use abi_stable::StableAbi;

use crate::error::ErrorCode;

/// Which part of the KV cache a page belongs to. An open set.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, StableAbi)]
pub struct Component(pub u32);

impl Component {
    /// Layers that attend to every earlier token.
    pub const FULL: Component = Component(0);
    /// Layers that attend to the last [`ComponentPool::window`] tokens.
    pub const WINDOW: Component = Component(1);
}

/// A page of one component; of one that shares, a pool page.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, StableAbi)]
pub struct PoolPage(pub u32);

/// One component's pool.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, StableAbi)]
pub struct ComponentPool {
    /// Which.
    pub component: Component,
    /// Its pages; of one that shares, the most that it may have at a time.
    pub pages: u32,
    /// Tokens that its layers look back over, the newest included; 0 means all.
    pub window: u32,
    /// Zero, but for what [`sharing`](ComponentPool::sharing) puts there.
    pub reserved: u32,
}

impl ComponentPool {
    /// This component as one that shares its memory with all others that do: a page of it is made of `parts` pool pages.
    /// Called only on allocators that declare [`SHARED_POOL`](crate::capability::SHARED_POOL). Since 0.1.4.
    #[must_use]
    pub const fn sharing(mut self, parts: u32) -> Self {
        self.reserved = parts;
        self
    }

    /// Pool pages that a page is made of; `None` when the component has pages of its own.
    #[must_use]
    pub const fn parts(&self) -> Option<u32> {
        match self.reserved {
            0 => None,
            parts => Some(parts),
        }
    }
}

/// Pool pages of the components that share: as many as the one that may have the most is made of, so that at least one of
/// them may fill the pool. 0 when none shares, `None` when there are more than pages can be named.
#[must_use]
pub fn shared_pages(components: &[ComponentPool]) -> Option<u32> {
    let sharing = components.iter().filter_map(|of| Some(u64::from(of.parts()?) * u64::from(of.pages)));
    u32::try_from(sharing.max().unwrap_or(0)).ok()
}

/// What the host gives an allocator when it opens it.
#[derive(Clone, Debug)]
pub struct PoolOpening {
    /// The worker's name, for messages.
    pub name: String,
    /// The plugin's own table of the configuration, as TOML text; empty when there is none.
    pub config: String,
    /// Tokens in a page, at least 1.
    pub page_tokens: u32,
    /// The components, at most 16, each at most once.
    pub components: Vec<ComponentPool>,
}

/// One sequence that becomes longer, in tokens.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, StableAbi)]
pub struct Growth {
    /// Tokens that have pages now.
    pub held: u32,
    /// Tokens that shall have pages; not below `held`.
    pub target: u32,
}

/// Pages for one growth in one component.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, StableAbi)]
pub struct Grant {
    /// Place in the sequence of the first granted page, counted in pages from the sequence's start.
    pub first: u32,
    /// Pages granted, in sequence order.
    pub pages: u32,
}

/// One component's books.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, StableAbi)]
pub struct Budget {
    /// Which.
    pub component: Component,
    /// Its pages, as in the opening.
    pub total: u32,
    /// Of these, those that could be taken now. What components share counts for each of them.
    pub free: u32,
    /// Zero.
    pub reserved: u32,
}

/// A pool allocator.
pub trait PoolAllocator: Send + Sync + 'static {
    /// Writes one budget per component, in the order of the opening. Returns how many, or `INVALID_ARGUMENT` when they do
    /// not fit.
    fn budgets(&self, budgets: &mut [Budget]) -> i32;

    /// Takes as many pages of one component as `pages` has room for. Returns 0, or `WOULD_BLOCK` when there are fewer,
    /// or `INVALID_ARGUMENT` for an unknown component, or when `pages` ends within a page that is made of several.
    fn alloc(&self, component: Component, pages: &mut [PoolPage]) -> i32;

    /// Gives pages back; of a component that shares, any of its pool pages in any order. Returns 0, or
    /// `INVALID_ARGUMENT` for a page that is free already, named twice, another component's or unknown, and then none
    /// was taken back.
    fn free(&self, component: Component, pages: &[PoolPage]) -> i32;

    /// Pages of each component that [`extend`](PoolAllocator::extend) of all these growths would take, or
    /// [`extend_tail`](PoolAllocator::extend_tail) when `tail` is 1; takes none. Writes one count per component and
    /// returns how many, or `INVALID_ARGUMENT`.
    fn need(&self, growths: &[Growth], tail: u32, pages: &mut [u32]) -> i32;

    /// Takes the pages that the growths lack, in every component for every token. Returns the number of entries of `pages`
    /// written, `WOULD_BLOCK`, or `INVALID_ARGUMENT` when a growth shrinks or `grants` or `pages` has too little room.
    fn extend(&self, growths: &[Growth], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32;

    /// Like [`extend`](PoolAllocator::extend), but a component with a window gets only the pages that a sequence of
    /// `target` tokens still reads: for KV that arrives from elsewhere, and is not computed here.
    fn extend_tail(&self, growths: &[Growth], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32;

    /// One decode step: like [`extend`](PoolAllocator::extend) by one token for sequences that hold this many.
    fn step(&self, held: &[u32], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32;

    /// Place in the sequence of the first page that a sequence of `tokens` tokens still reads when the next token is
    /// computed; the host may free the pages before it. Or `INVALID_ARGUMENT` for an unknown component.
    fn first_live(&self, component: Component, tokens: u32) -> i32;
}

/// Place of the first page that a window still reads; `window` 0 means all.
///
/// The token at place `tokens` reads the `window` newest tokens, itself included: from `tokens + 1 - window` on.
#[must_use]
pub const fn first_live_page(tokens: u32, window: u32, page_tokens: u32) -> u32 {
    if window == 0 || page_tokens == 0 {
        0
    } else {
        tokens.saturating_add(1).saturating_sub(window) / page_tokens
    }
}

/// Pages that one growth lacks in one component: where they start, and how many. `None` when the growth shrinks.
///
/// With `tail`, pages that lie before the window of `target` tokens are left out.
#[must_use]
pub const fn lacking(growth: Growth, window: u32, page_tokens: u32, tail: bool) -> Option<Grant> {
    if growth.target < growth.held || page_tokens == 0 {
        return None;
    }
    let (held, end) = (growth.held.div_ceil(page_tokens), growth.target.div_ceil(page_tokens));
    let live = if tail { first_live_page(growth.target, window, page_tokens) } else { 0 };
    let first = if live > held { live } else { held };
    Some(if first >= end { Grant { first: end, pages: 0 } } else { Grant { first, pages: end - first } })
}

/// What a request that leaves everything as it was answers when pages are lacking.
pub const TOO_FEW_PAGES: i32 = ErrorCode::WOULD_BLOCK.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_holds_every_page_that_the_next_token_reads_and_none_before() {
        for page_tokens in [1, 4, 16] {
            for window in [0, 1, 5, 16, 40] {
                for target in 0..100 {
                    let growth = Growth { held: 0, target };
                    let tail = lacking(growth, window, page_tokens, true).unwrap();
                    let all = lacking(growth, window, page_tokens, false).unwrap();
                    assert_eq!((all.first, all.pages), (0, target.div_ceil(page_tokens)));
                    assert_eq!(tail.first + tail.pages, all.pages, "a tail ends where the sequence does");
                    // By enumeration: what token `target` reads, itself included, as far as there are pages.
                    let read = (0..=target).filter(|t| window == 0 || t + window > target);
                    let first = read.map(|token| token / page_tokens).min().unwrap_or(0);
                    let expected = first.min(all.pages);
                    assert_eq!(tail.first, expected, "page {page_tokens}, window {window}, {target} tokens");
                }
            }
        }
    }

    #[test]
    fn a_shared_pool_is_what_the_component_that_may_have_most_is_made_of() {
        let of = |pages| ComponentPool { pages, ..ComponentPool::default() };
        assert_eq!((of(4).parts(), of(4).sharing(3).parts()), (None, Some(3)));
        assert_eq!(shared_pages(&[of(100)]), Some(0), "pages of its own are not shared");
        assert_eq!(shared_pages(&[of(64).sharing(1), of(8).sharing(5), of(1000)]), Some(64));
        assert_eq!(shared_pages(&[of(64).sharing(1), of(22).sharing(3)]), Some(66));
        assert_eq!(shared_pages(&[of(u32::MAX).sharing(2)]), None);
    }

    #[test]
    fn growth_within_a_page_takes_none_and_shrinking_is_refused() {
        assert_eq!(lacking(Growth { held: 17, target: 32 }, 0, 16, false).unwrap().pages, 0);
        assert_eq!(
            lacking(Growth { held: 32, target: 33 }, 0, 16, false),
            Some(Grant { first: 2, pages: 1 })
        );
        assert_eq!(lacking(Growth { held: 2, target: 1 }, 0, 16, false), None);
    }
}
