//! Which pages are free, which component owns each of the others, and how many each has.

use host_plugin_api::allocator::shared_pages;
use host_plugin_api::{Budget, Component, ComponentPool, PoolPage};

use crate::free_set::FreeSet;

/// Most components of a pool.
pub const MAX_COMPONENTS: usize = 16;

/// Owner of a page that is free.
const UNOWNED: u8 = u8::MAX;
/// The pool of the components that share; empty when none does.
const SHARED: usize = 0;

/// Pages by their names.
struct Pool {
    free: FreeSet,
    /// The account of each page, or [`UNOWNED`].
    owner: Vec<u8>,
}

impl Pool {
    fn new(pages: u32) -> Self {
        Self { free: FreeSet::full(pages), owner: vec![UNOWNED; pages as usize] }
    }
}

/// One component.
struct Account {
    of: ComponentPool,
    /// Pool pages that a page is made of.
    parts: u32,
    /// Where its pages are.
    pool: usize,
    /// Pool pages that it has.
    used: u64,
}

impl Account {
    /// Pool pages that it may still have, by its own limit.
    fn allowance(&self) -> u64 {
        u64::from(self.of.pages) * u64::from(self.parts) - self.used
    }
}

/// The books of all components.
pub struct Books {
    accounts: Vec<Account>,
    pools: Vec<Pool>,
}

impl Books {
    /// Everything free.
    ///
    /// # Errors
    /// For components that cannot be.
    pub fn open(components: &[ComponentPool]) -> Result<Self, String> {
        let count = components.len();
        if count == 0 || count > MAX_COMPONENTS {
            return Err(format!("{count} components, 1 to {MAX_COMPONENTS} are allowed"));
        }
        let shared = shared_pages(components);
        let shared = shared.ok_or("the components that share have more pages than can be named")?;
        let mut books = Self { accounts: Vec::with_capacity(count), pools: vec![Pool::new(shared)] };
        for of in components {
            if books.find(of.component).is_some() {
                return Err(format!("component {} is there twice", of.component.0));
            }
            let (parts, pool) = match of.parts() {
                Some(parts) => (parts, SHARED),
                None => {
                    books.pools.push(Pool::new(of.pages));
                    (1, books.pools.len() - 1)
                }
            };
            books.accounts.push(Account { of: *of, parts, pool, used: 0 });
        }
        Ok(books)
    }

    /// How many components there are.
    pub fn count(&self) -> usize {
        self.accounts.len()
    }

    /// The place of a component among the others.
    pub fn find(&self, component: Component) -> Option<usize> {
        self.accounts.iter().position(|account| account.of.component == component)
    }

    /// What the opening said of a component.
    pub fn component(&self, account: usize) -> &ComponentPool {
        &self.accounts[account].of
    }

    /// Pool pages that a page of the component is made of.
    pub fn parts(&self, account: usize) -> u32 {
        self.accounts[account].parts
    }

    /// What a component could take now.
    pub fn budget(&self, account: usize) -> Budget {
        let account = &self.accounts[account];
        let free = account.allowance().min(u64::from(self.pools[account.pool].free.len()));
        let free = u32::try_from(free / u64::from(account.parts)).unwrap_or(u32::MAX);
        Budget { component: account.of.component, total: account.of.pages, free, reserved: 0 }
    }

    /// Whether so many pages of each component, in their order, can be taken together.
    pub fn fit(&self, pages: &[u64]) -> bool {
        let wanted = |account: &Account, pages: &u64| pages.saturating_mul(u64::from(account.parts));
        let mut of_pools = [0u64; MAX_COMPONENTS + 1];
        for (account, pages) in self.accounts.iter().zip(pages) {
            let wanted = wanted(account, pages);
            if wanted > account.allowance() {
                return false;
            }
            of_pools[account.pool] = of_pools[account.pool].saturating_add(wanted);
        }
        of_pools.iter().zip(&self.pools).all(|(wanted, pool)| *wanted <= u64::from(pool.free.len()))
    }

    /// Takes one pool page.
    pub fn take(&mut self, account: usize) -> Option<PoolPage> {
        let Account { of, pool, used, .. } = self.accounts.get_mut(account)?;
        let Pool { free, owner } = self.pools.get_mut(*pool)?;
        let page = if of.window == 0 { free.take_first() } else { free.take_last() }?;
        owner[page as usize] = u8::try_from(account).unwrap_or(UNOWNED);
        *used += 1;
        Some(PoolPage(page))
    }

    /// Takes pages back, all of them or, when one is not this component's, none.
    pub fn give(&mut self, account: usize, pages: &[PoolPage]) -> bool {
        let Account { pool, used, .. } = &mut self.accounts[account];
        let Pool { free, owner } = &mut self.pools[*pool];
        let mine = u8::try_from(account).unwrap_or(UNOWNED);
        // Marked one by one, which finds a page named twice; put right when one of them was not taken.
        for (at, page) in pages.iter().enumerate() {
            match owner.get_mut(page.0 as usize) {
                Some(of) if *of == mine => *of = UNOWNED,
                _ => {
                    for earlier in &pages[..at] {
                        owner[earlier.0 as usize] = mine;
                    }
                    return false;
                }
            }
        }
        for page in pages {
            free.insert(page.0);
        }
        *used -= pages.len() as u64;
        true
    }
}
