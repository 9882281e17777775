//! Faults that leave a process without more memory.

use std::path::{Path, PathBuf};

use crate::sandbox::{id, run};

const GROUPS: &str = "/sys/fs/cgroup/memory";
/// Bytes that a process may allocate beyond what it has.
const MORE: u64 = 256 << 10;

/// The memory groups of a run.
pub fn groups(id: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(GROUPS).ok().into_iter().flatten().flatten();
    let start = format!("host-chaos-{id}-");
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&start))
        .map(|entry| entry.path())
        .collect()
}

/// The mechanism that limits the memory of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// A memory group: the kernel kills the process.
    Group,
    /// A limit of its address space: its allocations fail.
    Addresses,
}

impl Bound {
    /// Draws a bound. A group needs version 1 of the memory controller, which does not charge a process for memory that it
    /// already has.
    pub fn draw(random: &mut fastrand::Rng) -> Self {
        let groups = Path::new(GROUPS).join("memory.limit_in_bytes").exists();
        if groups && random.bool() { Self::Group } else { Self::Addresses }
    }
}

fn group(name: &str) -> PathBuf {
    Path::new(GROUPS).join(format!("host-chaos-{}-{name}", id()))
}

/// Lets a process allocate only [`MORE`] bytes. False where that is not possible.
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

/// Lifts the bounds of a process, if it still lives.
pub fn feed(name: &str, pid: u32) {
    let _not_bound = std::fs::write(group(name).join("memory.limit_in_bytes"), "-1");
    let _ended = run(&format!("prlimit --pid {pid} --as=unlimited"));
}

/// Number of processes in this name's group that the kernel has killed for memory.
pub fn kills(name: &str) -> u64 {
    let told = std::fs::read_to_string(group(name).join("memory.oom_control")).unwrap_or_default();
    let count = told.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}
