//! Sources of pages: they choose which free pages a request gets.
//!
//! The [pool](super::PagePool) knows where every page is, and how many each component may have. A source only chooses among
//! those that are free. The pool looks at the source's answers: a source that hands out a page that is not free, or does not
//! hand out one that is, is disabled, and the pool falls back to its own list. A faulty source can cost its choice, never a
//! page.

use std::fmt::Debug;

use crate::ids::PageId;

/// Whose KV a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Component {
    /// That of the layers that read every earlier token. These are all layers where none has a window.
    Full,
    /// That of the layers with a sliding window.
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
    /// Most of them that hold KV of [`Component::Full`].
    pub full: u32,
    /// Most of them that hold KV of [`Component::Window`]. What the two may have can exceed the pool: they share it.
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

/// Chooses pages. What it may choose from follows from [`PoolLimits`], which it was made for, and what it was asked before.
///
/// Errors say what it answered, as the end of a sentence that starts with its name.
pub trait PageSource: Debug + Send {
    /// Its name, for messages.
    fn name(&self) -> &str;

    /// Fills `pages` with pages that are free. Asked only for what there is.
    ///
    /// # Errors
    /// When it does not.
    fn take(&mut self, component: Component, pages: &mut [PageId]) -> Result<(), String>;

    /// Takes pages back that were taken for this component.
    ///
    /// # Errors
    /// When it refuses.
    fn give(&mut self, component: Component, pages: &[PageId]) -> Result<(), String>;
}
