//! The books: which pool pages are free, which component has each other page, and how many pages each component has.

use host_plugin_api::{Component, ComponentId, PoolPage, Retains};

use crate::free_set::FreeSet;

/// Owner of a page that is free.
const UNOWNED: u8 = u8::MAX;

/// One component.
struct Account {
    of: Component,
    /// Pool pages that a page of it is made of.
    parts: u32,
    /// Pool pages that it has.
    used: u64,
}

/// The books of all components.
pub struct Books {
    accounts: Vec<Account>,
    free: FreeSet,
    /// The account of each page, or [`UNOWNED`].
    owner: Vec<u8>,
}

impl Books {
    /// Books of a pool of `pages` pages, all free. `components` gives each component's declaration and the parts of its page.
    pub fn open(pages: u32, components: impl Iterator<Item = (Component, u32)>) -> Self {
        let account = |(of, parts)| Account { of, parts, used: 0 };
        let accounts = components.map(account).collect();
        Self { accounts, free: FreeSet::full(pages), owner: vec![UNOWNED; pages as usize] }
    }

    /// The components.
    pub fn components(&self) -> impl ExactSizeIterator<Item = Component> {
        self.accounts.iter().map(|account| account.of)
    }

    /// The index of a component among the others.
    pub fn find(&self, component: ComponentId) -> Option<usize> {
        self.accounts.iter().position(|account| account.of.id == component)
    }

    /// Pool pages that a page of the component is made of.
    pub fn parts(&self, account: usize) -> u32 {
        self.accounts[account].parts
    }

    /// Whether a component can have `pages` pool pages more.
    pub fn fit(&self, account: usize, pages: usize) -> bool {
        let Account { of, parts, used } = &self.accounts[account];
        let (budget, pages) = (u64::from(of.pages) * u64::from(*parts), pages as u64);
        used + pages <= budget && pages <= u64::from(self.free.len())
    }

    /// Takes one pool page: the first for a component that keeps pages as long as the sequence, the last for others.
    pub fn take(&mut self, account: usize) -> Option<PoolPage> {
        let Account { of, used, .. } = self.accounts.get_mut(account)?;
        let page = match of.retains {
            Retains::ALL => self.free.take_first(),
            _ => self.free.take_last(),
        }?;
        self.owner[page as usize] = u8::try_from(account).unwrap_or(UNOWNED);
        *used += 1;
        Some(PoolPage(page))
    }

    /// Takes pages back: all of them, or none when one is not this component's.
    pub fn give(&mut self, account: usize, pages: &[PoolPage]) -> bool {
        let mine = u8::try_from(account).unwrap_or(UNOWNED);
        // Pages are marked one by one, which finds a page named twice. When a page is not this component's, the earlier
        // marks are undone.
        for (at, page) in pages.iter().enumerate() {
            match self.owner.get_mut(page.0 as usize) {
                Some(of) if *of == mine => *of = UNOWNED,
                _ => {
                    for earlier in &pages[..at] {
                        self.owner[earlier.0 as usize] = mine;
                    }
                    return false;
                }
            }
        }
        for page in pages {
            self.free.insert(page.0);
        }
        self.accounts[account].used -= pages.len() as u64;
        true
    }
}
