//! The NIXL plugin as a storage tier, over the real NIXL: damaged values are never returned, and values outlive the process that
//! stored them.

use std::path::{Path, PathBuf};
use std::process::Command;

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::*;
use host_plugins::{Catalog, open_tier};
use host_tests::skip::skipped;
use host_tests::{nixl, plugin_files};

use super::place::{PAGE, PAGES, key, name, place};

#[test]
fn the_tier_cases_of_the_conformance_kit_pass_buffered_and_direct() {
    for more in ["", "direct = true\n"] {
        let Some(place) = place(more) else { return };
        let skipped = place.kit(&place.config);
        assert!(skipped.is_empty(), "{skipped:?}");
    }
}

#[test]
fn what_one_process_stored_the_next_one_finds_whole() {
    let Some(place) = place("") else { return };
    let tier = place.open();
    tier.fill();
    assert!(tier.put(0..PAGES).iter().all(|status| *status == STORED));
    assert_eq!((place.files().len(), place.unfinished()), (PAGES, 0));
    tier.tier.shutdown(60_000).unwrap();
    drop(tier);
    let tier = place.open();
    tier.bytes().fill(0);
    assert!(tier.get(0..PAGES).iter().all(|status| *status == FOUND));
    assert!((0..PAGES).all(|page| tier.is_right(page)));
    let usage = tier.tier.usage().unwrap();
    assert_eq!((usage.values, usage.bytes), (PAGES as u64, (PAGES * PAGE) as u64));
}

#[test]
fn damaged_pages_are_an_error_and_then_missing_and_never_a_success_and_their_neighbours_are_found() {
    let Some(place) = place("") else { return };
    let tier = place.open();
    tier.fill();
    let put = |page: usize| assert_eq!(tier.put(page..page + 1), [STORED]);
    (0..12).for_each(put);
    place.edit(0, &|bytes| bytes.truncate(PAGE / 2));
    place.edit(1, &Vec::clear);
    place.edit(2, &|bytes| bytes.truncate(PAGE + 31));
    place.edit(3, &|bytes| bytes.push(0));
    place.edit(4, &|bytes| bytes[PAGE / 3] ^= 1);
    place.edit(5, &|bytes| bytes[PAGE + 16] ^= 1);
    place.edit(6, &|bytes| drop(bytes.drain(..4096)));
    std::fs::copy(place.file(8), place.file(7)).unwrap();
    tier.bytes().fill(0);
    let ends = tier.get(0..12);
    assert_eq!(ends[..8], [ErrorCode::IO.0; 8], "{ends:?}");
    // Files whose size or trailer shows the damage touch no memory.
    assert!(tier.bytes()[..4 * PAGE].iter().all(|byte| *byte == 0));
    assert_eq!(ends[8..], [FOUND; 4]);
    assert!((8..12).all(|page| tier.is_right(page)));
    // The damaged pages are removed, and can be stored again.
    assert_eq!(tier.get(0..8), [MISSING; 8]);
    tier.fill();
    assert_eq!(tier.put(0..8), [STORED; 8]);
    tier.bytes().fill(0);
    assert_eq!(tier.get(0..8), [FOUND; 8]);
    assert!((0..8).all(|page| tier.is_right(page)));
}

#[test]
fn verify_beside_a_worker_names_what_is_damaged_and_removes_nothing() {
    let Some(mut place) = place("") else { return };
    let worker = place.open();
    worker.fill();
    assert_eq!(worker.put(0..12), [STORED; 12]);
    let (code, said, error) = place.host(&["verify"]);
    assert!(code == 0 && said.contains("good       12 values"), "{said}{error}");
    place.edit(0, &|bytes| bytes.truncate(PAGE / 2));
    place.edit(1, &Vec::clear);
    place.edit(2, &|bytes| bytes.truncate(32));
    place.edit(3, &|bytes| bytes[PAGE / 3] ^= 1);
    place.edit(4, &|bytes| bytes[PAGE + 16] ^= 1);
    let contents = || {
        let files = place.files().into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap()));
        files.collect::<std::collections::BTreeMap<_, _>>()
    };
    let before = contents();
    for _ in 0..2 {
        let (code, said, error) = place.host(&["verify"]);
        assert!(code == 1 && error.contains("5 damaged"), "{code} {said}{error}");
        assert!(said.contains("good       7 values") && said.contains("missing    0"), "{said}{error}");
        let named = |page: &usize| said.contains(&format!("damaged    {}", name(*page)));
        assert_eq!((0..12).filter(named).collect::<Vec<_>>(), [0, 1, 2, 3, 4], "{said}");
    }
    assert!(contents() == before, "verify changed the files of a worker");
    // A read-only instance stores and deletes no pages.
    place.config.insert_str(0, "read_only = true\n");
    let reader = place.open();
    reader.fill();
    assert_eq!(reader.put(20..22), [ErrorCode::UNSUPPORTED.0; 2]);
    let keys = [key(0), key(5)];
    assert_eq!(reader.finish(reader.tier.delete(Tag(3), &keys), 2), [ErrorCode::UNSUPPORTED.0; 2]);
    assert_eq!(reader.get(4..7), [ErrorCode::IO.0, FOUND, FOUND]);
    assert!(place.files().len() == 12 && place.unfinished() == 0);
    // A worker removes the damaged pages that it meets, and can store them again.
    assert_eq!(worker.get(0..5), [ErrorCode::IO.0; 5]);
    worker.fill();
    assert_eq!((worker.put(0..5), worker.get(0..12)), (vec![STORED; 5], vec![FOUND; 12]));
    place.config = place.config.replace("read_only = true\n", "");
    let (code, said, error) = place.host(&["verify"]);
    assert!(code == 0 && said.contains("good       12 values"), "{said}{error}");
    let (code, said, error) = place.host(&["prune", "--all", "--yes"]);
    assert!(code == 0 && said == "removed 12 values, 1.1 MiB\n", "{said}{error}");
}

