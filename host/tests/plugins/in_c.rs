//! Plugins in C and C++ are found, read, checked, loaded and tested as those in Rust are.

use std::path::Path;
use std::process::Command;

use host_tests::c_plugins::{Compiler, build, include};
use host_tests::cluster::{Cluster, Start};
use host_tests::plugin_files;
use host_tests::skip::skipped;

/// The fixtures, which keep their contract unless their configuration names a defect.
const SOURCES: [&str; 6] =
    ["transfer.c", "tier.c", "allocator.c", "transfer.cpp", "tier.cpp", "allocator.cpp"];

/// Runs `host plugins` with these arguments. Returns the exit code and the output.
fn host(arguments: &[&str], file: &Path) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
    let output = command.arg("plugins").args(arguments).arg(file).output().unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.code().unwrap_or(-1), said)
}

#[test]
fn plugins_in_c_and_cpp_keep_their_contract_as_each_compiler_builds_them() {
    let folder = tempfile::tempdir().unwrap();
    for compiler in Compiler::all() {
        for source in SOURCES {
            let file = build(source, compiler, &[], folder.path());
            let (code, said) = host(&["test", "--patience", "30"], &file);
            assert_eq!(code, 0, "{source} by {compiler:?}:\n{said}");
            assert!(said.contains(", 0 did not"), "{source} by {compiler:?}:\n{said}");
            let reaches = !said.contains("connect from another process answered");
            assert!(reaches, "{source} by {compiler:?} reaches no other process:\n{said}");
        }
    }
}

#[test]
fn a_plugin_in_c_says_what_it_is_without_running() {
    let folder = tempfile::tempdir().unwrap();
    let file = build("tier.c", Compiler::Gcc, &[], folder.path());
    let (code, said) = host(&["inspect"], &file);
    assert_eq!(code, 0, "{said}");
    for part in ["c-tier 0.1.0 (host.test.c.tier)", " by gcc ", "config     slots: integer, default 512"] {
        assert!(said.contains(part), "{part:?} is not in\n{said}");
    }
}

#[test]
fn what_a_plugin_in_c_refuses_is_told_in_its_own_words() {
    let folder = tempfile::tempdir().unwrap();
    let file = build("tier.c", Compiler::Gcc, &[], folder.path());
    let config = folder.path().join("config.toml");
    std::fs::write(&config, "slots = 0").unwrap();
    let (code, said) = host(
        &["test", "--case", "load", "--case", "tier-data", "--plugin-config", config.to_str().unwrap()],
        &file,
    );
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("slots is 0, it must be from 1 to 65536"), "{said}");
}

/// Compiles this text as a plugin and loads it.
fn load(text: &str) -> (i32, String) {
    let folder = tempfile::tempdir().unwrap();
    let manifest = folder.path().join("plugin.toml");
    let role = "[[role]]\nkind = \"tier\"\nmemory = [\"dram\"]\n";
    let plugin = "[plugin]\nid = \"host.test.c\"\nname = \"c\"\nversion = \"0.1.0\"\n";
    std::fs::write(&manifest, format!("manifest_version = 1\n\n{plugin}\n{role}")).unwrap();
    let (source, file) = (folder.path().join("plugin.c"), folder.path().join("plugin.so"));
    std::fs::write(&source, text.replace("@manifest@", &format!("{manifest:?}"))).unwrap();
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=c11", "-w", "-fPIC", "-shared", "-I"]).arg(include()).arg(&source).arg("-o").arg(&file);
    let output = gcc.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    host(&["test", "--case", "load", "--case", "tier-data"], &file)
}

#[test]
fn tables_that_are_not_what_the_header_declares_are_refused_by_name() {
    let start = "#include \"host_plugin.h\"\nHOST_PLUGIN_MANIFEST(@manifest@)\n";
    let none = "static int32_t open_none(const host_opening *o, void **i, host_error *e) { return 0; }\n";
    let wrong = [
        (
            "const host_plugin host_plugin_c = {.magic = \"HOSTPLG\", .size = sizeof(host_plugin)};",
            "HOST_PLUGIN_MAGIC",
        ),
        ("const host_plugin host_plugin_c = {HOST_PLUGIN_MAGIC, 1};", "says that it has 1 bytes"),
        (
            "const host_plugin host_plugin_c = {HOST_PLUGIN_MAGIC, sizeof(host_plugin)};",
            "begin host_plugin_c with HOST_PLUGIN_HEADER",
        ),
        ("const host_plugin host_plugin_c = {HOST_PLUGIN_HEADER};", "tier"),
        (
            "static const host_tier_role role = {.size = 0};\n\
             const host_plugin host_plugin_c = {HOST_PLUGIN_HEADER, .tier = &role};",
            "says that it has 0 bytes",
        ),
        (
            "static const host_tier_role role = {.size = sizeof role, .open = open_none};\n\
             const host_plugin host_plugin_c = {HOST_PLUGIN_HEADER, .tier = &role};",
            "host_tier_role has no function close",
        ),
        ("const int host_plugin_of_another_name = 1;", "does not export host_plugin_c"),
    ];
    for (text, part) in wrong {
        let (code, said) = load(&format!("{start}{none}{text}"));
        assert!(
            code == 2 && said.contains(part),
            "{part:?} is not in what is said of\n{text}\n\n{code}: {said}"
        );
    }
}

