//! What a plugin exports: a header that says how its types are laid out, and behind it the root with its roles.

use std::fmt;
use std::ptr::NonNull;

use abi_stable::StableAbi;
use abi_stable::abi_stability::abi_checking::{
    CheckingGlobals, check_layout_compatibility, check_layout_compatibility_with_globals,
};
use abi_stable::library::{AbiHeaderRef, CheckTypeLayout, LibHeader, RootModule, RootModuleResult};
use abi_stable::sabi_types::VersionStrings;
use abi_stable::std_types::{ROption, RSlice, RStr};
use abi_stable::type_layout::TypeLayout;

use super::difference;
use super::services::{Attach, HostObject, attach};
use super::{AbiResult, AllocatorObject, TierObject, TransferObject};
use crate::allocator::{LayerGroup, PoolOpening};
use crate::error::{Error, ErrorCode, Result};
use crate::transfer::Opening;

/// Opens an instance. A struct, because the layout check does not see through function pointers in options.
#[repr(transparent)]
#[derive(Clone, Copy, StableAbi)]
pub struct OpenTransfer {
    /// Takes [`Opening::name`] and [`Opening::config`].
    pub call: extern "C" fn(name: RStr<'_>, config: RStr<'_>) -> AbiResult<TransferObject>,
}

/// Opens a storage tier. See [`OpenTransfer`].
#[repr(transparent)]
#[derive(Clone, Copy, StableAbi)]
pub struct OpenTier {
    /// Takes [`Opening::name`] and [`Opening::config`].
    pub call: extern "C" fn(name: RStr<'_>, config: RStr<'_>) -> AbiResult<TierObject>,
}

/// Opens a pool allocator. See [`OpenTransfer`].
#[repr(transparent)]
#[derive(Clone, Copy, StableAbi)]
pub struct OpenAllocator {
    /// Takes the fields of [`PoolOpening`].
    pub call: extern "C" fn(
        name: RStr<'_>,
        config: RStr<'_>,
        page_tokens: u32,
        pages: u32,
        groups: RSlice<'_, LayerGroup>,
    ) -> AbiResult<AllocatorObject>,
}

/// Checks a configuration and starts nothing. See [`OpenTransfer`].
#[repr(transparent)]
#[derive(Clone, Copy, StableAbi)]
pub struct CheckConfig {
    /// Takes the kind of role that would be opened, and its [`Opening::config`].
    pub call: extern "C" fn(role: RStr<'_>, config: RStr<'_>) -> AbiResult<()>,
}

/// The factories of the roles that a plugin plays, and its check of configurations.
#[derive(Clone, Copy, Default)]
pub struct Roles {
    /// See [`TransferBackend`](crate::TransferBackend).
    pub transfer: ROption<OpenTransfer>,
    /// See [`StorageTier`](crate::StorageTier).
    pub tier: ROption<OpenTier>,
    /// See [`PoolAllocator`](crate::PoolAllocator).
    pub allocator: ROption<OpenAllocator>,
    /// Checks a configuration without opening anything.
    pub check_config: ROption<CheckConfig>,
}

/// The plugin's root. New roles are appended.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = PluginRoot_Ref)))]
#[sabi(missing_field(panic))]
pub struct PluginRoot {
    /// The manifest, the same text as in the note.
    pub describe: extern "C" fn() -> RStr<'static>,
    /// The transfer role, when the plugin plays it.
    #[sabi(last_prefix_field)]
    pub transfer: ROption<OpenTransfer>,
    /// The storage role.
    #[sabi(missing_field(default))]
    pub tier: ROption<OpenTier>,
    /// The allocator role.
    #[sabi(missing_field(default))]
    pub allocator: ROption<OpenAllocator>,
    /// Takes the host's services.
    #[sabi(missing_field(default))]
    pub attach: ROption<Attach>,
    /// Checks a configuration.
    #[sabi(missing_field(default))]
    pub check_config: ROption<CheckConfig>,
}

impl RootModule for PluginRoot_Ref {
    abi_stable::declare_root_module_statics! {PluginRoot_Ref}
    const BASE_NAME: &'static str = "host_plugin";
    const NAME: &'static str = "host_plugin";
    const VERSION_STRINGS: VersionStrings = abi_stable::package_version_strings!();
}

/// Makes the header of a plugin. `constructor` makes the plugin's root. Called by
/// [`export_plugin!`](crate::export_plugin).
///
/// # Safety
/// `constructor` returns a [`PluginRoot_Ref`] made by [`PluginRoot::export`].
#[must_use]
pub const unsafe fn root_header(constructor: extern "C" fn() -> RootModuleResult) -> LibHeader {
    // SAFETY: by this function's own contract.
    unsafe { LibHeader::from_constructor::<PluginRoot_Ref>(constructor, CheckTypeLayout::Yes) }
}

