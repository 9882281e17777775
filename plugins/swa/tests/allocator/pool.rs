//! An allocator with a full and a window component, called with vectors.

use host_plugin_api::{
    Component, ComponentId, ErrorCode, LayerGroup, LayerKind, PoolAllocator, PoolOpening, PoolPage,
};
use host_plugin_swa::SwaAllocator;

/// A pool for two groups of layers.
#[derive(Clone, Copy, Debug)]
pub struct Pool {
    pub page_tokens: u32,
    pub window: u32,
    /// Pages of the pool.
    pub pages: u32,
    /// Pool pages of a window page.
    pub parts: u32,
    /// `full_tokens_ratio`.
    pub ratio: Option<f64>,
}

pub struct Opened {
    pub allocator: SwaAllocator,
    /// The full component, and the window's.
    pub components: [Component; 2],
    pub pool: Pool,
}

impl Pool {
    pub fn opening(self) -> PoolOpening {
        let full = LayerGroup { kind: LayerKind::FULL, layers: 2, window: 0, parts: 1 };
        let window = LayerGroup {
            kind: LayerKind::WINDOW,
            layers: 2 * self.parts,
            window: self.window,
            parts: self.parts,
        };
        PoolOpening {
            name: "test".to_owned(),
            config: self.ratio.map_or_else(String::new, |ratio| {
                format!("full_tokens_ratio = {}", format!("{ratio:?}").to_lowercase())
            }),
            page_tokens: self.page_tokens,
            pages: self.pages,
            groups: vec![full, window],
        }
    }

    pub fn open(self) -> Opened {
        let allocator = host_plugin_swa::open(&self.opening()).unwrap();
        let mut components = [Component::default(); 2];
        assert_eq!(allocator.components(&mut components), 2);
        Opened { allocator, components, pool: self }
    }
}

impl Opened {
    /// The name of the full component, or of the window's.
    pub fn id(&self, which: usize) -> ComponentId {
        self.components[which].id
    }

    /// Takes `pages` pages of a component, which are more pool pages.
    pub fn take(&self, which: usize, pages: u32) -> Result<Vec<PoolPage>, ErrorCode> {
        let parts = [1, self.pool.parts][which];
        let mut taken = vec![PoolPage::default(); (pages * parts) as usize];
        match self.allocator.alloc(self.id(which), &mut taken) {
            0 => Ok(taken),
            code => Err(ErrorCode(code)),
        }
    }

    /// Gives pool pages of a component back.
    pub fn give(&self, which: usize, pages: &[PoolPage]) -> Result<(), ErrorCode> {
        match self.allocator.free(self.id(which), pages) {
            0 => Ok(()),
            code => Err(ErrorCode(code)),
        }
    }
}
