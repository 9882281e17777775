//! A process that gets no more memory.

use std::path::{Path, PathBuf};

use crate::sandbox::{id, run};

const GROUPS: &str = "/sys/fs/cgroup/memory";
/// What a process in a group may allocate beyond what it has.
const MORE: u64 = 256 << 10;

/// The groups of a run.
pub fn groups(id: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(GROUPS).ok().into_iter().flatten().flatten();
    let start = format!("host-chaos-{id}-");
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&start))
        .map(|entry| entry.path())
        .collect()
}

/// Who says no when a process wants more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The kernel kills it.
    Group,
    /// Its allocations fail.
    Addresses,
}

impl Bound {
    /// A group needs the memory controller's first version, which leaves with the process what it has already.
    pub fn draw(random: &mut fastrand::Rng) -> Self {
        let groups = Path::new(GROUPS).join("memory.limit_in_bytes").exists();
        if groups && random.bool() { Self::Group } else { Self::Addresses }
    }
}

fn group(name: &str) -> PathBuf {
    Path::new(GROUPS).join(format!("host-chaos-{}-{name}", id()))
}

/// Gives a process no more memory than it has. False where that cannot be.
pub fn starve(name: &str, pid: u32, bound: Bound) -> bool {
    match bound {
        Bound::Group => {
            let group = group(name);
            let _may_be_there = std::fs::create_dir(&group);
            std::fs::write(group.join("memory.limit_in_bytes"), MORE.to_string()).is_ok()
                && std::fs::write(group.join("cgroup.procs"), pid.to_string()).is_ok()
        }
        Bound::Addresses => {
            let has = crate::footprint::status(pid, "VmSize:") << 10;
            has > 0 && run(&format!("prlimit --pid {pid} --as={}", has + MORE)).is_ok()
        }
    }
}

/// Gives it as much as it wants again, if it lives.
pub fn feed(name: &str, pid: u32) {
    let _not_bound = std::fs::write(group(name).join("memory.limit_in_bytes"), "-1");
    let _ended = run(&format!("prlimit --pid {pid} --as=unlimited"));
}

/// How often the kernel has killed a process of this name's group.
pub fn kills(name: &str) -> u64 {
    let told = std::fs::read_to_string(group(name).join("memory.oom_control")).unwrap_or_default();
    let count = told.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}
