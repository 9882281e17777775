//! A pool allocator as the pool's source of pages.
//!
//! The pool knows pages by one number each. An allocator whose components share names them as the pool does. One whose
//! components have pages of their own names each component's from 0: the full component's are the pool's first, and behind
//! them lie the windows', each made of its parts:
//!
//! ```text
//! pool       0 1 2 3 4 5 6 7 8 9 10 11
//! FULL       0 1 2 3 4 5
//! WINDOW                 0---- 1------      3 parts
//! ```

use std::fmt;
use std::sync::Arc;

use host_core::PageId;
use host_core::pool::{Component, PageSource, PoolLimits};
use host_core::window::WindowShape;
use host_plugin_api::{
    Budget, Component as PluginComponent, ComponentPool, ErrorCode, PoolAllocator, PoolPage,
};

/// The allocator of the pages of a worker's pool.
#[derive(Debug)]
pub struct Pages {
    /// How many each component may have.
    pub limits: PoolLimits,
    /// An allocator; without one the pool hands them out itself.
    pub source: Option<Box<dyn PageSource>>,
}

/// An allocator that the scheduler's thread calls.
pub struct AllocatorPages {
    /// With its kind, for messages.
    name: String,
    allocator: Arc<dyn PoolAllocator>,
    /// Where the components have pages of their own.
    apart: Option<Apart>,
    /// Pages on their way to or from the allocator.
    buffer: Vec<PoolPage>,
}

/// Names of components that do not share.
#[derive(Debug)]
struct Apart {
    full: u32,
    windows: u32,
    parts: u32,
    /// Of each window page, the parts that came back.
    back: Vec<u32>,
}

impl fmt::Debug for AllocatorPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllocatorPages").field("name", &self.name).field("apart", &self.apart).finish()
    }
}

/// The components of a pool within these limits, for [`host_plugin_api::PoolOpening`].
#[must_use]
pub fn components(limits: &PoolLimits, window: Option<WindowShape>) -> Vec<ComponentPool> {
    let of = |component, pages, window| ComponentPool { component, pages, window, reserved: 0 };
    let full = of(PluginComponent::FULL, limits.full, 0);
    let Some(WindowShape { tokens, parts, .. }) = window else { return vec![full] };
    let windows = of(PluginComponent::WINDOW, limits.window / parts.max(1), tokens);
    match share(limits) {
        true => vec![full.sharing(1), windows.sharing(parts)],
        false => vec![full, windows],
    }
}

/// Whether what the components may have is more than there is.
fn share(limits: &PoolLimits) -> bool {
    u64::from(limits.full) + u64::from(limits.window) > u64::from(limits.total)
}

impl AllocatorPages {
    /// An allocator that was opened with the [`components`] of these limits.
    ///
    /// # Errors
    /// When its budgets are not those of the opening.
    pub fn new(
        plugin: &str,
        allocator: Arc<dyn PoolAllocator>,
        limits: &PoolLimits,
        window: Option<WindowShape>,
    ) -> Result<Self, String> {
        let name = format!("plugin {plugin:?}");
        let components = components(limits, window);
        let mut found = vec![Budget::default(); components.len()];
        let code = allocator.budgets(&mut found);
        let right = |(of, budget): (&ComponentPool, &Budget)| {
            (of.component, of.pages, of.pages) == (budget.component, budget.total, budget.free)
        };
        if usize::try_from(code) != Ok(components.len()) || !components.iter().zip(&found).all(right) {
            return Err(format!(
                "{name} was opened with the components {components:?} and says that it has {found:?} (budgets answered \
                 {code})"
            ));
        }
        let apart = window.filter(|_| !share(limits)).map(|window| {
            let windows = limits.window / window.parts.max(1);
            let back = vec![0; windows as usize];
            Apart { full: limits.full, windows, parts: window.parts, back }
        });
        Ok(Self { name, allocator, apart, buffer: Vec::new() })
    }

    /// Has the allocator fill `count` entries of the buffer.
    fn alloc(&mut self, component: PluginComponent, count: usize) -> Result<(), String> {
        // What it leaves as it was is no page.
        self.buffer.clear();
        self.buffer.resize(count, PoolPage(u32::MAX));
        match self.allocator.alloc(component, &mut self.buffer) {
            0 => Ok(()),
            code => Err(format!(
                "answered {:?} when it was asked for {count} pages of component {} that are free (alloc)",
                ErrorCode(code),
                component.0
            )),
        }
    }

    fn free(&mut self, component: PluginComponent) -> Result<(), String> {
        match self.allocator.free(component, &self.buffer) {
            0 => Ok(()),
            code => Err(format!(
                "answered {:?} when {} pages of component {} were given back that it had handed out (free)",
                ErrorCode(code),
                self.buffer.len(),
                component.0
            )),
        }
    }
}

/// As the plugin API calls it.
fn named(component: Component) -> PluginComponent {
    match component {
        Component::Full => PluginComponent::FULL,
        Component::Window => PluginComponent::WINDOW,
    }
}

impl PageSource for AllocatorPages {
    fn name(&self) -> &str {
        &self.name
    }

    fn take(&mut self, component: Component, pages: &mut [PageId]) -> Result<(), String> {
        let parts = match (&self.apart, component) {
            (Some(apart), Component::Window) => apart.parts,
            _ => 1,
        };
        self.alloc(named(component), pages.len() / parts as usize)?;
        let (first, most) = match (&self.apart, component) {
            // The pool looks at these itself.
            (None, _) => (0, None),
            (Some(apart), Component::Full) => (0, Some(apart.full)),
            (Some(apart), Component::Window) => (apart.full, Some(apart.windows)),
        };
        let beyond = most.and_then(|most| Some((most, self.buffer.iter().find(|page| page.0 >= most)?)));
        if let Some((most, page)) = beyond {
            return Err(format!(
                "handed out page {} of component {}, which has {most}",
                page.0,
                named(component).0
            ));
        }
        let all = self.buffer.iter().flat_map(|page| (0..parts).map(move |part| (page.0, part)));
        for (page, (name, part)) in pages.iter_mut().zip(all) {
            *page = PageId(first + name * parts + part);
        }
        Ok(())
    }

    fn give(&mut self, component: Component, pages: &[PageId]) -> Result<(), String> {
        self.buffer.clear();
        match (&mut self.apart, component) {
            (Some(apart), Component::Window) => {
                for page in pages {
                    let name = page.0.saturating_sub(apart.full) / apart.parts;
                    let Some(back) = apart.back.get_mut(name as usize) else { continue };
                    *back += 1;
                    if *back == apart.parts {
                        *back = 0;
                        self.buffer.push(PoolPage(name));
                    }
                }
            }
            _ => self.buffer.extend(pages.iter().map(|page| PoolPage(page.0))),
        }
        if self.buffer.is_empty() { Ok(()) } else { self.free(named(component)) }
    }
}

#[cfg(test)]
mod tests;
