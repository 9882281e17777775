//! An allocator with a full and a window component, spoken to with vectors.

use host_plugin_api::{
    Budget, Component, ComponentPool, ErrorCode, Grant, Growth, PoolAllocator, PoolOpening, PoolPage,
};
use host_plugin_swa::SwaAllocator;

/// How a pool's components are laid out.
#[derive(Clone, Copy, Debug)]
pub struct Pool {
    pub page_tokens: u32,
    pub window: u32,
    /// Pages of the full component.
    pub full: u32,
    /// Pages of the window's.
    pub windows: u32,
    /// Parts of a window page where both share one pool.
    pub shared: Option<u32>,
}

pub struct Opened {
    pub allocator: SwaAllocator,
    pub pool: Pool,
}

impl Pool {
    pub fn open(self) -> Opened {
        let of = |component, pages, window| ComponentPool { component, pages, window, reserved: 0 };
        let mut components =
            vec![of(Component::FULL, self.full, 0), of(Component::WINDOW, self.windows, self.window)];
        if let Some(parts) = self.shared {
            components = vec![components[0].sharing(1), components[1].sharing(parts)];
        }
        let opening = PoolOpening {
            name: "test".to_owned(),
            config: String::new(),
            page_tokens: self.page_tokens,
            components,
        };
        Opened { allocator: host_plugin_swa::open(&opening).unwrap(), pool: self }
    }

    /// Entries of a page of each component.
    pub fn parts(&self) -> [usize; 2] {
        [1, self.shared.unwrap_or(1) as usize]
    }
}

impl Opened {
    /// Pages that each component could take now.
    pub fn free_pages(&self) -> [u32; 2] {
        let mut budgets = [Budget::default(); 2];
        assert_eq!(self.allocator.budgets(&mut budgets), 2);
        [budgets[0].free, budgets[1].free]
    }

    /// `extend_tail` or `extend`: the grants, and the pages of each component; the code when it is refused.
    pub fn grow(&self, growth: Growth, tail: bool) -> Result<([Grant; 2], [Vec<PoolPage>; 2]), i32> {
        let (mut grants, mut pages) = ([Grant::default(); 2], vec![PoolPage::default(); 1 << 12]);
        let code = match tail {
            true => self.allocator.extend_tail(&[growth], &mut grants, &mut pages),
            false => self.allocator.extend(&[growth], &mut grants, &mut pages),
        };
        if code < 0 {
            return Err(code);
        }
        let parts = self.pool.parts();
        let entries = grants[0].pages as usize * parts[0];
        pages.truncate(usize::try_from(code).unwrap());
        let window = pages.split_off(entries);
        assert_eq!(window.len(), grants[1].pages as usize * parts[1]);
        Ok((grants, [pages, window]))
    }

    /// Gives pages of a component back.
    pub fn give(&self, component: Component, pages: &[PoolPage]) -> Result<(), ErrorCode> {
        match self.allocator.free(component, pages) {
            0 => Ok(()),
            code => Err(ErrorCode(code)),
        }
    }
}
