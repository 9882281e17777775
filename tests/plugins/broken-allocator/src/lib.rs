//! A fake for tests: the allocator `swa` with one defect that the conformance kit must find.

use std::sync::Mutex;
use std::thread::ThreadId;

use host_plugin_api::{
    Budget, Component, ErrorCode, Grant, Growth, PoolAllocator, PoolOpening, PoolPage, Result,
};
use host_plugin_swa::SwaAllocator;

/// See the crate.
pub struct BrokenAllocator {
    inner: SwaAllocator,
    /// Whether the components share a pool.
    shared: bool,
    defect: String,
    opener: ThreadId,
    /// A page that was handed out, and may be again.
    last: Mutex<Option<PoolPage>>,
}

/// Opens an instance.
///
/// # Errors
/// As the allocator that it is built from.
pub fn open(opening: &PoolOpening) -> Result<BrokenAllocator> {
    let shared = opening.components.iter().any(|of| of.parts().is_some());
    let (inner, defect) = (host_plugin_swa::open(opening)?, host_plugin_mark::defect());
    let opener = std::thread::current().id();
    Ok(BrokenAllocator { inner, shared, defect, opener, last: Mutex::new(None) })
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    allocator: open,
}

impl BrokenAllocator {
    fn is(&self, defect: &str) -> bool {
        self.defect == defect
    }
}

impl PoolAllocator for BrokenAllocator {
    fn budgets(&self, budgets: &mut [Budget]) -> i32 {
        self.inner.budgets(budgets)
    }
    fn alloc(&self, component: Component, pages: &mut [PoolPage]) -> i32 {
        if self.is("fails-other-threads") && std::thread::current().id() != self.opener {
            return ErrorCode::WOULD_BLOCK.0;
        }
        assert!(!(self.is("panics") && component.0 > 1), "index out of bounds: there are two components");
        let code = self.inner.alloc(component, pages);
        if code == 0
            && self.is("hands-out-twice")
            && !self.shared
            && component == Component::FULL
            && pages.len() > 20
        {
            let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            pages[0] = *last.get_or_insert(pages[1]);
        }
        if code == 0 && self.is("hands-out-shared-twice") && self.shared && !pages.is_empty() {
            let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            match component {
                Component::FULL => *last = pages.first().copied(),
                // Even when it is in use.
                _ if pages.len() > 3 => pages[0] = last.unwrap_or(pages[0]),
                _ => {}
            }
        }
        if code == ErrorCode::WOULD_BLOCK.0 && self.is("ignores-limits") && self.shared {
            return self.inner.alloc(Component::FULL, pages);
        }
        code
    }
    fn free(&self, component: Component, pages: &[PoolPage]) -> i32 {
        match self.inner.free(component, pages) {
            refused
                if refused < 0
                    && self.is("accepts-double-free")
                    && !self.shared
                    && !pages.is_empty()
                    && component.0 < 2 =>
            {
                0
            }
            refused if refused < 0 && self.is("frees-for-others") && self.shared && pages.len() > 1 => {
                // Page by page, also those of other sequences.
                let each = pages.iter().map(|page| {
                    let components = [Component::FULL, Component::WINDOW];
                    components.into_iter().map(|of| self.inner.free(of, &[*page])).max().unwrap_or(refused)
                });
                each.min().unwrap_or(refused)
            }
            _ if self.is("loses-pages") && !self.shared && pages.len() > 30 => {
                self.inner.alloc(component, &mut [PoolPage(0)])
            }
            code => code,
        }
    }
    fn need(&self, growths: &[Growth], tail: u32, pages: &mut [u32]) -> i32 {
        let code = self.inner.need(growths, tail, pages);
        if code > 0 && self.is("needs-too-much") && !self.shared {
            pages[0] += 1;
        }
        code
    }
    fn extend(&self, growths: &[Growth], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32 {
        if self.is("allocates-on-extend") {
            drop(std::hint::black_box(growths.to_vec()));
        }
        let code = self.inner.extend(growths, grants, pages);
        if code == ErrorCode::WOULD_BLOCK.0 && self.is("keeps-what-fits") && !self.shared {
            let _first_only = self.inner.extend(&growths[..1], grants, pages);
        }
        if code > 0 && self.is("forgets-parts") && self.shared && growths[0].held > 0 {
            return i32::try_from(grants.iter().take(2).map(|grant| grant.pages).sum::<u32>())
                .unwrap_or(code);
        }
        code
    }
    fn extend_tail(&self, growths: &[Growth], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32 {
        if self.is("tail-is-everything") && !self.shared {
            return self.inner.extend(growths, grants, pages);
        }
        self.inner.extend_tail(growths, grants, pages)
    }
    fn step(&self, held: &[u32], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32 {
        self.inner.step(held, grants, pages)
    }
    fn first_live(&self, component: Component, tokens: u32) -> i32 {
        let place = self.inner.first_live(component, tokens);
        if self.is("frees-too-early") && place > 0 { place + 1 } else { place }
    }
}