#[test]
fn a_page_of_another_length_is_missing() {
    let Some(place) = place("") else { return };
    let tier = place.open();
    tier.fill();
    assert_eq!(tier.put(3..4), [STORED]);
    let mut short = tier.pages(3..4);
    short[0].length -= 1;
    assert_eq!(tier.finish(tier.tier.get(Tag(1), &short), 1), [MISSING]);
    assert_eq!(tier.get(3..4), [FOUND]);
}

#[test]
fn what_cannot_be_written_is_an_error_and_leaves_nothing() {
    let Some(place) = place("") else { return };
    let tier = place.open();
    tier.fill();
    // A folder lies at the path of page 2. The put fails only when the page gets its name.
    std::fs::create_dir(place.pages.path().join(format!("nixl-v1/02/{}.page", name(2)))).unwrap();
    let ends = tier.put(0..6);
    assert!(ends[2] < 0 && ends.iter().filter(|status| **status == STORED).count() == 5, "{ends:?}");
    assert_eq!(place.unfinished(), 0);
}

#[test]
fn a_page_that_the_kernel_refuses_fails_alone_and_the_others_of_its_request_are_found() {
    let Some(place) = place("") else { return };
    let tier = place.open();
    tier.fill();
    assert_eq!(tier.put(0..5), [STORED; 5]);
    tier.bytes().fill(0);
    let protect = |flags| {
        let at = tier.memory.address().as_ptr().wrapping_add(2 * PAGE);
        // SAFETY: these are whole pages of the mapping. Only the kernel touches them while they cannot be written.
        unsafe { rustix::mm::mprotect(at.cast(), PAGE, flags) }.unwrap();
    };
    protect(rustix::mm::MprotectFlags::READ);
    let ends = tier.get(0..5);
    protect(rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE);
    assert_eq!(ends, [FOUND, FOUND, ErrorCode::IO.0, FOUND, FOUND]);
    assert!([0, 1, 3, 4].into_iter().all(|page| tier.is_right(page)));
    assert_eq!(tier.get(0..5), [FOUND; 5]);
}

#[test]
fn check_says_what_is_missing_for_the_tier() {
    let Some(library) = nixl::library() else { return };
    let plugins = plugin_files::directory(&["nixl"]);
    let catalog = Catalog::scan([plugins.path()]);
    let open = |config: &str| {
        let opening = Opening { name: "t".into(), config: config.into() };
        open_tier(catalog.find("nixl").unwrap(), &opening).err().unwrap().to_string()
    };
    let library = format!("library = {:?}\n", library.display().to_string());
    let check = |plugin_dir: Option<&Path>, config: &str| {
        let file = plugins.path().join("host.toml");
        std::fs::write(&file, config).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
        command.args(["plugins", "check", "--executor", "synthetic", "--plugins", "nixl", "--plugins-dir"]);
        command.arg(plugins.path()).args(["--hierarchical-cache", "--decode-radix-cache"]);
        command.args(["--hicache-storage", "nixl"]).arg("--config").arg(file).env_remove("NIXL_PLUGIN_DIR");
        let output = command.envs(plugin_dir.map(|dir| ("NIXL_PLUGIN_DIR", dir))).output().unwrap();
        let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
        (output.status.code().unwrap(), said.concat())
    };
    // Without `[plugin.nixl.storage]` the table is right for a plugin that only transfers pages. So the check must open the tier.
    let table = format!("[plugin.nixl]\n{library}");
    let (code, said) = check(None, &table);
    assert!(code == 2 && said.contains("set directory in [plugin.nixl.storage]"), "{code} {said}");
    // A NIXL without its storage plugin.
    let lacking = plugins.path().join("lacking");
    std::fs::create_dir(&lacking).unwrap();
    std::fs::write(lacking.join("libplugin_UCX.so"), "").unwrap();
    let (code, said) =
        check(Some(&lacking), &format!("{table}[plugin.nixl.storage]\ndirectory = \"/tmp\"\n"));
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("has no libplugin_POSIX.so, but UCX"), "{said}");
    let said = open(&library);
    assert!(said.contains("directory") && said.contains("[plugin.nixl.storage]"), "{said}");
    let said = open(&format!("{library}[storage]\ndirectory = \"/tmp\"\nbackend = \"GDS\""));
    assert!(said.contains("GDS") && said.contains("POSIX") && said.contains("OBJ"), "{said}");
    for (more, says) in [("", "cannot hold pages"), ("read_only = true\n", "has no pages to read")] {
        let said = open(&format!("{library}{more}[storage]\ndirectory = \"/proc/nowhere\""));
        assert!(said.contains(&format!("/proc/nowhere {says}")), "{said}");
    }
}