impl PluginRoot {
    /// Leaks the root `make` returns, as a header's constructor hands it out.
    pub fn export(make: fn() -> PluginRoot_Ref) -> RootModuleResult {
        abi_stable::library::__call_root_module_loader(make)
    }

    /// A root of these parts that lives as long as the process.
    #[must_use]
    pub fn leak(describe: extern "C" fn() -> RStr<'static>, roles: Roles) -> PluginRoot_Ref {
        use abi_stable::prefix_type::PrefixTypeTrait;
        let Roles { transfer, tier, allocator, check_config } = roles;
        let attach = ROption::RSome(Attach { call: attach });
        Self { describe, transfer, tier, allocator, attach, check_config }.leak_into_prefix()
    }
}

/// Why a header was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeaderError {
    /// Built with an `abi_stable`, or a C ABI, that this host does not speak.
    Incompatible(String),
    /// The header carries no layout, so nothing could be checked.
    NoLayout,
    /// The first difference between the host's types and the plugin's.
    Layout(String),
    /// The plugin fits the host, but not a plugin that was loaded before: the two appended different things to the API.
    Forked(String),
    /// The plugin's constructor failed.
    Constructor(String),
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Incompatible(text) => write!(f, "its header does not match: {text}"),
            Self::NoLayout => f.write_str("its header carries no type layouts to check"),
            Self::Layout(text) => write!(f, "its types differ from the host's: {text}"),
            Self::Forked(text) => write!(
                f,
                "it and a plugin that was loaded before extend the API in different ways, of which a process takes one: {text}"
            ),
            Self::Constructor(text) => write!(f, "its constructor failed: {text}"),
        }
    }
}

impl std::error::Error for HeaderError {}

/// A checked root.
#[derive(Clone, Copy)]
pub struct Root(PluginRoot_Ref);

impl Root {
    /// Checks a header and runs the plugin's constructor.
    ///
    /// `plugin_is_older` says that the plugin was built with an earlier version of this crate than the host was.
    ///
    /// # Errors
    /// See [`HeaderError`]. Each is found before the code that it protects runs.
    ///
    /// # Safety
    /// `header` is the address of the symbol that [`export_plugin!`](crate::export_plugin) exports, in a library that
    /// is never unloaded.
    pub unsafe fn from_header(
        header: NonNull<()>,
        plugin_is_older: bool,
    ) -> std::result::Result<Self, HeaderError> {
        // SAFETY: by contract the symbol is a `LibHeader`, which starts with the `AbiHeader` that this points to.
        // `AbiHeaderRef` is a transparent `'static` reference to it, and the library stays.
        let header: AbiHeaderRef = unsafe { std::mem::transmute(header) };
        let header = header.upgrade().map_err(|e| HeaderError::Incompatible(one_line(&e.to_string())))?;
        let plugin = header.layout().ok_or(HeaderError::NoLayout)?;
        check_layouts(<PluginRoot_Ref as StableAbi>::LAYOUT, plugin, plugin_is_older)?;
        // SAFETY: the layouts were compared just now, in the direction that the versions ask for.
        let root = unsafe { header.unchecked_layout::<PluginRoot_Ref>() };
        root.map(Self).map_err(|e| HeaderError::Constructor(one_line(&e.to_string())))
    }

