//! Finds the users that could replace a plugin, or a library or program that a plugin needs, with other code.
//!
//! Such code runs with all rights of this process. So a user that can change its file, or a directory on the way to it, has
//! these rights too. The rule: *code must not be easier to replace than the program itself.* Changes by these users are accepted:
//!
//! - Root, and the user that runs the host.
//! - Owners of the program's file or a directory above it, and groups that may write these. They can replace the
//!   program, so refusing a file beside it would protect nothing. This rule lets a checkout work under any umask, and in a
//!   container whose root runs files that the user of a bind mount owns.
//!
//! If the group that may write is the process's own or root's, the result is a warning: under umask 002 it can be a user's
//! private group, which has no other member. The file does not tell whether its group is private. All other write access is
//! refused. In a sticky directory, such as /tmp, no user can replace another user's file, so only the directory's owner
//! counts. Access control lists show in the group's bits.
//!
//! The way to a file is walked as the system walks it: a link leads on from where it lies, and counts like the directories it
//! leads through. Its owner may put another one in its place, at least in a sticky directory. The link's own bits say
//! nothing.
//!
//! [`Folder`] is the same care for data: a folder in which no other user may put a file in another's place. [`read_up_to`] reads
//! files of which another user chose the length and the kind.

mod folder;
mod reading;

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

pub use folder::{Access, Folder, plain_file};
pub use reading::{read_up_to, regular};

const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;
const STICKY: u32 = 0o1000;
const ROOT: u32 = 0;
/// Most links on the way to a file. The system has the same limit.
const MAX_LINKS: usize = 40;

/// The properties of a file or directory that decide which users can replace it or its content.
#[derive(Clone, Copy, Debug)]
struct FileAttributes {
    user: u32,
    group: u32,
    mode: u32,
    directory: bool,
}

impl FileAttributes {
    fn of(metadata: &Metadata) -> Self {
        Self {
            user: metadata.uid(),
            group: metadata.gid(),
            // All permission bits of a link are set, and they grant nothing.
            mode: if metadata.is_symlink() { 0 } else { metadata.permissions().mode() },
            directory: metadata.is_dir(),
        }
    }

    /// Whether these bits let other users replace the file, or files in the directory.
    fn lets(&self, bits: u32) -> bool {
        self.mode & bits != 0 && !(self.directory && self.mode & STICKY != 0)
    }
}

/// The users and groups that may change the program, and those that it runs as.
#[derive(Debug, Default)]
struct Trusted {
    users: BTreeSet<u32>,
    groups: BTreeSet<u32>,
    all_users: bool,
    own_groups: [u32; 2],
}

impl Trusted {
    fn of_process() -> &'static Self {
        static OF_PROCESS: OnceLock<Trusted> = OnceLock::new();
        OF_PROCESS.get_or_init(|| {
            let places = std::fs::read_link("/proc/self/exe").map(|program| {
                // The path in the link may not exist any more. The link itself still leads to the file.
                let file = std::fs::metadata("/proc/self/exe").ok();
                let above = program.ancestors().skip(1).filter_map(|path| std::fs::metadata(path).ok());
                file.into_iter()
                    .chain(above)
                    .map(|metadata| FileAttributes::of(&metadata))
                    .collect::<Vec<_>>()
            });
            let user = rustix::process::geteuid().as_raw();
            let group = rustix::process::getegid().as_raw();
            Self::of(user, group, &places.unwrap_or_default())
        })
    }

    fn of(user: u32, group: u32, program: &[FileAttributes]) -> Self {
        let mut trusted = Self { own_groups: [group, ROOT], ..Self::default() };
        trusted.users.extend([ROOT, user]);
        for place in program {
            trusted.users.insert(place.user);
            trusted.groups.extend(place.lets(GROUP_WRITES).then_some(place.group));
            trusted.all_users |= place.lets(OTHERS_WRITE);
        }
        trusted
    }
}

/// Problems with a file and the way to it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Problems that make the file refused, unless the operator accepts them.
    pub refused: Vec<String>,
    /// Problems that are reported and accepted.
    pub warned: Vec<String>,
}

/// Checks an open file, and every directory and link on the way to it.
///
/// # Errors
/// When a part of the way cannot be read.
pub fn check(path: &Path, file: &Metadata) -> io::Result<Findings> {
    let (resolved, mut places) = way_to(path)?;
    places.insert(0, (resolved, FileAttributes::of(file)));
    Ok(judge(Trusted::of_process(), &places))
}

/// Checks that this process may run a program or library that it found, and that the operator has not named.
///
/// # Errors
/// A sentence about each user or group that could replace the file, with what to do.
pub fn may_run(path: &Path) -> Result<(), String> {
    let found = std::fs::metadata(path).and_then(|file| check(path, &file));
    let found = found.map_err(|error| format!("{} cannot be looked at: {error}", path.display()))?;
    match found.refused.as_slice() {
        [] => Ok(()),
        refused => Err(format!("{} could be replaced by others: {}", path.display(), refused.join("; "))),
    }
}

