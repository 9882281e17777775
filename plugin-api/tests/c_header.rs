//! Checks that `include/host_plugin.h` and the Rust ABI have the same layouts.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use host_plugin_api::{allocator, c, capability, error, note, services, tier, transfer};

/// A struct's name in C, its size, and its fields with their offsets.
type Layout = (&'static str, usize, Vec<(&'static str, usize)>);

macro_rules! layout {
    ($name:literal, $type:ty { $($field:ident $(as $c:literal)?),* }) => {
        ($name, size_of::<$type>(), vec![$((name!($field $($c)?), std::mem::offset_of!($type, $field))),*])
    };
}

macro_rules! name {
    ($field:ident) => {
        stringify!($field)
    };
    ($field:ident $c:literal) => {
        $c
    };
}

#[rustfmt::skip]
fn layouts() -> Vec<Layout> {
    use c::{AllocatorTable, ErrorText, Opening, Plugin, PoolOpening, Services, Setting, Text, TierTable, TransferTable};
    use tier::{Key, Scanned, TierCompletion, TierLimits, TierPage, TierUsage};
    use transfer::{Completion, Memory, Notification, Submission, TransferLimits};
    vec![
        layout!("host_text", Text { data, length }),
        layout!("host_error", ErrorText { text, room, length }),
        layout!("host_setting", Setting { key, text, integer, number, kind, reserved }),
        layout!("host_opening", Opening { size, name, config, settings, settings_count }),
        layout!("host_pool_opening", PoolOpening { size, opening, page_tokens, pages, groups, groups_count }),
        layout!("host_services", Services { size, host, level, log, word, wake }),
        layout!("host_memory", Memory { address, length, kind, device, fd, generation, fd_offset }),
        layout!("host_write", transfer::Write {
            source_region, target_region, source_offset, target_offset, length, target_generation
        }),
        layout!("host_submission", Submission { peer, notification_length, tag, notification }),
        layout!("host_completion", Completion { tag, bytes, status, reserved }),
        layout!("host_notification", Notification { kind, length, peer_name_length, reserved, payload, peer_name }),
        layout!("host_transfer_limits", TransferLimits { max_writes, max_submissions, short_writes, reserved }),
        layout!("host_transfer_role", TransferTable {
            size, open, close, limits, register_memory, deregister_memory, endpoint, connect, disconnect, submit, poll,
            notifications, cancel, settled, event_fd, shutdown
        }),
        layout!("host_key", Key { }),
        layout!("host_tier_page", TierPage { key, region, length, offset }),
        layout!("host_tier_completion", TierCompletion { tag, page, status, bytes }),
        layout!("host_tier_limits", TierLimits { max_pages, max_batches, max_value, alignment, reserved }),
        layout!("host_tier_usage", TierUsage { values, bytes, capacity, reserved }),
        layout!("host_scanned", Scanned { keys, reserved, cursor }),
        layout!("host_tier_role", TierTable {
            size, open, close, limits, register_memory, deregister_memory, exists, get, put, remove, poll, cancel, settled,
            scan, usage, event_fd, shutdown
        }),
        layout!("host_layer_group", allocator::LayerGroup { kind, layers, window, parts }),
        layout!("host_component", allocator::Component { id, group, retains, tokens, pages, reserved }),
        layout!("host_allocator_role", AllocatorTable { size, open, close, components, take, give }),
        layout!("host_plugin", Plugin {
            magic, size, manifest, manifest_end, attach, check_config, transfer, tier, allocator
        }),
    ]
}