#[test]
fn plugins_in_c_have_no_error_that_the_address_sanitizer_finds() {
    // The sanitizer's library, and the one of C++ for exceptions, to which the host does not link.
    let libraries = ["libasan.so", "libstdc++.so.6"].map(|name| {
        let output = Command::new("gcc").arg(format!("-print-file-name={name}")).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    });
    let libraries = libraries.join(":");
    if !libraries.starts_with('/') {
        skipped("AddressSanitizer is not installed beside gcc");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for source in SOURCES {
        let flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"];
        let file = build(source, Compiler::Gcc, &flags, folder.path());
        let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
        command.args(["plugins", "test", "--patience", "30", "--memory-limit", "65536"]).arg(&file);
        // The host itself is not built with the sanitizer, so its library is preloaded.
        let output =
            command.env("LD_PRELOAD", &libraries).env("ASAN_OPTIONS", "detect_leaks=0").output().unwrap();
        let said =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && !said.contains("Sanitizer"), "{source}:\n{said}");
    }
}

/// The lines of `tests/c/defects.txt`: role, defect, the cases that find it, and words of one of these cases' texts.
fn defects() -> Vec<[&'static str; 4]> {
    let table = include_str!("../../../tests/c/defects.txt");
    let lines = table.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let fields = |line: &'static str| line.split(" | ").collect::<Vec<_>>().try_into();
    lines.map(|line| fields(line).unwrap_or_else(|_| panic!("{line:?} has four fields"))).collect()
}

/// Runs the kit on a fixture with this defect. Returns `None` if it finds the defect, else what is wrong with its reports.
fn overlooked([role, defect, cases, text]: [&str; 4], file: &Path, folder: &Path) -> Option<String> {
    let config = folder.join(format!("{role}-{}.toml", defect.replace(' ', "-")));
    let text_of = match defect.split_once(" in ") {
        Some((throws, method)) => format!("throws = {throws:?}\nin = {method:?}\n"),
        None => format!("defect = {defect:?}\n"),
    };
    std::fs::write(&config, text_of).unwrap();
    let mut arguments = vec!["test", "--json", "--plugin-config", config.to_str().unwrap()];
    for case in cases.split(", ") {
        arguments.extend(["--case", case]);
    }
    let (code, said) = host(&arguments, file);
    let start = said.find('[').unwrap_or(0);
    let mut reports = serde_json::Deserializer::from_str(&said[start..]).into_iter::<serde_json::Value>();
    let reports = reports.next().and_then(Result::ok).unwrap_or_default();
    let reports: Vec<_> = reports.as_array().into_iter().flatten().collect();
    let fails = |case: &str| {
        let of = |report: &&&serde_json::Value| {
            report["case"] == case && report["status"] != "pass" && report["status"] != "skip"
        };
        reports.iter().any(|report| of(&report))
    };
    let tells = reports.iter().any(|report| report["text"].as_str().is_some_and(|said| said.contains(text)));
    let missing: Vec<&str> = cases.split(", ").filter(|case| !fails(case)).collect();
    (code != 2 || !missing.is_empty() || !tells)
        .then(|| format!("{role} with the defect {defect}: code {code}, {missing:?} do not fail, or {text:?} is not in\n{said}"))
}

#[test]
fn every_defect_of_the_plugins_in_c_is_named_by_the_kit() {
    let folder = tempfile::tempdir().unwrap();
    let built = SOURCES.map(|source| {
        let (role, language) = source.split_once('.').unwrap();
        let role = if language == "cpp" { format!("cpp-{role}") } else { role.to_owned() };
        (role, build(source, Compiler::Gcc, &[], folder.path()))
    });
    let defects = defects();
    assert!(defects.len() >= 150, "{} defects", defects.len());
    let next = std::sync::atomic::AtomicUsize::new(0);
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let work = || {
            let mut wrong = Vec::new();
            while let Some(defect) = defects.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                let (_, file) =
                    built.iter().find(|(role, _)| *role == defect[0]).expect("a role that is built");
                wrong.extend(overlooked(*defect, file, folder.path()));
            }
            wrong
        };
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), defects.len(), wrong.join("\n\n"));
}

/// The tokens of three prompts, asked twice, from a prefill and a decode worker with these plugins.
fn served(plugins: &Path, flags: &[&str]) -> Vec<Vec<u64>> {
    let common =
        ["--executor", "synthetic", "--pool-pages", "64", "--plugins-dir", plugins.to_str().unwrap()];
    let flags = common.iter().chain(flags).map(|flag| (*flag).to_owned()).collect();
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    let cluster = Cluster::start(&Start { program, flags, config: String::new(), workers: 2 });
    let prompt = |number: u32| (0..160).map(|token| token * (number + 3) % 200).collect::<Vec<u32>>();
    let answers = (0..6).map(|number| cluster.generate(&prompt(number % 3), 8).unwrap().tokens).collect();
    cluster.wait("all pages to be free", || cluster.all_free());
    answers
}

#[test]
fn a_conversation_is_served_over_plugins_in_c_and_in_cpp_as_over_shared_memory() {
    let shm = plugin_files::directory(&["shm"]);
    let expected = served(shm.path(), &["--plugins", "shm"]);
    for language in ["c", "cpp"] {
        let folder = tempfile::tempdir().unwrap();
        for role in ["transfer", "tier", "allocator"] {
            let _file = build(&format!("{role}.{language}"), Compiler::Gcc, &[], folder.path());
        }
        let [transfer, tier, allocator] =
            ["transfer", "tier", "allocator"].map(|role| format!("{language}-{role}"));
        let cache = ["--prefill-radix-cache", "--hierarchical-cache", "--hicache-memory", "16MiB"];
        let named = ["--plugins", &transfer, "--hicache-storage", &tier, "--allocator", &allocator];
        let flags: Vec<&str> = cache.into_iter().chain(named).collect();
        assert_eq!(served(folder.path(), &flags), expected, "{language}");
    }
}