/// The file that the system would run for a name without a slash.
#[must_use]
pub fn on_the_path(name: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let runs = |path: &PathBuf| {
        std::fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(runs)
}

/// Resolves a path. Returns its end, and the directories and links that the system passes on the way there, each once.
fn way_to(path: &Path) -> io::Result<(PathBuf, Vec<(PathBuf, FileAttributes)>)> {
    let path = std::path::absolute(path)?;
    // The remaining steps of the way, the next step last.
    let mut left: Vec<PathBuf> = steps(&path).collect();
    let (mut at, mut places, mut links) = (PathBuf::from("/"), Vec::new(), 0);
    while let Some(step) = left.pop() {
        let next = match step.components().next() {
            Some(Component::RootDir) => PathBuf::from("/"),
            // `..` leads from where the link has led, not from the link.
            Some(Component::ParentDir) => at.parent().unwrap_or(&at).to_owned(),
            _ => at.join(&step),
        };
        let metadata = std::fs::symlink_metadata(&next)?;
        if metadata.is_symlink() {
            links += 1;
            if links > MAX_LINKS {
                return Err(io::Error::other(format!("more than {MAX_LINKS} links lead to it")));
            }
            left.extend(steps(&std::fs::read_link(&next)?));
        } else {
            at.clone_from(&next);
        }
        if (metadata.is_symlink() || metadata.is_dir()) && places.iter().all(|(seen, _)| *seen != next) {
            places.push((next, FileAttributes::of(&metadata)));
        }
    }
    Ok((at, places))
}

/// The components of a path, the last one first.
fn steps(path: &Path) -> impl Iterator<Item = PathBuf> {
    let steps = path.components().filter(|step| !matches!(step, Component::CurDir));
    steps.map(|step| PathBuf::from(step.as_os_str())).rev().collect::<Vec<_>>().into_iter()
}

/// Whether every user may change a file, while not every user may change the program.
#[must_use]
pub fn every_user_may_change(file: &Metadata) -> bool {
    FileAttributes::of(file).lets(OTHERS_WRITE) && !Trusted::of_process().all_users
}

/// Whether a file or folder belongs to this process's user, and no other may write it.
#[must_use]
pub fn only_this_user_may_write(place: &Metadata) -> bool {
    let place = FileAttributes::of(place);
    place.user == rustix::process::geteuid().as_raw() && !place.lets(GROUP_WRITES | OTHERS_WRITE)
}

fn judge(trusted: &Trusted, places: &[(PathBuf, FileAttributes)]) -> Findings {
    let mut findings = Findings::default();
    for (path, place) in places {
        let shown = path.display();
        if !trusted.users.contains(&place.user) {
            let user = place.user;
            let text =
                format!("{shown} belongs to user {user}, which may change it: chown it to root or yourself");
            findings.refused.push(text);
        }
        if place.lets(OTHERS_WRITE) && !trusted.all_users {
            let text = format!("{shown} may be changed by every user of this machine: chmod o-w it");
            findings.refused.push(text);
        }
        if place.lets(GROUP_WRITES) && !trusted.groups.contains(&place.group) {
            let text = format!("{shown} may be changed by group {}: chmod g-w it", place.group);
            let own = trusted.own_groups.contains(&place.group);
            if own { findings.warned.push(text) } else { findings.refused.push(text) }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: u32 = 1000;
    const OTHER: u32 = 1001;

    fn file(user: u32, group: u32, mode: u32) -> FileAttributes {
        FileAttributes { user, group, mode, directory: false }
    }

    fn directory(user: u32, group: u32, mode: u32) -> FileAttributes {
        FileAttributes { user, group, mode, directory: true }
    }

    /// Numbers of refusals and warnings for a plugin, given the places of the program and of the plugin.
    fn found(user: u32, program: &[FileAttributes], plugin: &[FileAttributes]) -> (usize, usize) {
        let places: Vec<_> = plugin.iter().map(|place| (PathBuf::from("/p"), *place)).collect();
        let findings = judge(&Trusted::of(user, user, program), &places);
        (findings.refused.len(), findings.warned.len())
    }

    #[test]
    fn a_plugin_may_not_be_easier_to_replace_than_the_program() {
        let installed = [file(0, 0, 0o755), directory(0, 0, 0o755)];
        let checkout_022 = [file(ME, ME, 0o755), directory(ME, ME, 0o755), directory(0, 0, 0o755)];
        let checkout_002 = [file(ME, ME, 0o775), directory(ME, ME, 0o775), directory(0, 0, 0o755)];
        let shared = [file(0, 0, 0o755), directory(0, 50, 0o775)];
        for (what, user, program, plugin, expected) in [
            ("all of root's", ME, &installed[..], &installed[..], (0, 0)),
            ("my own, program of root's", ME, &installed, &checkout_022, (0, 0)),
            ("my own under umask 002, program of root's", ME, &installed, &checkout_002, (0, 2)),
            ("both in a checkout under umask 022", ME, &checkout_022, &checkout_022, (0, 0)),
            ("both in a checkout under umask 002", ME, &checkout_002, &checkout_002, (0, 0)),
            ("root of a container, both in a user's checkout", 0, &checkout_002, &checkout_002, (0, 0)),
            ("root, plugin in a user's home", 0, &installed, &checkout_022, (2, 0)),
            ("a service, plugin in another user's home", OTHER, &installed, &checkout_022, (2, 0)),
            ("a directory of a shared group", ME, &installed, &shared, (1, 0)),
            ("a directory of a group that may replace the program", ME, &shared, &shared, (0, 0)),
            ("in /tmp", ME, &installed, &[file(ME, ME, 0o755), directory(0, 0, 0o1777)], (0, 0)),
            (
                "in /tmp, of another",
                ME,
                &installed,
                &[file(OTHER, OTHER, 0o755), directory(0, 0, 0o1777)],
                (1, 0),
            ),
            ("a file that every user may change", ME, &checkout_022, &[file(ME, ME, 0o666)], (1, 1)),
            ("a sticky file is no sticky directory", ME, &installed, &[file(ME, ME, 0o1777)], (1, 1)),
            (
                "a directory that every user may change",
                ME,
                &installed,
                &[file(ME, ME, 0o644), directory(0, 0, 0o777)],
                (1, 1),
            ),
        ] {
            assert_eq!(found(user, program, plugin), expected, "{what}");
        }
    }

    #[test]
    fn every_directory_and_link_on_the_way_is_looked_at() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let at = |name: &str| root.join(name);
        for directory in ["plugins", "between/deep", "real"] {
            std::fs::create_dir_all(at(directory)).unwrap();
        }
        std::fs::write(at("real/x.so"), "").unwrap();
        let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, at(name)).unwrap();
        // A relative link leads to a link in another directory. That link passes an absolute link, which goes through a third
        // directory and back.
        link("../between/x.so", "plugins/x.so");
        link(at("between/deep/../../real").to_str().unwrap(), "between/folder");
        link("folder/x.so", "between/x.so");
        let (resolved, places) = way_to(&at("plugins/x.so")).unwrap();
        assert_eq!(resolved, at("real/x.so"));
        let names: BTreeSet<PathBuf> = places.iter().map(|(path, _)| path.clone()).collect();
        let expected =
            ["plugins", "plugins/x.so", "between", "between/x.so", "between/folder", "between/deep", "real"];
        let expected: BTreeSet<PathBuf> =
            expected.map(at).into_iter().chain(root.ancestors().map(Path::to_owned)).collect();
        assert_eq!(names, expected);

        // `between` is on the way, but neither in the link's name nor in the path of the target.
        let refused = || judge(&Trusted::of(ME, ME, &[]), &way_to(&at("plugins/x.so")).unwrap().1).refused;
        let open = |mode| std::fs::set_permissions(at("between"), PermissionsExt::from_mode(mode)).unwrap();
        let of_between = |found: Vec<String>| {
            found.iter().any(|text| {
                text.starts_with(&format!("{} may be changed by every user", at("between").display()))
            })
        };
        open(0o777);
        assert!(of_between(refused()));
        open(0o755);
        assert!(!of_between(refused()));

        link("loop.so", "real/loop.so");
        assert!(way_to(&at("real/loop.so")).unwrap_err().to_string().contains("40 links"));
    }

    #[test]
    fn what_every_user_may_change_is_not_run_and_the_sentence_says_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        std::fs::write(&program, "").unwrap();
        let set =
            |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        set(&program, 0o755);
        set(folder.path(), 0o755);
        let trusted = &Trusted::of(rustix::process::geteuid().as_raw(), ME, &[]);
        let refused = || {
            let (resolved, mut places) = way_to(&program).unwrap();
            places.insert(0, (resolved, FileAttributes::of(&std::fs::metadata(&program).unwrap())));
            judge(trusted, &places).refused
        };
        assert_eq!(refused(), [""; 0]);
        set(&program, 0o757);
        assert!(refused()[0].contains("may be changed by every user of this machine: chmod o-w it"));
        set(&program, 0o755);
        set(folder.path(), 0o777);
        assert!(refused()[0].starts_with(&folder.path().display().to_string()));
        assert!(may_run(&folder.path().join("nothing")).unwrap_err().contains("cannot be looked at"));
    }

    #[test]
    fn only_the_owner_of_a_link_counts() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        // When root runs the test, root gives the link to another user, because root is always trusted.
        let _own = std::os::unix::fs::lchown(&link, Some(OTHER), None).is_err();
        let place = FileAttributes::of(&std::fs::symlink_metadata(&link).unwrap());
        assert!(!place.lets(OTHERS_WRITE) && !place.lets(GROUP_WRITES));
        let found = |user| judge(&Trusted::of(user, user, &[]), &[(link.clone(), place)]).refused.len();
        assert_eq!((found(place.user), found(place.user + 1)), (0, 1));
    }
}
