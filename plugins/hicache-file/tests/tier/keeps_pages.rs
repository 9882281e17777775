//! Pages that were put come back: with each way of reading and writing, from any place in memory, also after a restart.

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::{Address, ErrorCode, Key, StorageTier, TierPage};

use super::world::{self, World, can, files, wait_until};

const WAYS: [&str; 5] = [
    "io = 'uring'\ndirect = 'always'\npinned_mib = 0",
    "io = 'uring'\ndirect = 'always'",
    "io = 'threads'\ndirect = 'always'\nthreads = 3",
    "io = 'uring'\ndirect = 'never'",
    "io = 'threads'\ndirect = 'never'",
];

#[test]
fn pages_come_back_whatever_their_size_and_place_in_memory() {
    for way in WAYS {
        let dir = tempfile::tempdir().unwrap();
        if !can(dir.path(), way) {
            continue;
        }
        let config = format!("{way}\nsegment_mib = 4\nsize_limit_mib = 64\nfsync = 'never'");
        let mut world = World::new(dir.path(), 8 << 20, &config);
        let mut first = 0;
        for (length, shift) in
            [(4096, 0), (65_536, 0), (65_536, 4), (1, 0), (100, 7), (5000, 0), (3 << 20, 0)]
        {
            let count = ((6 << 20) / length).min(300) as u64;
            let numbers: Vec<u64> = (first..first + count).collect();
            first += count;
            let ended = world.put(&numbers, length, shift);
            assert!(ended.iter().all(|status| *status == STORED), "{way} {length}: {ended:?}");
            assert!(world.get(&numbers, length, shift).iter().all(|s| *s == FOUND), "{way} {length}");
            // To another place, and in another order.
            let back: Vec<u64> = numbers.iter().rev().copied().collect();
            assert!(world.get(&back, length, shift + 1).iter().all(|s| *s == FOUND), "{way} {length}");
            let unknown = [first + 1_000_000];
            assert_eq!(world.get(&unknown, length, 0), [MISSING]);
        }
        let longer = world.page(0, 0, 4097);
        let ended = world.run(1, |tier, tag| tier.get(tag, &[longer]));
        assert_eq!(ended[0].0, ErrorCode::INVALID_ARGUMENT.0, "another length than was put");
        world.close();
        let mut world = World::new(dir.path(), 8 << 20, &config);
        let numbers: Vec<u64> = (0..300).collect();
        assert_eq!(world.found(&numbers, 4096), 300, "{way}: after a restart");
        assert_eq!(world.exists(&[0, 1, first + 7]), [FOUND, FOUND, MISSING]);
    }
}

#[test]
fn a_page_that_is_there_is_not_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::new(dir.path(), 1 << 20, "segment_mib = 1\nsize_limit_mib = 8");
    let numbers: Vec<u64> = (0..16).collect();
    for _ in 0..20 {
        world.put_all(&numbers, 65_536);
    }
    world.close();
    let stored: u64 = files(dir.path(), ".dat").iter().map(|file| file.metadata().unwrap().len()).sum();
    assert_eq!(stored, 16 * 65_536);
}

#[test]
fn deleted_pages_are_gone_also_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let config = "segment_mib = 1\nsize_limit_mib = 16";
    let mut world = World::new(dir.path(), 4 << 20, config);
    let numbers: Vec<u64> = (0..64).collect();
    // Some in sealed segments, some in the open one.
    world.put_all(&numbers[..40], 65_536);
    world.close();
    let mut world = World::new(dir.path(), 4 << 20, config);
    assert_eq!(world.found(&numbers, 65_536), 40);
    world.put_all(&numbers[40..], 65_536);
    let gone: Vec<u64> = (0..64).step_by(3).collect();
    let kept: Vec<u64> = numbers.iter().copied().filter(|n| !gone.contains(n)).collect();
    assert!(world.delete(&gone).iter().all(|status| *status == FOUND));
    assert!(world.delete(&gone).iter().all(|status| *status == MISSING));
    assert_eq!((world.found(&gone, 65_536), world.found(&kept, 65_536)), (0, kept.len()));
    world.close();
    let mut world = World::new(dir.path(), 4 << 20, config);
    assert_eq!((world.found(&gone, 65_536), world.found(&kept, 65_536)), (0, kept.len()));
    world.put_all(&gone, 65_536);
    assert_eq!(world.found(&numbers, 65_536), 64);
}

#[test]
fn a_scan_sees_every_page_once_while_others_come_and_go() {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::new(dir.path(), 4 << 20, "segment_mib = 1\nsize_limit_mib = 64");
    let numbers: Vec<u64> = (0..600).collect();
    world.put_all(&numbers, 4096);
    let (mut cursor, mut seen, mut more) = (0, Vec::new(), 10_000);
    loop {
        let mut keys = [Key::default(); 7];
        let step = world.tier.scan(cursor, &mut keys).unwrap();
        seen.extend_from_slice(&keys[..step.keys as usize]);
        cursor = step.cursor;
        if cursor == 0 {
            break;
        }
        world.put_all(&[more], 4096);
        world.delete(&[more.saturating_sub(5)]);
        more += 1;
    }
    for number in numbers {
        assert_eq!(seen.iter().filter(|key| **key == world::key(number)).count(), 1, "{number}");
    }
    assert!(world.tier.scan(u64::MAX, &mut []).is_err());
}

