//! The memory that this process may use.

use std::path::Path;

/// Bytes of memory that this process may use: those of the machine, or the limit of its control group if that is lower.
///
/// `None` if neither is known.
#[must_use]
pub fn available() -> Option<u64> {
    let machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| total(&text));
    let group = std::fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| group_limit(&text));
    machine.into_iter().chain(group).min()
}

/// `MemTotal` of `/proc/meminfo`.
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The lowest limit of the control group and its ancestors, from the text of `/proc/self/cgroup`.
fn group_limit(groups: &str) -> Option<u64> {
    let mut limits = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            list if list.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        for folder in Path::new(path.trim_start_matches('/')).ancestors() {
            let text = std::fs::read_to_string(Path::new(root).join(folder).join(file)).unwrap_or_default();
            // The word "max" means no limit, and does not parse.
            limits.extend(text.trim().parse::<u64>());
        }
    }
    limits.into_iter().min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_memory_is_read() {
        assert_eq!(total("MemTotal:       16 kB\nMemFree:  1 kB\n"), Some(16 << 10));
        assert_eq!(total("nothing of the kind"), None);
        assert!(available().is_some_and(|bytes| bytes > 1 << 20));
    }
}
