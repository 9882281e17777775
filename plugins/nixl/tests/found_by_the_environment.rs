//! A library that is found by the environment is not loaded where another user could have put something else there.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// Asks a process of this program to look for NIXL.
const ASK: &str = "NIXL_TEST_ASK";
const REPLACED: &str = "could be replaced by others";

/// Not a test of its own: what runs with other variables.
#[test]
fn inside() {
    if std::env::var_os(ASK).is_some() {
        println!("SAID {:?}", host_plugin_nixl::check("transfer", "").map_err(|error| error.message));
    }
}

/// What a check says in a process in which this variable leads to NIXL, and no other.
fn said(variable: &str, leads: &Path) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["inside", "--exact", "--nocapture"]).env(ASK, "").env("PATH", "/nowhere");
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "NIXL_LIBRARY", "LD_LIBRARY_PATH", "UCX_TLS"] {
        command.env_remove(name);
    }
    let output = command.env(variable, leads).output().unwrap();
    let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    let text = said.concat();
    assert!(text.contains("SAID Err"), "{text}");
    text
}

#[test]
fn what_every_user_could_replace_is_not_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let set = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    let packages = at("env/lib/python3.11/site-packages/nixl_cu12.libs");
    for path in [&at("env/bin"), &packages] {
        std::fs::create_dir_all(path).unwrap();
    }
    let library = packages.join("libnixl_capi.so");
    for path in [&library, &at("env/bin/python3")] {
        std::fs::write(path, "no library and no program").unwrap();
        set(path, 0o755);
        path.ancestors().skip(1).take_while(|above| above.starts_with(folder.path())).for_each(|above| {
            set(above, 0o755);
        });
    }
    let (env, bin) = (at("env"), at("env/bin"));
    let shown = library.display().to_string();
    let ways = [("VIRTUAL_ENV", &env), ("PATH", &bin)];
    for (variable, leads) in ways {
        let fine = said(variable, leads);
        assert!(fine.contains(&shown) && !fine.contains(REPLACED), "{variable}: {fine}");
    }
    set(&env, 0o777);
    for (variable, leads) in ways {
        let refused = said(variable, leads);
        assert!(refused.contains(&format!("{shown} {REPLACED}")), "{variable}: {refused}");
        assert!(refused.contains("or name it in NIXL_LIBRARY"), "{refused}");
    }
    let named = said("NIXL_LIBRARY", &library);
    assert!(named.contains(&shown) && !named.contains(REPLACED), "{named}");
}