#[test]
fn a_full_queue_refuses_batches_and_loses_nothing_that_it_took() {
    let dir = tempfile::tempdir().unwrap();
    let config = "segment_mib = 8\nsize_limit_mib = 256\nmax_batches = 4\nmax_pages = 8";
    let mut world = World::new(dir.path(), 8 << 20, config);
    let length = 65_536;
    for number in 0..64 {
        let bytes = world::value(number, length);
        world.bytes()[number as usize * length..][..length].copy_from_slice(&bytes);
    }
    let page = |number: u64| world.page(number, number as usize * length, length);
    let batches: Vec<Vec<TierPage>> =
        (0..8).map(|batch| (batch * 8..batch * 8 + 8).map(page).collect()).collect();
    let (mut refused, mut ended) = (0, vec![0; 64]);
    for (tag, batch) in (0..).map(host_plugin_api::Tag).zip(&batches) {
        wait_until("there is room for a batch", || match world.tier.put(tag, batch) {
            0 => true,
            code => {
                assert_eq!(code, ErrorCode::WOULD_BLOCK.0);
                refused += 1;
                collect(&world, &mut ended);
                false
            }
        });
    }
    assert!(refused > 0, "eight batches fitted into four");
    wait_until("all pages end", || {
        collect(&world, &mut ended);
        ended.iter().all(|count| *count > 0)
    });
    assert!(ended.iter().all(|count| *count == 1), "{ended:?}");
    let numbers: Vec<u64> = (0..64).collect();
    assert_eq!(world.found(&numbers, length), 64);
}

fn collect(world: &World, ended: &mut [u32]) {
    let mut done = [host_plugin_api::TierCompletion::default(); 16];
    let count = usize::try_from(world.tier.poll(&mut done)).unwrap();
    for completion in &done[..count] {
        assert_eq!(completion.status, STORED);
        ended[completion.tag.0 as usize * 8 + completion.page as usize] += 1;
    }
}

#[test]
fn a_region_that_is_taken_back_is_touched_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::new(dir.path(), 4 << 20, "segment_mib = 4\nsize_limit_mib = 64");
    let numbers: Vec<u64> = (0..64).collect();
    world.put_all(&numbers, 65_536);
    for round in 0..50 {
        let pages: Vec<_> = (0..64).map(|n| world.page(n, n as usize * 65_536, 65_536)).collect();
        assert_eq!(world.tier.get(host_plugin_api::Tag(1000 + round), &pages), 0);
        world.tier.deregister(world.region).unwrap();
        world.bytes().fill(0x77);
        let mut seen = 0;
        wait_until("all pages end", || {
            let mut done = [host_plugin_api::TierCompletion::default(); 64];
            seen += world.tier.poll(&mut done);
            seen == 64
        });
        assert!(world.bytes().iter().all(|byte| *byte == 0x77), "round {round}");
        world.register_again();
    }
}

#[test]
fn memory_that_was_deregistered_and_is_other_memory_now_is_read_and_written_as_what_it_is() {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    const LENGTH: usize = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let world = World::new(dir.path(), 1 << 20, "segment_mib = 4\nsize_limit_mib = 64\nthreads = 1");
    let mut at = std::ptr::null_mut();
    for round in 0..4_u8 {
        // Never unmapped in between, or another thread might get the place.
        let fixed = if round == 0 { MapFlags::PRIVATE } else { MapFlags::PRIVATE | MapFlags::FIXED };
        // SAFETY: fresh memory, at a place that is free or has the memory of the round before, which nothing uses.
        at = unsafe { mmap_anonymous(at, LENGTH, ProtFlags::READ | ProtFlags::WRITE, fixed) }.unwrap();
        // SAFETY: mapped above, and unmapped later. No batch is in flight when it is used.
        let bytes = unsafe { std::slice::from_raw_parts_mut(at.cast::<u8>(), LENGTH) };
        let memory = host_plugin_api::Memory {
            address: Address(at as u64),
            length: LENGTH as u64,
            kind: host_plugin_api::MemoryKind::DRAM,
            device: 0,
            fd: -1,
            generation: 0,
            fd_offset: 0,
        };
        let region = world.tier.register(&memory).unwrap();
        let page =
            |number: u8, offset: u64| TierPage { key: Key([number; 32]), region, length: 65_536, offset };
        bytes[..65_536].fill(round + 1);
        assert_eq!(world.run(1, |tier, tag| tier.put(tag, &[page(round, 0)]))[0].0, STORED);
        for stored in 0..=round {
            bytes.fill(0xEE);
            let ended = world.run(1, |tier, tag| tier.get(tag, &[page(stored, 131_072)]));
            assert_eq!(ended[0].0, FOUND, "page {stored} in round {round}");
            assert!(bytes[131_072..][..65_536].iter().all(|byte| *byte == stored + 1));
            assert!(bytes[..131_072].iter().all(|byte| *byte == 0xEE));
        }
        world.tier.deregister(region).unwrap();
    }
    // SAFETY: as above, and the tier does not use it any more.
    unsafe { munmap(at, LENGTH) }.unwrap();
    world.close();
}
