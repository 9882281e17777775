//! The role, on the books.

use host_plugin_api::allocator::{TOO_FEW_PAGES, first_live_page, lacking};
use host_plugin_api::{
    Budget, Component, Error, ErrorCode, Grant, Growth, PoolAllocator, PoolOpening, PoolPage, Result,
};
use parking_lot::Mutex;

use crate::books::{Books, MAX_COMPONENTS};

const INVALID: i32 = ErrorCode::INVALID_ARGUMENT.0;

/// See the crate.
pub struct SwaAllocator {
    page_tokens: u32,
    /// Held for as long as a call computes; nothing inside waits.
    books: Mutex<Books>,
}

/// Opens an instance.
///
/// # Errors
/// `INVALID_ARGUMENT` for pools that cannot be.
pub fn open(opening: &PoolOpening) -> Result<SwaAllocator> {
    let invalid = |text: String| Error::new(ErrorCode::INVALID_ARGUMENT, text);
    if opening.page_tokens == 0 {
        return Err(invalid("a page must hold at least one token".to_owned()));
    }
    let books = Books::open(&opening.components).map_err(invalid)?;
    Ok(SwaAllocator { page_tokens: opening.page_tokens, books: Mutex::new(books) })
}

impl SwaAllocator {
    /// Pages that all growths lack, by component; `None` when one of them shrinks.
    fn lacking(
        &self,
        books: &Books,
        growths: impl Iterator<Item = Growth>,
        tail: bool,
    ) -> Option<[u64; MAX_COMPONENTS]> {
        let mut all = [0; MAX_COMPONENTS];
        for growth in growths {
            for (account, pages) in all.iter_mut().enumerate().take(books.count()) {
                let window = books.component(account).window;
                *pages += u64::from(lacking(growth, window, self.page_tokens, tail)?.pages);
            }
        }
        Some(all)
    }

    fn grow<I: Iterator<Item = Growth> + Clone>(
        &self,
        growths: I,
        tail: bool,
        grants: &mut [Grant],
        pages: &mut [PoolPage],
    ) -> i32 {
        let mut books = self.books.lock();
        let components = books.count();
        // First counted and compared with everything, then taken: a request that does not fit changes nothing.
        let Some(lack) = self.lacking(&books, growths.clone(), tail) else { return INVALID };
        let entries =
            (0..components).map(|account| lack[account].saturating_mul(u64::from(books.parts(account))));
        let total: u64 = entries.fold(0, u64::saturating_add);
        if grants.len() < growths.clone().count() * components || (pages.len() as u64) < total {
            return INVALID;
        }
        let Ok(answer) = i32::try_from(total) else { return INVALID };
        if !books.fit(&lack[..components]) {
            return TOO_FEW_PAGES;
        }
        let (mut grants, mut pages) = (grants.iter_mut(), pages.iter_mut());
        for growth in growths {
            for account in 0..components {
                let window = books.component(account).window;
                let lack = lacking(growth, window, self.page_tokens, tail);
                let (Some(lack), Some(grant)) = (lack, grants.next()) else { return ErrorCode::INTERNAL.0 };
                *grant = lack;
                for _ in 0..lack.pages * books.parts(account) {
                    let (Some(page), Some(taken)) = (pages.next(), books.take(account)) else {
                        return ErrorCode::INTERNAL.0;
                    };
                    *page = taken;
                }
            }
        }
        answer
    }
}

impl PoolAllocator for SwaAllocator {
    fn budgets(&self, budgets: &mut [Budget]) -> i32 {
        let books = self.books.lock();
        let Some(budgets) = budgets.get_mut(..books.count()) else { return INVALID };
        for (account, budget) in budgets.iter_mut().enumerate() {
            *budget = books.budget(account);
        }
        // At most 16.
        budgets.len() as i32
    }
    fn alloc(&self, component: Component, pages: &mut [PoolPage]) -> i32 {
        let mut books = self.books.lock();
        let Some(account) = books.find(component) else { return INVALID };
        let parts = books.parts(account) as usize;
        if !pages.len().is_multiple_of(parts) {
            return INVALID;
        }
        let mut wanted = [0; MAX_COMPONENTS];
        wanted[account] = (pages.len() / parts) as u64;
        if !books.fit(&wanted) {
            return TOO_FEW_PAGES;
        }
        for page in pages {
            let Some(taken) = books.take(account) else { return ErrorCode::INTERNAL.0 };
            *page = taken;
        }
        0
    }
    fn free(&self, component: Component, pages: &[PoolPage]) -> i32 {
        let mut books = self.books.lock();
        let Some(account) = books.find(component) else { return INVALID };
        if books.give(account, pages) { 0 } else { INVALID }
    }
    fn need(&self, growths: &[Growth], tail: u32, pages: &mut [u32]) -> i32 {
        let books = self.books.lock();
        let Some(pages) = pages.get_mut(..books.count()) else { return INVALID };
        let Some(lack) = self.lacking(&books, growths.iter().copied(), tail == 1) else { return INVALID };
        for (count, lack) in pages.iter_mut().zip(lack) {
            *count = u32::try_from(lack).unwrap_or(u32::MAX);
        }
        // At most 16.
        pages.len() as i32
    }
    fn extend(&self, growths: &[Growth], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32 {
        self.grow(growths.iter().copied(), false, grants, pages)
    }
    fn extend_tail(&self, growths: &[Growth], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32 {
        self.grow(growths.iter().copied(), true, grants, pages)
    }
    fn step(&self, held: &[u32], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32 {
        let by_one = |held: &u32| Growth { held: *held, target: held.saturating_add(1) };
        self.grow(held.iter().map(by_one), false, grants, pages)
    }
    fn first_live(&self, component: Component, tokens: u32) -> i32 {
        let books = self.books.lock();
        let Some(account) = books.find(component) else { return INVALID };
        let first = first_live_page(tokens, books.component(account).window, self.page_tokens);
        i32::try_from(first).unwrap_or(INVALID)
    }
}
