//! A fake for tests: the allocator `swa` with one defect that the conformance kit must find.

use std::sync::{Mutex, PoisonError};
use std::thread::ThreadId;

use host_plugin_api::{
    Component, ComponentId, ErrorCode, PoolAllocator, PoolOpening, PoolPage, Result, Retains,
};
use host_plugin_swa::SwaAllocator;

/// The allocator `swa` with one defect.
pub struct BrokenAllocator {
    inner: SwaAllocator,
    components: Vec<Component>,
    defect: String,
    opener: ThreadId,
    /// A page that was handed out before, and that some defects hand out again.
    last: Mutex<Option<PoolPage>>,
    /// Number of calls of `components`.
    asked: Mutex<u32>,
}

/// Opens an instance.
///
/// # Errors
/// Those of the allocator `swa`.
pub fn open(opening: &PoolOpening) -> Result<BrokenAllocator> {
    let defect = host_plugin_mark::defect();
    let mut opening = opening.clone();
    if defect == "takes-unknown-layers" {
        // No component is declared for the layers of the other groups.
        opening.groups.truncate(1);
    }
    let inner = host_plugin_swa::open(&opening)?;
    let mut components = vec![Component::default(); opening.groups.len()];
    let _count = inner.components(&mut components);
    let opener = std::thread::current().id();
    let (last, asked) = (Mutex::new(None), Mutex::new(0));
    Ok(BrokenAllocator { inner, components, defect, opener, last, asked })
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    allocator: open,
}

impl BrokenAllocator {
    fn is(&self, defect: &str) -> bool {
        self.defect == defect
    }

    /// Whether this is the component of the full layers.
    fn is_full(&self, component: ComponentId) -> bool {
        self.components.iter().any(|of| of.id == component && of.retains == Retains::ALL)
    }

    fn shares(&self) -> bool {
        self.components.len() > 1
    }
}

impl PoolAllocator for BrokenAllocator {
    fn components(&self, components: &mut [Component]) -> i32 {
        let code = self.inner.components(components);
        if code < 0 {
            return if self.is("components-without-room") { self.components.len() as i32 } else { code };
        }
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        *asked += 1;
        let declared = &mut components[..code as usize];
        match self.defect.as_str() {
            "components-count" => return code + 1,
            "components-change" if *asked > 2 => declared[0].pages -= 1,
            "group-twice" => declared.iter_mut().for_each(|of| of.group = 0),
            "name-twice" => declared.iter_mut().for_each(|of| of.id = ComponentId(0)),
            "window-too-short" => declared.iter_mut().for_each(|of| of.tokens /= 2),
            "window-as-all" => declared.iter_mut().for_each(|of| of.retains = Retains::ALL),
            "budget-too-large" => declared[0].pages += 1,
            "budget-of-none" => declared[0].pages = 0,
            "reserved-is-used" => declared[0].reserved[1] = 7,
            _ => {}
        }
        code
    }

    fn alloc(&self, component: ComponentId, pages: &mut [PoolPage]) -> i32 {
        if self.is("fails-other-threads") && std::thread::current().id() != self.opener {
            return ErrorCode::WOULD_BLOCK.0;
        }
        assert!(!(self.is("panics") && component.0 > 1), "index out of bounds: there are two components");
        if self.is("allocates-on-alloc") {
            drop(std::hint::black_box(vec![0_u8; pages.len() + 1]));
        }
        if self.is("takes-parts") && !self.is_full(component) && pages.len() == 2 {
            return 0;
        }
        let code = self.inner.alloc(component, pages);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if code == 0 && self.is("hands-out-twice") && !self.shares() && pages.len() > 20 {
            pages[0] = *last.get_or_insert(pages[1]);
        }
        if code == 0 && self.is("hands-out-shared-twice") && self.shares() && !pages.is_empty() {
            if self.is_full(component) {
                *last = pages.first().copied();
            } else if pages.len() > 3 {
                // The first page of the full layers' last allocation, even when it is in use.
                pages[0] = last.unwrap_or(pages[0]);
            }
        }
        if code == ErrorCode::WOULD_BLOCK.0 && self.is("keeps-what-fits") {
            // Takes the pages that are free, one by one.
            for page in &mut *pages {
                if self.inner.alloc(component, std::slice::from_mut(page)) != 0 {
                    break;
                }
            }
        }
        if code == ErrorCode::WOULD_BLOCK.0 && self.is("invalid-when-full") {
            return ErrorCode::INVALID_ARGUMENT.0;
        }
        code
    }

    fn free(&self, component: ComponentId, pages: &[PoolPage]) -> i32 {
        match self.inner.free(component, pages) {
            refused
                if refused < 0 && self.is("accepts-double-free") && !pages.is_empty() && component.0 < 2 =>
            {
                0
            }
            refused if refused < 0 && self.is("frees-for-others") && self.shares() && pages.len() > 1 => {
                // Frees page by page, also pages of the other component.
                let each = pages.iter().map(|page| {
                    let components = self.components.iter();
                    components.map(|of| self.inner.free(of.id, &[*page])).max().unwrap_or(refused)
                });
                each.min().unwrap_or(refused)
            }
            0 if self.is("loses-pages") && pages.len() > 30 => {
                self.inner.alloc(component, &mut [PoolPage(0)]).min(0)
            }
            code => code,
        }
    }
}
