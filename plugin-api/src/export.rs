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
/// `transfer:`, `tier:` and `allocator:` name a factory each. Give those of the roles that the plugin plays, in this order.
/// `check_config:` comes last and may be left out: a `fn(role: &str, config: &str) -> Result<()>` that says whether a
/// factory of that role would accept this configuration, and starts nothing. The host asks it before it opens anything, and
/// when only the configuration is checked.
///
/// The crate builds as `cdylib`, or as `cdylib` and `rlib` when it is also linked directly. The exported symbol carries
/// the crate's name, so several plugins may be linked into one binary. A plugin that links another plugin's crate names
/// it in its manifest, `[plugin] built_on = ["other.id"]`, so that the host knows whose file it is.
///
/// The manifest states `version` as in `Cargo.toml`, which is checked here, and leaves out `[api]` and `[build]`, which
/// are filled in here.
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

            // A copy of its own, so that comparing the two notices a file whose note was changed.
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

            // SAFETY: the name carries the crate's, and the constructor returns the root of `PluginRoot::leak`.
            #[used]
            #[unsafe(export_name = concat!("host_plugin_", env!("CARGO_CRATE_NAME")))]
            static HEADER: $crate::__private::LibHeader = unsafe { $crate::abi::root_header(constructor) };
        };
    };
}
