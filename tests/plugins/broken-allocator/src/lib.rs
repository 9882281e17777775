//! A fake for tests: the plain allocator with one defect that the conformance kit must find.

use std::sync::Mutex;
use std::thread::ThreadId;

use host_plugin_api::{
    Budget, Component, ErrorCode, Grant, Growth, PoolAllocator, PoolOpening, PoolPage, Result,
};
use host_plugin_plain::PlainAllocator;

/// See the crate.
pub struct BrokenAllocator {
    inner: PlainAllocator,
    defect: String,
    opener: ThreadId,
    /// A page that was handed out, and may be again.
    last: Mutex<Option<PoolPage>>,
}

/// Opens an instance.
///
/// # Errors
/// As the plain allocator.
pub fn open(opening: &PoolOpening) -> Result<BrokenAllocator> {
    let (inner, defect) = (host_plugin_plain::open(opening)?, host_plugin_mark::defect());
    Ok(BrokenAllocator { inner, defect, opener: std::thread::current().id(), last: Mutex::new(None) })
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
        if code == 0 && self.is("hands-out-twice") && component == Component::FULL && pages.len() > 20 {
            let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            pages[0] = *last.get_or_insert(pages[1]);
        }
        code
    }
    fn free(&self, component: Component, pages: &[PoolPage]) -> i32 {
        match self.inner.free(component, pages) {
            refused
                if refused < 0 && self.is("accepts-double-free") && !pages.is_empty() && component.0 < 2 =>
            {
                0
            }
            _ if self.is("loses-pages") && pages.len() > 30 => {
                self.inner.alloc(component, &mut [PoolPage(0)])
            }
            code => code,
        }
    }
    fn need(&self, growths: &[Growth], tail: u32, pages: &mut [u32]) -> i32 {
        let code = self.inner.need(growths, tail, pages);
        if code > 0 && self.is("needs-too-much") {
            pages[0] += 1;
        }
        code
    }
    fn extend(&self, growths: &[Growth], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32 {
        if self.is("allocates-on-extend") {
            drop(std::hint::black_box(growths.to_vec()));
        }
        let code = self.inner.extend(growths, grants, pages);
        if code == ErrorCode::WOULD_BLOCK.0 && self.is("keeps-what-fits") {
            let _first_only = self.inner.extend(&growths[..1], grants, pages);
        }
        code
    }
    fn extend_tail(&self, growths: &[Growth], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32 {
        if self.is("tail-is-everything") {
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
