//! The export macro.

/// Makes a plugin of a crate: writes its manifest into the file and exports its factory.
///
/// ```text
/// host_plugin_api::export_plugin! {
///     manifest: include_str!("../plugin.toml"),
///     transfer: open,
/// }
///
/// fn open(opening: &Opening) -> host_plugin_api::Result<MyBackend> { .. }
/// ```
///
/// `transfer:`, `tier:` and `allocator:` each name a factory. Give the factories of the roles that the plugin plays, in
/// this order. `check_config:` comes last and is optional. It names a `fn(role: &str, config: &str) -> Result<()>` that
/// says whether the factory of that role would accept this configuration. The function starts nothing. The host calls
/// it before it opens an instance, and when it only checks the configuration.
///
/// The crate builds as `cdylib`, or as `cdylib` and `rlib` when it is also linked directly. The exported symbol carries
/// the crate's name, so several plugins may be linked into one binary. A plugin that links another plugin's crate names
/// it in its manifest, `[plugin] built_on = ["other.id"]`, so that the host knows whose file it is.
///
/// The manifest states `version` as in `Cargo.toml`. This macro checks that. The manifest leaves out `[api]` and
/// `[build]`. This macro fills them in.
#[macro_export]
macro_rules! export_plugin {
    (
        manifest: $manifest:expr
        $(, transfer: $transfer:path)?
        $(, tier: $tier:path)?
        $(, allocator: $allocator:path)?
        $(, check_config: $check:path)?
        $(,)?
    ) => {
        const _: () = {
            const AUTHORED: &str = $manifest;
            const PARTS: &[&str] = &[
                AUTHORED,
                "\n[api]\nversion = \"",
                $crate::VERSION,
                "\"\n\n[build]\npanic = \"",
                if cfg!(panic = "abort") { "abort" } else { "unwind" },
                "\"\ntarget = \"",
                $crate::note::BUILT_FOR,
                "\"\nrustc = \"",
                $crate::note::BUILT_BY,
                "\"\nsymbol = \"",
                $crate::note::SYMBOL_PREFIX,
                env!("CARGO_CRATE_NAME"),
                "\"\n",
            ];
            assert!(
                $crate::note::contains(AUTHORED, concat!("version = \"", env!("CARGO_PKG_VERSION"), "\"")),
                "the manifest must say `version = \"..\"` as Cargo.toml does"
            );
            assert!(
                !$crate::note::contains(AUTHORED, "\n[api]")
                    && !$crate::note::contains(AUTHORED, "\n[build]"),
                "[api] and [build] are filled in by export_plugin!, remove them from the manifest"
            );

            #[used]
            #[unsafe(link_section = ".note.host")]
            static NOTE: $crate::note::Note<{ $crate::note::padded_length(PARTS) }> =
                $crate::note::Note::new(PARTS);

            // A second copy of the manifest. A comparison of the two copies detects a file whose note was changed.
            static TEXT: $crate::note::Note<{ $crate::note::padded_length(PARTS) }> =
                $crate::note::Note::new(PARTS);

            extern "C" fn describe() -> $crate::abi::RStr<'static> {
                TEXT.text().into()
            }

            fn root() -> $crate::abi::PluginRoot_Ref {
                #[allow(unused_mut)]
                let mut roles = $crate::abi::Roles::default();
                $(
                    extern "C" fn open_transfer(
                        name: $crate::abi::RStr<'_>,
                        config: $crate::abi::RStr<'_>,
                    ) -> $crate::abi::AbiResult<$crate::abi::TransferObject> {
                        $crate::abi::open_guarded($transfer, name, config)
                    }
                    roles.transfer =
                        $crate::abi::ROption::RSome($crate::abi::OpenTransfer { call: open_transfer });
                )?
                $(
                    extern "C" fn open_tier(
                        name: $crate::abi::RStr<'_>,
                        config: $crate::abi::RStr<'_>,
                    ) -> $crate::abi::AbiResult<$crate::abi::TierObject> {
                        $crate::abi::open_guarded_tier($tier, name, config)
                    }
                    roles.tier = $crate::abi::ROption::RSome($crate::abi::OpenTier { call: open_tier });
                )?
                $(
                    extern "C" fn open_allocator(
                        name: $crate::abi::RStr<'_>,
                        config: $crate::abi::RStr<'_>,
                        page_tokens: u32,
                        pages: u32,
                        groups: $crate::abi::RSlice<'_, $crate::LayerGroup>,
                    ) -> $crate::abi::AbiResult<$crate::abi::AllocatorObject> {
                        $crate::abi::open_guarded_allocator(
                            $allocator, name, config, page_tokens, pages, groups,
                        )
                    }
                    roles.allocator =
                        $crate::abi::ROption::RSome($crate::abi::OpenAllocator { call: open_allocator });
                )?
                $(
                    extern "C" fn check_config(
                        role: $crate::abi::RStr<'_>,
                        config: $crate::abi::RStr<'_>,
                    ) -> $crate::abi::AbiResult<()> {
                        $crate::abi::check_guarded($check, role, config)
                    }
                    roles.check_config =
                        $crate::abi::ROption::RSome($crate::abi::CheckConfig { call: check_config });
                )?
                $crate::abi::PluginRoot::leak(describe, roles)
            }

            extern "C" fn constructor() -> $crate::__private::RootModuleResult {
                $crate::abi::PluginRoot::export(root)
            }

            // SAFETY: the exported name contains the crate's name, and the constructor returns the root of `PluginRoot::leak`.
            #[used]
            #[unsafe(export_name = concat!("host_plugin_", env!("CARGO_CRATE_NAME")))]
            static HEADER: $crate::__private::LibHeader = unsafe { $crate::abi::root_header(constructor) };
        };
    };
}
