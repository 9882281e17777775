//! Joins neighbouring writes before they go to Mooncake, to which each range costs about as much as 64 KiB.

use host_plugin_api::{RegionId, Write};
use host_transfer_kit::{RegionDescriptor, source, target};

use crate::engine::Run;

/// The runs of some writes, in their order, and the regions of this instance that they read. `None` when a write leaves
/// its region.
pub fn join(
    writes: impl Iterator<Item = Write>,
    ours: &[RegionDescriptor],
    theirs: &[RegionDescriptor],
) -> Option<(Vec<Run>, Vec<RegionDescriptor>)> {
    let mut runs: Vec<Run> = Vec::new();
    let mut used: Vec<RegionDescriptor> = Vec::new();
    let mut last = (RegionId(0), RegionId(0));
    for write in writes {
        let (our, from) = source(ours, &write)?;
        let (their, to) = target(theirs, &write)?;
        if !used.contains(our) {
            used.push(*our);
        }
        let length = u64::from(write.length);
        // Mooncake treats regions that touch by accident as two.
        let same = last == (our.id, their.id);
        last = (our.id, their.id);
        match runs.last_mut() {
            Some(run) if same && run.from + run.length == from && run.to + run.length == to => {
                run.length += length;
            }
            _ => runs.push(Run { from, to, length }),
        }
    }
    Some((runs, used))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(id: u32, address: u64, length: u64) -> RegionDescriptor {
        RegionDescriptor { id: RegionId(id), generation: 1, address, length, device: None }
    }

    fn write(source: (u32, u64), target: (u32, u64), length: u32) -> Write {
        Write {
            source_region: RegionId(source.0),
            target_region: RegionId(target.0),
            source_offset: source.1,
            target_offset: target.1,
            length,
            target_generation: 1,
        }
    }

    #[test]
    fn neighbours_on_both_sides_are_one_run_and_no_others() {
        let ours = [region(1, 0x1000, 0x1000), region(2, 0x2000, 0x1000)];
        let theirs = [region(7, 0x9000, 0x1000)];
        let writes = [
            write((1, 0), (7, 0), 100),
            write((1, 100), (7, 100), 50),
            // Adjacent in the source, not in the target.
            write((1, 150), (7, 300), 10),
            // Adjacent in the target, not in the source.
            write((1, 200), (7, 310), 10),
        ];
        let (runs, used) = join(writes.into_iter(), &ours, &theirs).unwrap();
        let run = |from, to, length| Run { from, to, length };
        assert_eq!(runs, [run(0x1000, 0x9000, 150), run(0x1096, 0x912c, 10), run(0x10c8, 0x9136, 10)]);
        assert_eq!(used, ours[..1]);
        // Neighbours by address, but of two regions.
        let writes = [write((1, 0xff0), (7, 0), 16), write((2, 0), (7, 16), 16)];
        assert_eq!(join(writes.into_iter(), &ours, &theirs).unwrap().0.len(), 2);
    }

    #[test]
    fn one_write_outside_of_its_region_spoils_all() {
        let ours = [region(1, 0x1000, 100)];
        let theirs = [region(7, 0x9000, 100)];
        assert!(
            join([write((1, 0), (7, 0), 100), write((1, 1), (7, 0), 100)].into_iter(), &ours, &theirs)
                .is_none()
        );
        assert!(join([write((1, 0), (7, 1), 100)].into_iter(), &ours, &theirs).is_none());
    }
}