#[test]
fn a_nixl_whose_own_plugins_are_one_folder_up_is_told_where() {
    let Some(library) = nixl::library() else { return };
    let Some(place) = place("") else { return };
    // The wheel's files in the layout of an install for several architectures, in which NIXL does not find its plugins.
    let install = tempfile::tempdir().unwrap();
    let (lib, home) = (install.path().join("lib"), library.parent().unwrap());
    let x86 = lib.join("x86");
    std::fs::create_dir_all(&x86).unwrap();
    let link = |from: PathBuf, to: PathBuf| std::os::unix::fs::symlink(from, to).unwrap();
    for file in std::fs::read_dir(home).unwrap().map(|file| file.unwrap().path()) {
        let to = if file.ends_with("plugins") { &lib } else { &x86 };
        link(file.clone(), to.join(file.file_name().unwrap()));
    }
    // Libraries of other projects that the wheel brings, where both NIXL's libraries and its plugins look for them.
    for folder in std::fs::read_dir(home.parent().unwrap()).unwrap().map(|folder| folder.unwrap().path()) {
        if folder.extension().is_some_and(|extension| extension == "libs") && folder != home {
            link(folder.clone(), lib.join(folder.file_name().unwrap()));
            link(folder.clone(), install.path().join(folder.file_name().unwrap()));
        }
    }
    let file = install.path().join("config.toml");
    let ours = x86.join("libnixl_capi.so").display().to_string();
    let config = place.config.replace(&library.display().to_string(), &ours);
    assert!(config.contains(&ours), "{config}");
    std::fs::write(&file, config).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["plugins", "test", "--patience", "30", "--case", "tier-data", "--plugin-config"])
        .args([&file, &plugin_files::plugin("nixl")])
        .env_remove("NIXL_PLUGIN_DIR")
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    assert!(output.status.success() && said[0].contains("tier-data"), "{said:?}");
}

#[test]
fn a_disk_that_is_full_refuses_puts_by_name_and_takes_them_again_when_it_has_room() {
    if nixl::library().is_none() {
        return;
    }
    let above = tempfile::tempdir().unwrap();
    let script = "set -e; mount -t tmpfs -o size=3m,mode=700 tmpfs \"$NIXL_FULL\"; exec \"$0\" tier::inside --exact --nocapture";
    let output = Command::new("unshare")
        .args(["-Urm", "bash", "-c", script])
        .arg(std::env::current_exe().unwrap())
        .env("NIXL_FULL", above.path())
        .output();
    let Ok(output) = output else { return skipped("there is no unshare") };
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    match said.contains("INSIDE") {
        true => assert!(output.status.success() && said.contains("INSIDE DONE"), "{said}"),
        false => skipped(&format!("nothing can be mounted here: {said}")),
    }
}

/// Not a test of its own: another test runs it in a process with a small file system mounted.
#[test]
fn inside() {
    let Some(disk) = std::env::var_os("NIXL_FULL").map(PathBuf::from) else { return };
    println!("INSIDE");
    let mut place = place("").unwrap();
    place.pages = tempfile::tempdir_in(disk).unwrap();
    let library = nixl::config().unwrap();
    place.config = format!(
        "{library}[storage]\nfree_floor_mib = 0\ndirectory = {:?}\n",
        place.pages.path().display().to_string()
    );
    let tier = place.open();
    tier.fill();
    let ends = tier.put(0..PAGES);
    let stored = ends.iter().filter(|end| **end == STORED).count();
    let full = ends.iter().filter(|end| **end == ErrorCode::NO_RESOURCE.0).count();
    assert!(stored > 0 && full > 0 && stored + full == PAGES, "{ends:?}");
    assert_eq!((place.files().len(), place.unfinished()), (stored, 0));
    tier.bytes().fill(0);
    let found = tier.get(0..PAGES);
    assert!(found.iter().zip(&ends).all(|(found, end)| (*found == FOUND) == (*end == STORED)), "{found:?}");
    assert!((0..PAGES).all(|page| found[page] != FOUND || tier.is_right(page)));
    place.files().iter().take(2).for_each(|file| std::fs::remove_file(file).unwrap());
    let refused = ends.iter().position(|end| *end != STORED).unwrap();
    tier.fill();
    assert_eq!(tier.put(refused..refused + 1), [STORED]);
    println!("INSIDE DONE");
}
