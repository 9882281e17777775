//! The probe of an interpreter runs no file of the current directory.

#![allow(clippy::unwrap_used)]

use std::process::Command;

/// The only test of this process, whose directory it changes.
#[test]
fn a_check_in_a_folder_of_others_runs_none_of_their_files() {
    let folder = tempfile::tempdir().unwrap();
    let marker = folder.path().join("it-was-run");
    let hostile = format!("open({:?}, 'w').close()\n", marker.display().to_string());
    // Modules that the probe imports, and one that Python itself looks for when it starts.
    for module in ["json", "glob", "ctypes", "sitecustomize", "mooncake"] {
        std::fs::write(folder.path().join(format!("{module}.py")), &hostile).unwrap();
    }
    let careless = Command::new("python3").args(["-c", "import json"]).current_dir(folder.path()).output();
    careless.unwrap();
    assert!(marker.exists(), "the trap does not work");
    std::fs::remove_file(&marker).unwrap();

    std::env::set_current_dir(folder.path()).unwrap();
    let config = "backend = \"python\"\npython = \"python3\"";
    for role in ["transfer", "tier"] {
        let checked = host_plugin_mooncake::check(role, config);
        assert!(!marker.exists(), "the probe of the {role} role ran a file of the current directory");
        // Whether Mooncake is there or not, the interpreter was asked, and answered.
        if let Err(error) = checked {
            let answers = ["No module named", "ImportError", "needs 0.3", "no shared library"];
            assert!(answers.iter().any(|text| error.message.contains(text)), "{error}");
        }
    }
}
