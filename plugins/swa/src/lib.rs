//! Pool allocator for models that mix full attention with sliding windows.
//!
//! A token page of such a model has two parts: the KV of the layers that attend to everything, kept as long as the
//! sequence, and that of the layers with a window, kept while the window still covers it. The allocator declares a component for
//! each, with a budget:
//!
//! - by default each may fill the pool. Long prompts and many windows use the same memory, and no ratio has to be right.
//! - with `full_tokens_ratio` each has a fixed part of it, in that ratio. Pages that one does not use, the other cannot have.
//!
//! Full parts are taken from the front of a pool and windows from its end, always the outermost free page. So full
//! parts of a prompt lie side by side as far as the pool allows, and a transfer of them has few pieces. The pages that
//! a sequence of calls hands out depend on these calls alone.
//!
//! # What is not here
//!
//! SGLang's allocator for such models addresses both parts by the *full* part's slot, and finds the window's through a map with an
//! entry per token. A sequence of this host has two page lists side by side, the second with the place of its first page. So three
//! mechanisms of SGLang's allocator are not needed here. Their protection holds all the same (`tests/allocator/safety.rs`):
//!
//! | There | Protects from | Here |
//! | --- | --- | --- |
//! | slot 0 is a dummy: unmapped tokens and padded rows point to it | writing where nothing was allocated | a page that is not in the list cannot be named. Page 0 is a page like any other, and giving it back when it is free is refused |
//! | the map's last entry is -1: the token before the first maps to it | taking the token before the first for a real one | the host counts from the first token and looks at none before it. A page beyond the pool is refused |
//! | entries are zeroed before they are used again | freeing a window's slot twice through a full slot that was handed out again | a page has one owner at a time, and is given back for this one only |
//!
//! SGLang's allocator also has tasks that do not depend on which page is free. Here these are tasks of the host, with
//! every allocator:
//!
//! | There | Here |
//! | --- | --- |
//! | the copy of a preempted request in host memory, with a mask of the slots whose window is still there | `host_core::hierarchy`: pages and the window parts that are there go to the offload tiers by their names, and come back when the request does, or are computed again |
//! | how long a preempted request is when it comes back | `host_core::window` computes it from what is declared, and counts what is cached |
//! | giving back what the window has left behind, every so many steps | the host gives pages back that no later token reads, after each step |

mod allocator;
mod books;
mod free_set;

pub use allocator::{SwaAllocator, open};

// The plugin's entry: writes plugin.toml into the file and exports the factory.
host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    allocator: open,
}
