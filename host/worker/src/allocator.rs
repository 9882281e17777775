//! A pool allocator as the pool's source of pages.
//!
//! The allocator declares its components when it is opened ([`AllocatorPages::open`]). The scheduler makes the pool's
//! plan from them. From then on the pool asks the allocator which pages the two components of the plan get. Both use
//! the pool's page numbers.

use std::fmt;
use std::sync::Arc;

use host_core::PageId;
use host_core::pool::{Component, Declared, LayerGroup, PageSource, PoolPlan, Retained, sharing};
use host_plugin_api::allocator::MAX_COMPONENTS;
use host_plugin_api::{self as api, ComponentId, ErrorCode, LayerKind, PoolAllocator, PoolPage, Retains};

/// The allocator of the pages of a worker's pool.
#[derive(Debug)]
pub struct Pages {
    /// The plan: the positions that each component retains, and the pages that it may have.
    pub plan: PoolPlan,
    /// An allocator. Without one the pool hands its pages out itself.
    pub source: Option<Box<dyn PageSource>>,
}

impl Pages {
    /// Pages that the pool hands out itself: all groups of layers share them.
    ///
    /// # Errors
    /// When the model has groups that the scheduler does not serve.
    pub fn own(pages: u32, page_tokens: u32, groups: &[LayerGroup]) -> Result<Self, String> {
        let plan = PoolPlan::new(pages, page_tokens, groups, &sharing(pages, groups))
            .map_err(|why| format!("the host's own pool {why}"))?;
        Ok(Self { plan, source: None })
    }
}

/// An allocator that the scheduler's thread calls.
pub struct AllocatorPages {
    /// Its kind and its name, for messages.
    name: String,
    allocator: Arc<dyn PoolAllocator>,
    /// The ids of its components: for the layers that see all positions, and for the other layers.
    components: [ComponentId; 2],
    /// Pages on their way to or from the allocator.
    buffer: Vec<PoolPage>,
}

impl fmt::Debug for AllocatorPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllocatorPages")
            .field("name", &self.name)
            .field("components", &self.components)
            .finish()
    }
}

/// The groups of a model's layers, for [`api::PoolOpening`].
#[must_use]
pub fn groups(of: &[LayerGroup]) -> Vec<api::LayerGroup> {
    let group = |of: &LayerGroup| {
        let (kind, window) = match of.needs {
            Retained::All => (LayerKind::FULL, 0),
            Retained::Newest(tokens) => (LayerKind::WINDOW, tokens),
            Retained::State => (LayerKind::STATE, 0),
        };
        api::LayerGroup { kind, layers: of.layers, window, parts: of.parts }
    };
    of.iter().map(group).collect()
}

impl AllocatorPages {
    /// An allocator that was opened for a pool of `pages` pages and these groups of layers, and the plan that follows from
    /// what it declares.
    ///
    /// # Errors
    /// When it declares components that are invalid, or that cannot be served.
    pub fn open(
        plugin: &str,
        allocator: Arc<dyn PoolAllocator>,
        pages: u32,
        page_tokens: u32,
        groups: &[LayerGroup],
    ) -> Result<(Self, PoolPlan), String> {
        let name = format!("plugin {plugin:?}");
        let mut found = [api::Component::default(); MAX_COMPONENTS];
        let code = allocator.components(&mut found);
        let found = usize::try_from(code).ok().and_then(|count| found.get(..count));
        let found = found.ok_or_else(|| {
            format!("{name} answered {:?} when it was asked for its components", ErrorCode(code))
        })?;
        let mut declared = vec![None; groups.len()];
        let mut ids = Vec::new();
        for of in found {
            let place = declared.get_mut(of.group as usize).filter(|place| place.is_none());
            let (Some(place), false) = (place, ids.contains(&of.id)) else {
                return Err(format!(
                    "{name} declares {found:?}: each of the {} groups of layers needs one component with a name of its own",
                    groups.len()
                ));
            };
            let retains = retained(of).ok_or_else(|| {
                format!("{name} declares {of:?}, and this host does not know what that retains")
            })?;
            ids.push(of.id);
            *place = Some((of.id, Declared { retains, budget: of.pages }));
        }
        let all: Option<Vec<_>> = declared.into_iter().collect();
        let all =
            all.ok_or_else(|| format!("{name} declares {found:?}, not a component for each of {groups:?}"))?;
        let declared: Vec<Declared> = all.iter().map(|(_, declared)| *declared).collect();
        let plan =
            PoolPlan::new(pages, page_tokens, groups, &declared).map_err(|why| format!("{name} {why}"))?;
        let id =
            |full: bool| groups.iter().zip(&all).find(|(of, _)| of.is_full() == full).map(|(_, (id, _))| *id);
        let full = id(true).unwrap_or_default();
        let components = [full, id(false).unwrap_or(full)];
        Ok((Self { name, allocator, components, buffer: Vec::new() }, plan))
    }
}

/// The positions that a component retains, or `None` if this host does not know its kind.
fn retained(of: &api::Component) -> Option<Retained> {
    match of.retains {
        Retains::ALL => Some(Retained::All),
        Retains::NEWEST => Some(Retained::Newest(of.tokens)),
        Retains::STATE => Some(Retained::State),
        _ => None,
    }
}

impl PageSource for AllocatorPages {
    fn name(&self) -> &str {
        &self.name
    }

    fn take(&mut self, component: Component, pages: &mut [PageId]) -> Result<(), String> {
        // An entry that the allocator leaves unchanged is not a page.
        self.buffer.clear();
        self.buffer.resize(pages.len(), PoolPage(u32::MAX));
        let id = self.components[component as usize];
        match self.allocator.alloc(id, &mut self.buffer) {
            0 => {}
            code => {
                return Err(format!(
                    "answered {:?} when it was asked for {} pages of component {} that are free (alloc)",
                    ErrorCode(code),
                    pages.len(),
                    id.0
                ));
            }
        }
        // The pool checks these numbers itself.
        for (page, taken) in pages.iter_mut().zip(&self.buffer) {
            *page = PageId(taken.0);
        }
        Ok(())
    }

    fn give(&mut self, component: Component, pages: &[PageId]) -> Result<(), String> {
        self.buffer.clear();
        self.buffer.extend(pages.iter().map(|page| PoolPage(page.0)));
        let id = self.components[component as usize];
        match self.allocator.free(id, &self.buffer) {
            0 => Ok(()),
            code => Err(format!(
                "answered {:?} when {} pages of component {} were given back that it had handed out (free)",
                ErrorCode(code),
                pages.len(),
                id.0
            )),
        }
    }
}

#[cfg(test)]
mod tests;
