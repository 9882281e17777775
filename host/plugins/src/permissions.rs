//! Which users could put other code in a plugin's place.
//!
//! A plugin runs with all rights of the host, so a user that can change its file, or a directory on the way to it, has
//! them, too. The rule: *a plugin must not be easier to replace than the program itself.* Accepted are changes by
//!
//! - root, and the user that runs the host;
//! - owners of the program's file or a directory above it, and groups that may write those: they can replace the
//!   program, so that refusing a plugin beside it would protect nothing. This is what lets a checkout work under any
//!   umask, and in a container whose root runs what the user of a bind mount owns.
//!
//! A group that may write, and is the process's own or root's, is warned of: under umask 002 that is a user's private
//! group, which only the user is in; whether it is one, the file does not say. Everything else is refused. A sticky
//! directory, as /tmp, lets no user replace another's file, so only its owner counts there. Access lists show in the
//! group's bits.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;
const STICKY: u32 = 0o1000;
const ROOT: u32 = 0;

/// What of a file or directory decides which users can replace what lies there.
#[derive(Clone, Copy, Debug)]
struct Place {
    user: u32,
    group: u32,
    mode: u32,
    directory: bool,
}

impl Place {
    fn of(metadata: &Metadata) -> Self {
        Self {
            user: metadata.uid(),
            group: metadata.gid(),
            mode: metadata.permissions().mode(),
            directory: metadata.is_dir(),
        }
    }

    /// Whether these bits let others replace the file, or what lies in the directory.
    fn lets(&self, bits: u32) -> bool {
        self.mode & bits != 0 && !(self.directory && self.mode & STICKY != 0)
    }
}

/// The users that may change the program, and those that it runs as.
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
                // The link's target may be gone; the link still leads to the file.
                let file = std::fs::metadata("/proc/self/exe").ok();
                let above = program.ancestors().skip(1).filter_map(|path| std::fs::metadata(path).ok());
                file.into_iter().chain(above).map(|metadata| Place::of(&metadata)).collect::<Vec<_>>()
            });
            let user = rustix::process::geteuid().as_raw();
            let group = rustix::process::getegid().as_raw();
            Self::of(user, group, &places.unwrap_or_default())
        })
    }

    fn of(user: u32, group: u32, program: &[Place]) -> Self {
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

/// What is wrong with the way to a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Findings {
    /// Refused, unless the operator accepts it.
    pub refused: Vec<String>,
    /// Said, and accepted.
    pub warned: Vec<String>,
}

/// Looks at an open file and at all directories above it, both as it is named and as links resolve.
pub(super) fn check(path: &Path, file: &Metadata) -> std::io::Result<Findings> {
    let named = std::path::absolute(path)?;
    let resolved = named.canonicalize()?;
    let mut above: Vec<&Path> = named.ancestors().skip(1).chain(resolved.ancestors().skip(1)).collect();
    above.sort_unstable();
    above.dedup();
    let mut places: Vec<(PathBuf, Place)> = vec![(resolved.clone(), Place::of(file))];
    for directory in above {
        places.push((directory.to_owned(), Place::of(&std::fs::metadata(directory)?)));
    }
    Ok(judge(Trusted::of_process(), &places))
}

/// Whether every user may change a file, and not the program.
pub(super) fn every_user_may_change(file: &Metadata) -> bool {
    Place::of(file).lets(OTHERS_WRITE) && !Trusted::of_process().all_users
}

fn judge(trusted: &Trusted, places: &[(PathBuf, Place)]) -> Findings {
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

    fn file(user: u32, group: u32, mode: u32) -> Place {
        Place { user, group, mode, directory: false }
    }

    fn directory(user: u32, group: u32, mode: u32) -> Place {
        Place { user, group, mode, directory: true }
    }

    /// Numbers of refusals and warnings for a plugin below these, under a program below those.
    fn found(user: u32, program: &[Place], plugin: &[Place]) -> (usize, usize) {
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
}