    /// The manifest, as the plugin's code states it.
    #[must_use]
    pub fn describe(&self) -> &'static str {
        self.0.describe()().as_str()
    }

    /// Hands the host's services to the plugin. Returns false when the plugin is older than the services. Only the
    /// first call for a loaded file takes effect.
    #[must_use]
    pub fn attach(&self, host: HostObject) -> bool {
        let ROption::RSome(attach) = self.0.attach() else { return false };
        (attach.call)(host);
        true
    }

    /// Lets the plugin check a configuration for one of its roles. The check starts nothing. It answers as opening an instance
    /// would, as far as the answer depends on the configuration alone. A plugin without a check accepts every configuration here.
    ///
    /// # Errors
    /// The error that the plugin finds in the configuration.
    pub fn check_config(&self, role: &str, config: &str) -> Result<()> {
        let ROption::RSome(check) = self.0.check_config() else { return Ok(()) };
        (check.call)(role.into(), config.into()).into_result().map_err(Error::from)
    }

    /// Opens an instance of the transfer role.
    ///
    /// # Errors
    /// `UNSUPPORTED` without the role. Else the error of the plugin's factory.
    pub fn open_transfer(&self, opening: &Opening) -> Result<TransferObject> {
        let ROption::RSome(open) = self.0.transfer() else {
            return Err(Error::new(ErrorCode::UNSUPPORTED, "the plugin has no transfer role"));
        };
        (open.call)(opening.name.as_str().into(), opening.config.as_str().into())
            .into_result()
            .map_err(Error::from)
    }

    /// Opens an instance of the storage role.
    ///
    /// # Errors
    /// `UNSUPPORTED` without the role. Else the error of the plugin's factory.
    pub fn open_tier(&self, opening: &Opening) -> Result<TierObject> {
        let ROption::RSome(open) = self.0.tier() else {
            return Err(Error::new(ErrorCode::UNSUPPORTED, "the plugin has no tier role"));
        };
        (open.call)(opening.name.as_str().into(), opening.config.as_str().into())
            .into_result()
            .map_err(Error::from)
    }

    /// Opens an instance of the allocator role.
    ///
    /// # Errors
    /// `UNSUPPORTED` without the role. Else the error of the plugin's factory.
    pub fn open_allocator(&self, opening: &PoolOpening) -> Result<AllocatorObject> {
        let ROption::RSome(open) = self.0.allocator() else {
            return Err(Error::new(ErrorCode::UNSUPPORTED, "the plugin has no allocator role"));
        };
        let (name, config) = (opening.name.as_str().into(), opening.config.as_str().into());
        let groups = RSlice::from_slice(&opening.groups);
        (open.call)(name, config, opening.page_tokens, opening.pages, groups)
            .into_result()
            .map_err(Error::from)
    }

    /// The kinds of role whose factories the plugin exports, as manifests name them.
    #[must_use]
    pub fn roles(&self) -> Vec<&'static str> {
        let exported = [
            ("transfer", self.0.transfer().is_some()),
            ("tier", self.0.tier().is_some()),
            ("allocator", self.0.allocator().is_some()),
        ];
        exported.into_iter().filter_map(|(role, there)| there.then_some(role)).collect()
    }
}

/// Compares layouts so that appended methods and fields are allowed on either side.
///
/// The check lets the second layout have more fields than the first, never fewer. A prefix type's accessors handle the
/// missing fields. So the layout of the newer side goes second.
fn check_layouts(
    host: &'static TypeLayout,
    plugin: &'static TypeLayout,
    plugin_is_older: bool,
) -> std::result::Result<(), HeaderError> {
    let (first, second) = if plugin_is_older { (plugin, host) } else { (host, plugin) };
    let Err(errors) = check_layout_compatibility(first, second) else { return Ok(()) };
    // The check remembers the longest layout of each type over the whole process. With new globals it compares only
    // these two layouts.
    Err(match check_layout_compatibility_with_globals(first, second, &CheckingGlobals::new()) {
        Ok(()) => HeaderError::Forked(difference::between_plugins(&errors)),
        Err(errors) => HeaderError::Layout(difference::one_line(&errors, plugin_is_older)),
    })
}

/// Shortens a text of the layout check, which has many lines, to one line. The start of the text names the cause.
fn one_line(text: &str) -> String {
    difference::shortened(text, 300)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same module at two versions: the later one appended a field.
    #[allow(dead_code)]
    mod older {
        use abi_stable::StableAbi;

        #[repr(C)]
        #[derive(StableAbi)]
        #[sabi(kind(Prefix(prefix_ref = Module_Ref)))]
        #[sabi(missing_field(panic))]
        pub struct Module {
            #[sabi(last_prefix_field)]
            pub first: u32,
        }
    }
    #[allow(dead_code)]
    mod newer {
        use abi_stable::StableAbi;

        #[repr(C)]
        #[derive(StableAbi)]
        #[sabi(kind(Prefix(prefix_ref = Module_Ref)))]
        #[sabi(missing_field(option))]
        pub struct Module {
            #[sabi(last_prefix_field)]
            pub first: u32,
            pub second: u32,
        }
    }
    #[allow(dead_code)]
    mod changed {
        use abi_stable::StableAbi;

        #[repr(C)]
        #[derive(StableAbi)]
        #[sabi(kind(Prefix(prefix_ref = Module_Ref)))]
        #[sabi(missing_field(panic))]
        pub struct Module {
            #[sabi(last_prefix_field)]
            pub first: u64,
        }
    }

    #[test]
    fn appended_fields_are_allowed_on_either_side_when_the_direction_is_right() {
        let (old, new) = (older::Module_Ref::LAYOUT, newer::Module_Ref::LAYOUT);
        assert_eq!(check_layouts(old, new, false), Ok(()), "a newer plugin");
        assert_eq!(check_layouts(new, old, true), Ok(()), "an older plugin");
        assert!(check_layouts(new, old, false).is_err(), "the direction is what makes the difference");
    }

    #[test]
    fn a_changed_type_is_refused_in_one_line_that_names_it() {
        let error = check_layouts(older::Module_Ref::LAYOUT, changed::Module_Ref::LAYOUT, false).unwrap_err();
        let HeaderError::Layout(text) = error else { panic!("{error}") };
        assert!(text.contains("first") && text.contains("u64"), "{text}");
        assert!(!text.contains('\n') && text.len() < 700, "{text}");
    }
}
