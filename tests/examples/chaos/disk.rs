//! The file system of the storage tier.
//!
//! A small file system holds the pages and can be full. On top of it this process serves another one, which can be slow and fail.

mod passthrough;

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::sandbox::{is_inside, run};

use passthrough::Passthrough;
pub use passthrough::{Done, Orders};

/// Size of the small file system. The limit of the tier is lower.
const SIZE_MIB: u32 = 96;

/// The file systems that hold the tier's pages.
pub struct Disk {
    /// The folder in which workers see pages.
    mount: PathBuf,
    /// The folder in which the pages lie.
    below: PathBuf,
    passthrough: Option<Passthrough>,
    /// Whether `below` is a file system of its own, which can be full.
    small: bool,
    full_until: Option<Instant>,
    told_until: Option<Instant>,
}

impl Disk {
    pub fn make(folder: &Path) -> Self {
        let (mount, below) = (folder.join("disk"), folder.join("below/disk"));
        std::fs::create_dir(&mount).unwrap();
        std::fs::create_dir_all(&below).unwrap();
        let made = match is_inside() {
            true => run(&format!("mount -t tmpfs -o size={SIZE_MIB}m tmpfs {}", below.display())),
            false => Err("it would outlive this run".to_owned()),
        };
        if let Err(why) = &made {
            println!("no small file system is mounted, so no disk becomes full: {why}");
        }
        let passthrough = match is_inside() {
            true => Passthrough::mount(&below, &mount).map_err(|error| error.to_string()),
            false => Err("it would outlive this run".to_owned()),
        };
        if let Err(why) = &passthrough {
            println!("no file system is mounted that is slow and fails: {why}");
        }
        let passthrough = passthrough.ok();
        let mount = if passthrough.is_some() { mount } else { below.clone() };
        Self { mount, below, passthrough, small: made.is_ok(), full_until: None, told_until: None }
    }

    pub fn small(&self) -> bool {
        self.small
    }

    /// Whether the file system can be slow and fail.
    pub fn obeys(&self) -> bool {
        self.passthrough.is_some()
    }

    /// Counts of late and failed calls. None if the file system cannot be slow and fail.
    pub fn done(&self) -> Option<Done> {
        self.passthrough.as_ref().map(Passthrough::done)
    }

    /// The folder of the tier, as workers see it.
    pub fn tier(&self) -> PathBuf {
        self.mount.join("pages")
    }

    fn ballast(&self) -> PathBuf {
        self.below.join("ballast")
    }

    /// Applies the orders to reads, writes and syncs until `until`.
    pub fn tell(&mut self, orders: Orders, until: Instant) -> bool {
        let Some(passthrough) = &self.passthrough else { return false };
        if self.told_until.is_some() {
            return false;
        }
        passthrough.tell(orders);
        self.told_until = Some(until);
        true
    }

    /// Leaves no byte free until `until`.
    pub fn fill(&mut self, until: Instant) -> bool {
        if !self.small || self.full_until.is_some() {
            return false;
        }
        let Ok(mut file) = File::create(self.ballast()) else { return false };
        while file.write_all(&[0x5a; 1 << 16]).is_ok() {}
        while file.write_all(&[0x5a; 512]).is_ok() {}
        self.full_until = Some(until);
        true
    }

    /// Ends faults whose time is over.
    pub fn look(&mut self) {
        let now = Instant::now();
        if self.full_until.is_some_and(|until| now >= until) {
            self.free();
        }
        if self.told_until.is_some_and(|until| now >= until) {
            self.obey_no_more();
        }
    }

    fn free(&mut self) {
        self.full_until = None;
        let _not_there = std::fs::remove_file(self.ballast());
    }

    fn obey_no_more(&mut self) {
        self.told_until = None;
        if let Some(passthrough) = &self.passthrough {
            passthrough.tell(Orders::default());
        }
    }

    /// Ends all faults of the disk.
    pub fn heal(&mut self) {
        self.free();
        self.obey_no_more();
    }

    /// Changes some bytes in the middle of a stored file.
    pub fn change_bytes(&self, random: &mut fastrand::Rng) -> bool {
        let mut files = Vec::new();
        files_below(&self.below.join("pages"), &mut files);
        let Some(file) = random.choice(&files) else { return false };
        let Ok(open) = OpenOptions::new().write(true).open(file) else { return false };
        let length = open.metadata().map_or(0, |metadata| metadata.len());
        if length < 8192 {
            return false;
        }
        let bytes: Vec<u8> = (0..64).map(|_| random.u8(..)).collect();
        open.write_all_at(&bytes, random.u64(4096..length - 64)).is_ok()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The upper one is unmounted first: the folder of this run can be removed only when nothing is mounted in it.
        drop(self.passthrough.take());
        if self.small
            && let Err(why) = run(&format!("umount --lazy {}", self.below.display()))
        {
            println!("the small file system is not unmounted: {why}");
        }
    }
}

fn files_below(folder: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            files_below(&path, files);
        } else {
            files.push(path);
        }
    }
    files.sort();
}
