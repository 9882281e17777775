//! A fake for tests: the exports of `export_plugin!`, made by hand with an error. `MALFORMED` in the environment names the error.

use abi_stable::library::{LibHeader, RootModuleError, RootModuleResult};
use abi_stable::std_types::{RBoxError, RResult, RStr};
use host_plugin_api::abi::{PluginRoot, PluginRoot_Ref, Roles, root_header};
use host_plugin_api::note::{BUILT_FOR, Note, padded_length};

const PARTS: &[&str] = &[
    include_str!("../plugin.toml"),
    "target = \"",
    BUILT_FOR,
    "\"\n\n[api]\nversion = \"",
    host_plugin_api::VERSION,
    "\"\n",
];

#[used]
#[unsafe(link_section = ".note.host")]
static NOTE: Note<{ padded_length(PARTS) }> = Note::new(PARTS);

static TEXT: Note<{ padded_length(PARTS) }> = Note::new(PARTS);

fn told(how: &str) -> bool {
    std::env::var("MALFORMED").is_ok_and(|said| said == how)
}

/// Runs while the system loads the file, before the host could check anything.
extern "C" fn on_load() {
    if told("aborts on load") {
        std::process::abort();
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;

extern "C" fn describe() -> RStr<'static> {
    TEXT.text().into()
}

fn root() -> PluginRoot_Ref {
    assert!(!told("root panics"), "told to panic in the root's constructor");
    PluginRoot::leak(describe, Roles::default())
}

extern "C" fn constructor() -> RootModuleResult {
    if told("root fails") {
        let error = std::io::Error::other("the root's constructor has no licence");
        return RResult::RErr(RootModuleError::Returned(RBoxError::new(error)));
    }
    PluginRoot::export(root)
}

// SAFETY: no other library exports this name, and the constructor returns the root of `PluginRoot::leak`.
#[used]
#[unsafe(export_name = "host_plugin_malformed")]
static HEADER: LibHeader = unsafe { root_header(constructor) };
