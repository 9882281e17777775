//! What is found by the environment is neither run nor loaded where another user could have put something else there.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// Asks a process of this program to check the configuration that it says.
const ASK: &str = "MOONCAKE_TEST_CONFIG";
/// What else leads to Mooncake.
const OTHERS: [&str; 5] =
    ["VIRTUAL_ENV", "MOONCAKE_PYTHON", "MOONCAKE_TE_LIBRARY", "MOONCAKE_PRELOAD", "LD_LIBRARY_PATH"];
const REPLACED: &str = "could be replaced by others";

/// Not a test of its own: what runs with other variables.
#[test]
fn inside() {
    let Ok(config) = std::env::var(ASK) else { return };
    let checked = host_plugin_mooncake::check("transfer", &config);
    println!("SAID {:?}", checked.map_err(|error| error.message));
}

/// What a check says in a process in which this variable leads to Mooncake, and no other.
fn said(config: &str, variable: &str, leads: &Path) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["inside", "--exact", "--nocapture"]).env(ASK, config);
    for name in OTHERS {
        command.env_remove(name);
    }
    let output = command.env(variable, leads).output().unwrap();
    let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    let text = said.concat();
    assert!(text.contains("SAID Err"), "{text}");
    text
}

/// The only test of this process that starts others, which must not have its files open.
#[test]
fn what_every_user_could_replace_is_neither_run_nor_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let set = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    for path in ["env/bin", "packages/mooncake"] {
        std::fs::create_dir_all(at(path)).unwrap();
    }
    for path in ["", "env", "env/bin", "packages", "packages/mooncake"] {
        set(&at(path), 0o755);
    }
    let library = at("packages/mooncake/libtransfer_engine.so");
    std::fs::write(&library, "no library").unwrap();
    set(&library, 0o644);
    // An interpreter that leaves a mark, and says where its packages are.
    let answer = format!(
        r#"{{"version":[3,11,2],"executable":"/py","prefix":"/none","libdir":null,"soname":null,"multiarch":null,"packages":{:?},
"preloaded":[],"failed":[],"wheel":null,"engine":{{"error":"none"}},"store":{{"error":"none"}}}}"#,
        at("packages").display().to_string()
    );
    let mark = at("it-was-run");
    let script =
        format!("#!/bin/sh\n: > '{}'\nprintf '%s\\n' '{}'\n", mark.display(), answer.replace('\n', ""));
    for name in ["python", "python3"] {
        let python = at("env/bin").join(name);
        std::fs::write(&python, &script).unwrap();
        set(&python, 0o755);
    }
    let (env, bin, python) = (at("env"), at("env/bin"), at("env/bin/python"));
    let was_run = || std::fs::remove_file(&mark).is_ok();

    // A library among the packages of an interpreter that was found.
    let c = "backend = \"c\"";
    let fine = said(c, "VIRTUAL_ENV", &env);
    assert!(was_run() && fine.contains("libtransfer_engine.so") && !fine.contains(REPLACED), "{fine}");
    set(&at("packages"), 0o777);
    let refused = said(c, "VIRTUAL_ENV", &env);
    assert!(was_run() && refused.contains(&format!("libtransfer_engine.so {REPLACED}")), "{refused}");
    assert!(refused.contains("MOONCAKE_TE_LIBRARY, or as library in [plugin.mooncake]"), "{refused}");
    let named = said(c, "MOONCAKE_PYTHON", &python);
    assert!(was_run() && !named.contains(REPLACED), "{named}");
    set(&at("packages"), 0o755);

    // The interpreter itself.
    let wheel = "backend = \"python\"";
    set(&env, 0o777);
    for (variable, leads, to) in [("VIRTUAL_ENV", &env, "bin/python"), ("PATH", &bin, "bin/python3")] {
        let refused = said(wheel, variable, leads);
        assert!(!was_run() && refused.contains(&format!("{to} {REPLACED}")), "{variable}: {refused}");
        assert!(refused.contains("or name it in MOONCAKE_PYTHON"), "{refused}");
    }
    let named = said(wheel, "MOONCAKE_PYTHON", &python);
    assert!(was_run() && !named.contains(REPLACED), "the trap does not work: {named}");
}
