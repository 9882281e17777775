//! The table of failures. Panics in calls of a loaded plugin are in `panics_are_contained`, and versions of the ABI in `versions`.

use std::path::Path;

use host_plugin_api::VERSION;
use host_tests::signing::Publisher;

use super::damaged::*;

/// One way to fail: how the directory is made, the environment of the process that loads it, and the expected message.
pub struct Row {
    pub name: &'static str,
    pub make: fn(&Path),
    pub environment: &'static [(&'static str, &'static str)],
    /// The label, and parts of the sentence.
    pub says: &'static [&'static str],
}

const fn row(name: &'static str, make: fn(&Path), says: &'static [&'static str]) -> Row {
    Row { name, make, environment: &[], says }
}

const fn asking_for_signatures(name: &'static str, make: fn(&Path), says: &'static [&'static str]) -> Row {
    Row { name, make, environment: &[("PUBLISHERS", "keys")], says }
}

pub const MALFORMED: &str = "MALFORMED";

pub const ROWS: &[Row] = &[
    row("no file at all", |_| {}, &["not_found |", "searched ", "plugins there: none"]),
    row("empty", |at| put(at, b""), &["not_elf |", "it is empty"]),
    row("text", |at| put(at, b"not a library at all"), &["not_elf |", "it starts with \"not a library"]),
    row("random bytes", |at| put(at, &noise(5000)), &["not_elf |"]),
    row(
        "random bytes behind an ELF header",
        |at| put(at, &[&null()[..64], &noise(5000)].concat()),
        &["truncated |"],
    ),
    row(
        "cut within the header",
        |at| put(at, &null()[..40]),
        &["truncated |", "needs 64 bytes and has 40", "copy it again"],
    ),
    row("cut at 3 kB", |at| put(at, &null()[..3000]), &["truncated |", "has 3000"]),
    row("cut at 200 kB", |at| put(at, &null()[..200_000]), &["truncated |"]),
    row("cut at 300 kB", |at| put(at, &null()[..300_000]), &["truncated |"]),
    row(
        "for another machine",
        |at| put(at, &aarch64()),
        &["wrong_machine |", "built for aarch64, this host runs on"],
    ),
    row(
        "for another C library",
        |at| put(at, &noted("-gnu\"", "-musl\"")),
        &["wrong_target |", "linux-musl"],
    ),
    row(
        "linked against a newer C library",
        newer_glibc,
        &["glibc_too_old |", "needs glibc 2.99 or newer, this machine has 2.", "cargo-zigbuild"],
    ),
    row("a library without a note", |at| put(at, &libc()), &["no_note |", "not a plugin", "export_plugin!"]),
    row(
        "a symbol that nothing defines",
        |at| put(at, &undefined()),
        &["open |", "the system cannot load", "undefined symbol"],
    ),
    Row {
        name: "a constructor of the root that fails",
        make: |at| put_plugin(at, "malformed"),
        environment: &[(MALFORMED, "root fails")],
        says: &["constructor |", "the root's constructor has no licence"],
    },
    Row {
        name: "a constructor of the root that panics",
        make: |at| put_plugin(at, "malformed"),
        environment: &[(MALFORMED, "root panics")],
        says: &["constructor |", "panicked"],
    },
    row(
        "the same file, well",
        |at| put_plugin(at, "malformed"),
        &["roles |", "exports the roles [], but its manifest declares [\"transfer\"]", "and no more"],
    ),
    row(
        "another API major",
        |at| put(at, &noted(&format!("[api]\nversion = \"{VERSION}"), "[api]\nversion = \"1.0.0")),
        &["api_version |", "plugin API 1.0.0", "build it again"],
    ),
    row(
        "a host that is too old",
        |at| {
            put(
                at,
                &noted(
                    "description = \"Fake for tests and benchmarks: moves nothing and says it did\"",
                    "min_host = \"9.0.0\"",
                ),
            )
        },
        &["host_too_old |", "needs host 9.0.0 or newer", "update the host"],
    ),
    row(
        "threads that are neither own nor none",
        |at| {
            put(
                at,
                &noted(
                    "description = \"Fake for tests and benchmarks: moves nothing and says it did\"",
                    "threads = \"many\"",
                ),
            )
        },
        &["bad_manifest |", "threads is \"many\", it must be own or none"],
    ),
    row(
        "built with panic = \"abort\"",
        |at| put(at, &noted("panic = \"unwind\"", "panic = \"abort\"")),
        &["panic_abort |", "--plugins-may-abort"],
    ),
    Row {
        name: "built with panic = \"abort\", and accepted",
        make: |at| put(at, &everywhere("panic = \"unwind\"", "panic = \"abort\" ")),
        environment: &[("MAY_ABORT", "1")],
        says: &["opened from its place"],
    },
    row(
        "may be changed by every user",
        |at| {
            put_plugin(at, "null");
            mode(&at.join("plugin.so"), 0o666)
        },
        &["permissions |", "may be changed by every user", "chmod o-w", "--insecure-plugin-permissions"],
    ),
    row(
        "in a directory that every user may change",
        |at| {
            put_plugin(at, "null");
            mode(at, 0o777)
        },
        &["permissions |", "may be changed by every user"],
    ),
    row(
        "in a sticky directory",
        |at| {
            put_plugin(at, "null");
            mode(at, 0o1777)
        },
        &["opened from its place"],
    ),
    row(
        "a link into such a directory",
        link_into_open_directory,
        &["permissions |", "may be changed by every user"],
    ),
    row(
        "pinned and the same",
        |at| {
            put_plugin(at, "null");
            pin(at, None)
        },
        &["opened from sealed memory"],
    ),
    row(
        "pinned and not the same",
        |at| {
            put_plugin(at, "null");
            pin(at, Some("00"))
        },
        &["wrong_hash |", "null.plugin.toml pins 00", "restore the file"],
    ),
    Row {
        name: "pinned, replaced after the scan by other bytes",
        make: |at| {
            put_plugin(at, "null");
            pin(at, None)
        },
        environment: &[("AFTER_SCAN", "cp plugin.so other && printf x >> other && mv other plugin.so")],
        says: &["changed |", "replaced since it was scanned"],
    },
    Row {
        name: "pinned, written over in place after it was loaded",
        make: |at| {
            put_plugin(at, "null");
            pin(at, None)
        },
        environment: &[("AFTER_LOAD", "head -c 300000 /dev/zero > plugin.so")],
        says: &["again opened", "opened from sealed memory"],
    },
    // The file is written over with the same bytes. Other bytes would end the process at the next call, which the host cannot
    // prevent. It can only notice the change when the next instance is opened.
    Row {
        name: "written over in place after it was loaded",
        make: |at| put_plugin(at, "null"),
        environment: &[(
            "AFTER_LOAD",
            "cp plugin.so same && dd if=same of=plugin.so conv=notrunc status=none",
        )],
        says: &["again overwritten |", "host plugins install", "opened from its place"],
    },
    Row {
        name: "replaced by rename after it was loaded",
        make: |at| put_plugin(at, "null"),
        environment: &[("AFTER_LOAD", "cp plugin.so other && mv other plugin.so")],
        says: &["again opened", "opened from its place"],
    },
    row(
        "a side-car that is no TOML",
        |at| std::fs::write(at.join("a.plugin.toml"), "file = ").unwrap(),
        &["bad_side_car |"],
    ),
    row(
        "a side-car for other targets only",
        |at| {
            std::fs::write(
                at.join("a.plugin.toml"),
                "manifest_version = 1\n[[file]]\ntarget = \"m68k-unknown-linux-gnu\"\npath = \"a.so\"\n",
            )
            .unwrap()
        },
        &["not_found |"],
    ),
    row(
        "a side-car that names what is not there",
        |at| std::fs::write(at.join("a.plugin.toml"), side_car("sub/a.so", None)).unwrap(),
        &["unreadable |", "No such file"],
    ),
    row("a side-car that names a file elsewhere", side_car_elsewhere, &["opened from sealed memory"]),
    asking_for_signatures("signed", |at| signed(at, ""), &["opened from sealed memory"]),
    asking_for_signatures(
        "not signed",
        |at| {
            signed(at, "");
            std::fs::remove_file(at.join("plugin.so.minisig")).unwrap()
        },
        &["not_signed |", "plugin.so.minisig is not there", "sign the file"],
    ),
    asking_for_signatures(
        "signed by another publisher",
        |at| {
            signed(at, "");
            Publisher::new("other").sign(&at.join("plugin.so"))
        },
        &["bad_signature |", "a key that no publisher in"],
    ),
    asking_for_signatures(
        "signed, other bytes",
        |at| {
            signed(at, "");
            put(at, &[null(), vec![0]].concat())
        },
        &["bad_signature |", "acme signed other bytes"],
    ),
    asking_for_signatures(
        "signed, with another trusted comment",
        |at| signed_otherwise(at, |text| text.replace("for tests", "for texts")),
        &["bad_signature |", "its trusted comment was changed"],
    ),
    asking_for_signatures(
        "signed, with a signature that is cut off",
        |at| signed_otherwise(at, |text| text[..text.len() / 2].to_owned()),
        &["bad_signature |", "no whole signature of minisign"],
    ),
    asking_for_signatures(
        "signed, with a signature that is too long",
        |at| signed_otherwise(at, |text| text + &"x".repeat(1 << 20)),
        &["bad_signature |", "more than 16384 bytes"],
    ),
    asking_for_signatures(
        "signed by a publisher of other plugins",
        |at| signed(at, "plugins = [\"com.acme.*\"]"),
        &["bad_signature |", "acme may sign com.acme.*, and this is host.test.null"],
    ),
    asking_for_signatures(
        "signed, with a library beside it that is not",
        signed_with_a_library_beside,
        &["unsigned_libraries |", "libbeside.so", "host plugins lock"],
    ),
    asking_for_signatures(
        "signed, with a library that it needs by its path",
        |at| signed_needing(at, &[(1, 0)], b"/opt/libx.so\0"),
        &["unreadable |", "/opt/libx.so", "by its path"],
    ),
    asking_for_signatures(
        "publishers that every user may change",
        |at| {
            signed(at, "");
            mode(&at.join("keys"), 0o666)
        },
        &["not_found |", "keys cannot be read: it could be replaced by others"],
    ),
    Row {
        name: "signed, replaced after the scan by other bytes",
        make: |at| signed(at, ""),
        environment: &[
            ("PUBLISHERS", "keys"),
            ("AFTER_SCAN", "cp plugin.so other && printf x >> other && mv other plugin.so"),
        ],
        says: &["changed |", "replaced since it was scanned"],
    },
    row(
        "signed otherwise, and no publishers",
        |at| signed_otherwise(at, |_| String::new()),
        &["opened from its place"],
    ),
];
