//! Sources of pages: they choose which free pages a request gets.
//!
//! The [pool](super::PagePool) knows where every page is, and how many each component may have. A source only chooses among
//! the free pages. The pool checks the source's answers: a source that hands out a page that is not free, or fails to hand
//! out a free one, is disabled, and the pool falls back to its own list. A faulty source can lose its choice, never a page.

use std::fmt::Debug;

use crate::ids::PageId;

/// The layers whose KV a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Component {
    /// The layers that read every earlier token. In a model without sliding layers these are all layers.
    Full,
    /// The layers with a sliding window.
    Window,
}

impl Component {
    /// All components.
    pub const ALL: [Component; 2] = [Component::Full, Component::Window];
}

/// How many pages each component may have at a time, in pages of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolLimits {
    /// Pages in the pool.
    pub total: u32,
    /// Most pages that hold KV of [`Component::Full`].
    pub full: u32,
    /// Most pages that hold KV of [`Component::Window`]. Both limits together can exceed the pool, which the components
    /// share.
    pub window: u32,
}

impl PoolLimits {
    /// A pool whose pages are all for any component.
    #[must_use]
    pub fn shared(total: u32) -> Self {
        Self { total, full: total, window: total }
    }

    /// Most pages that a component may have.
    #[must_use]
    pub fn of(&self, component: Component) -> u32 {
        match component {
            Component::Full => self.full,
            Component::Window => self.window,
        }
    }
}

/// Chooses pages. The pages that it may choose from follow from the [`PoolLimits`] that it was made for, and from earlier
/// calls.
///
/// Errors tell the source's fault, as the end of a sentence that starts with its name.
pub trait PageSource: Debug + Send {
    /// The source's name, for messages.
    fn name(&self) -> &str;

    /// Fills `pages` with pages that are free. The pool asks for no more pages than are free.
    ///
    /// # Errors
    /// When the source does not.
    fn take(&mut self, component: Component, pages: &mut [PageId]) -> Result<(), String>;

    /// Takes pages back that were taken for this component.
    ///
    /// # Errors
    /// When the source refuses them.
    fn give(&mut self, component: Component, pages: &[PageId]) -> Result<(), String>;
}
