//! The file system of the storage tier.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::sandbox::{is_inside, run};

/// Bytes of the small file system; the tier itself is told to take less.
const SIZE_MIB: u32 = 96;

/// Where pages are stored.
pub struct Disk {
    mount: PathBuf,
    /// A file system of its own, which can be full.
    small: bool,
    full_until: Option<Instant>,
}

impl Disk {
    pub fn make(folder: &Path) -> Self {
        let mount = folder.join("disk");
        std::fs::create_dir(&mount).unwrap();
        let made = match is_inside() {
            true => run(&format!("mount -t tmpfs -o size={SIZE_MIB}m tmpfs {}", mount.display())),
            false => Err("it would outlive this run".to_owned()),
        };
        if let Err(why) = &made {
            println!("no small file system is mounted, so no disk becomes full: {why}");
        }
        Self { mount, small: made.is_ok(), full_until: None }
    }

    pub fn small(&self) -> bool {
        self.small
    }

    pub fn tier(&self) -> PathBuf {
        self.mount.join("pages")
    }

    fn ballast(&self) -> PathBuf {
        self.mount.join("ballast")
    }

    /// Leaves no byte free until then.
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

    /// Frees what is due.
    pub fn look(&mut self) {
        if self.full_until.is_some_and(|until| Instant::now() >= until) {
            self.free();
        }
    }

    pub fn free(&mut self) {
        self.full_until = None;
        let _not_there = std::fs::remove_file(self.ballast());
    }

    /// Changes some bytes in the middle of a stored file.
    pub fn change_bytes(&self, random: &mut fastrand::Rng) -> bool {
        let mut files = Vec::new();
        files_below(&self.tier(), &mut files);
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