fn numbers() -> Vec<(&'static str, i64)> {
    use error::ErrorCode;
    let codes = [
        ("HOST_INTERNAL", ErrorCode::INTERNAL),
        ("HOST_INVALID_ARGUMENT", ErrorCode::INVALID_ARGUMENT),
        ("HOST_UNSUPPORTED", ErrorCode::UNSUPPORTED),
        ("HOST_WOULD_BLOCK", ErrorCode::WOULD_BLOCK),
        ("HOST_CONFIG", ErrorCode::CONFIG),
        ("HOST_PANICKED", ErrorCode::PANICKED),
        ("HOST_CLOSED", ErrorCode::CLOSED),
        ("HOST_IO", ErrorCode::IO),
        ("HOST_TIMEOUT", ErrorCode::TIMEOUT),
        ("HOST_NO_RESOURCE", ErrorCode::NO_RESOURCE),
        ("HOST_PEER_LOST", ErrorCode::PEER_LOST),
        ("HOST_CANCELLED", ErrorCode::CANCELLED),
        ("HOST_VERSION", ErrorCode::VERSION),
    ];
    let others = [
        ("HOST_WAKES", i64::from(services::WAKES)),
        ("HOST_LOG_ERROR", i64::from(services::Level::ERROR.0)),
        ("HOST_LOG_TRACE", i64::from(services::Level::TRACE.0)),
        ("HOST_DRAM", i64::from(transfer::MemoryKind::DRAM.0)),
        ("HOST_VRAM", i64::from(transfer::MemoryKind::VRAM.0)),
        ("HOST_NOTIFICATION_BYTES", transfer::NOTIFICATION_BYTES as i64),
        ("HOST_ARRIVED", i64::from(transfer::NotificationKind::ARRIVED.0)),
        ("HOST_PEER_GONE", i64::from(transfer::NotificationKind::PEER_LOST.0)),
        ("HOST_MISSING", i64::from(tier::MISSING)),
        ("HOST_FOUND", i64::from(tier::FOUND)),
        ("HOST_STORED", i64::from(tier::STORED)),
        ("HOST_LAYERS_FULL", i64::from(allocator::LayerKind::FULL.0)),
        ("HOST_LAYERS_WINDOW", i64::from(allocator::LayerKind::WINDOW.0)),
        ("HOST_LAYERS_STATE", i64::from(allocator::LayerKind::STATE.0)),
        ("HOST_RETAINS_ALL", i64::from(allocator::Retains::ALL.0)),
        ("HOST_RETAINS_NEWEST", i64::from(allocator::Retains::NEWEST.0)),
        ("HOST_RETAINS_STATE", i64::from(allocator::Retains::STATE.0)),
        ("HOST_SETTING_STRING", i64::from(c::setting::STRING)),
        ("HOST_SETTING_INTEGER", i64::from(c::setting::INTEGER)),
        ("HOST_SETTING_FLOAT", i64::from(c::setting::FLOAT)),
        ("HOST_SETTING_BOOLEAN", i64::from(c::setting::BOOLEAN)),
        ("HOST_SETTING_TOML", i64::from(c::setting::TOML)),
    ];
    codes.iter().map(|(name, code)| (*name, i64::from(code.0))).chain(others).collect()
}

/// The header's text.
const HEADER: &str = include_str!("../include/host_plugin.h");

#[test]
fn the_header_lays_out_what_the_rust_abi_does() {
    // The C compiler compares the header with the numbers from Rust. A difference is an error that names the item.
    let mut program = String::from("#include \"host_plugin.h\"\n");
    for (name, size, fields) in layouts() {
        assert!(HEADER.contains(&format!("}} {name};")), "{name} is in the header");
        writeln!(program, "_Static_assert(sizeof({name}) == {size}, \"{name} has {size} bytes in Rust\");")
            .unwrap();
        for (field, offset) in fields {
            writeln!(
                program,
                "_Static_assert(offsetof({name}, {field}) == {offset}, \"{name}.{field} lies at {offset} in Rust\");"
            )
            .unwrap();
        }
    }
    for (name, number) in numbers() {
        writeln!(program, "_Static_assert({name} == {number}, \"{name} is {number} in Rust\");").unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("layout.c");
    std::fs::write(&file, program).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let output = Command::new("gcc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-I"])
        .args([&include, &file])
        .output()
        .expect("gcc runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn every_struct_of_the_header_is_compared() {
    let declared = HEADER.lines().filter_map(|line| line.strip_prefix("} host_")?.strip_suffix(';'));
    let compared: Vec<&str> = layouts().iter().map(|(name, ..)| *name).collect();
    for name in declared {
        assert!(compared.contains(&format!("host_{name}").as_str()), "host_{name} is not compared");
    }
}

#[test]
fn the_header_is_of_this_version_and_writes_the_same_note() {
    let text = HEADER;
    assert!(text.contains(&format!("#define HOST_PLUGIN_API \"{}\"", host_plugin_api::VERSION)));
    assert!(text.contains(&format!(".pushsection {},", note::SECTION)));
    assert!(text.contains(&format!(".asciz \\\"{}\\\"", std::str::from_utf8(note::NAME).unwrap())));
    assert!(
        text.contains(&format!("symbol = '{}'", c::SYMBOL)) && text.contains(&format!("abi = '{}'", c::ABI))
    );
    let magic: Vec<String> = c::MAGIC.iter().map(|byte| format!("'{}'", char::from(*byte))).collect();
    assert!(text.contains(&format!("{{{}}}", magic.join(", "))));
    // Capabilities are words of the manifest, in every language the same.
    assert!(
        capability::ALL.iter().all(|word| word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'))
    );
}
