//! Load beside the tests, as on a machine that runs other programs too.

use std::fs::File;
use std::io::{Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Bytes that the writer writes before it begins again.
const FILE: usize = 256 << 20;
/// Bytes of one write.
const BLOCK: usize = 1 << 20;

/// Threads that compute, and one that writes to the disk, until this is dropped.
#[derive(Debug)]
pub struct Load {
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    file: PathBuf,
}

impl Load {
    /// Starts so many busy loops, and a writer in a folder.
    pub fn start(loops: usize, folder: &Path) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let file = folder.join(format!("host-tests-load-{}", std::process::id()));
        let mut threads = Vec::new();
        for _ in 0..loops {
            let ends = ends.clone();
            threads.push(std::thread::spawn(move || {
                while !ends.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }));
        }
        let (own, path) = (ends.clone(), file.clone());
        threads.push(std::thread::spawn(move || {
            if let Err(error) = write(&path, &own) {
                println!("the writer beside the tests has ended: {}: {error}", path.display());
            }
        }));
        Self { ends, threads, file }
    }
}

fn write(path: &Path, ends: &AtomicBool) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    let block = vec![1; BLOCK];
    while !ends.load(Ordering::Relaxed) {
        file.rewind()?;
        for _ in 0..FILE / BLOCK {
            if ends.load(Ordering::Relaxed) {
                return Ok(());
            }
            file.write_all(&block)?;
            file.sync_data()?;
        }
    }
    Ok(())
}

impl Drop for Load {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // The threads do not panic, so the result is ignored.
            let _ended = thread.join().is_ok();
        }
        // A failure to remove the file is ignored.
        let _removed = std::fs::remove_file(&self.file).is_ok();
    }
}
