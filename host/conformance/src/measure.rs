//! Measures the costs of a plugin: reading it, loading it, calling it.
//!
//! The boundary is measured with a backend that is built into this program. It is called directly and through the ABI, in turns, so
//! that the ratio holds on a busy machine. The time inside a plugin's calls depends on the plugin. Its figures stand beside those
//! of the boundary.

#![allow(clippy::disallowed_methods, reason = "it measures, in real time")]

mod boundary;
mod calls;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use serde::Serialize;

use host_plugins::{Entry, load_root};

/// How often a plugin file is read.
pub const INSPECTIONS: usize = 50;
/// How often a plugin file is loaded. Each time a new process does it, because a process loads a library only once.
pub const LOADS: usize = 11;

/// Limit of the time to read a file, in milliseconds.
const INSPECT_MS: f64 = 1.0;
/// Limit of the time to load a file, in milliseconds.
const LOAD_MS: f64 = 5.0;
/// The number of writes from which the limit holds, and the limit: the ratio of a batched call to a static one.
const RATIO: (usize, f64) = (64, 1.05);

/// The cost of a call with one size of batch.
#[derive(Clone, Debug, Serialize)]
pub struct Batch {
    /// Writes in the call.
    pub writes: usize,
    /// A static call, in nanoseconds.
    pub static_ns: f64,
    /// Time of the same call through the ABI, in nanoseconds.
    pub abi_ns: f64,
}

impl Batch {
    /// The time through the ABI divided by the time of a static call.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.abi_ns / self.static_ns
    }
}

/// The cost of one call of the plugin.
#[derive(Clone, Debug, Serialize)]
pub struct Call {
    /// The role that the call belongs to.
    pub role: &'static str,
    /// The name of the call.
    pub name: String,
    /// Time of the call, in nanoseconds.
    pub ns: f64,
}

/// All measurements of one file.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// Time to read the file, in milliseconds: the best of all repetitions.
    pub inspect_ms: f64,
    /// Time to load the file, in milliseconds: the median.
    pub load_ms: f64,
    /// The boundary, by the size of the batch.
    pub boundary: Vec<Batch>,
    /// Calls of the plugin itself.
    pub calls: Vec<Call>,
    /// Roles that were not measured because they do not open with this configuration.
    pub skipped: Vec<Skipped>,
}

/// A role that was not measured.
#[derive(Clone, Debug, Serialize)]
pub struct Skipped {
    /// The name of the role.
    pub role: &'static str,
    /// The plugin's error.
    pub reason: String,
}

impl Measured {
    /// Sentences about the figures that exceed their limits.
    #[must_use]
    pub fn too_slow(&self) -> Vec<String> {
        let mut slow = Vec::new();
        if self.inspect_ms >= INSPECT_MS {
            slow.push(format!("reading takes {:.3} ms, the limit is {INSPECT_MS} ms", self.inspect_ms));
        }
        if self.load_ms >= LOAD_MS {
            slow.push(format!("loading takes {:.3} ms, the limit is {LOAD_MS} ms", self.load_ms));
        }
        let (from, most) = RATIO;
        for batch in self.boundary.iter().filter(|batch| batch.writes >= from && batch.ratio() > most) {
            let (writes, ratio) = (batch.writes, batch.ratio());
            slow.push(format!(
                "a call with {writes} writes costs {ratio:.3} of a static one, the limit is {most}"
            ));
        }
        slow
    }
}

/// Measures a plugin file.
///
/// `program` is this program, which loads the file in processes of its own. `config` is the plugin's own table. Roles that the
/// plugin does not open with it are skipped, unless a table was given and none opens.
///
/// # Errors
/// A sentence, when the file is no usable plugin or cannot be loaded.
pub fn file(program: &Path, file: &Path, config: &str) -> Result<Measured, String> {
    let mut inspect_ms = f64::MAX;
    let mut entry = read(file)?;
    for _ in 0..INSPECTIONS {
        let start = Instant::now();
        entry = read(file)?;
        inspect_ms = inspect_ms.min(start.elapsed().as_secs_f64() * 1e3);
    }
    let mut loads =
        (0..LOADS).map(|_| load_elsewhere(program, file)).collect::<Result<Vec<f64>, String>>()?;
    loads.sort_by(f64::total_cmp);
    let boundary = boundary::measure()?;
    let (calls, skipped) = calls::measure(&entry, config)?;
    Ok(Measured { inspect_ms, load_ms: loads[LOADS / 2] / 1e6, boundary, calls, skipped })
}

fn read(file: &Path) -> Result<Entry, String> {
    Entry::of_file(file).map_err(|error| format!("{} {error}", file.display()))
}

/// Nanoseconds that a new process needs to load the file.
fn load_elsewhere(program: &Path, file: &Path) -> Result<f64, String> {
    let mut child = Command::new(program);
    child.args(["plugins", "time-load", "--"]).arg(file).stdin(Stdio::null());
    let output =
        child.output().map_err(|error| format!("a process to load it cannot be started: {error}"))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let failed = || format!("it does not load: {}", String::from_utf8_lossy(&output.stderr).trim());
    said.lines().last().and_then(|line| line.trim().parse().ok()).ok_or_else(failed)
}

/// Nanoseconds that this process needs to load the file for the first time, with all checks before and after.
///
/// # Errors
/// A sentence that says why the file does not load.
pub fn load_here(file: &Path) -> Result<u128, String> {
    let entry = read(file)?;
    let start = Instant::now();
    load_root(&entry).map_err(|error| error.to_string())?;
    Ok(start.elapsed().as_nanos())
}

/// The time per call in nanoseconds, of the best of some repetitions.
fn best(repetitions: usize, calls: usize, mut call: impl FnMut()) -> f64 {
    let once = |_| {
        let start = Instant::now();
        for _ in 0..calls {
            call();
        }
        start.elapsed().as_secs_f64() * 1e9 / calls as f64
    };
    (0..repetitions).map(once).fold(f64::MAX, f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_slow_is_named() {
        let batch = |writes, abi_ns| Batch { writes, static_ns: 100.0, abi_ns };
        let fine = Measured {
            inspect_ms: 0.1,
            load_ms: 0.5,
            // Batches of fewer than 64 writes have no limit.
            boundary: vec![batch(1, 300.0), batch(64, 105.0), batch(512, 100.0)],
            calls: Vec::new(),
            skipped: Vec::new(),
        };
        assert_eq!(fine.too_slow(), [] as [String; 0]);
        let slow = Measured {
            inspect_ms: 1.0,
            load_ms: 5.0,
            boundary: vec![batch(64, 106.0)],
            calls: Vec::new(),
            skipped: Vec::new(),
        };
        let said = slow.too_slow().join("; ");
        for part in ["reading takes 1.000 ms", "loading takes 5.000 ms", "64 writes costs 1.060"] {
            assert!(said.contains(part), "{part:?} is not in {said}");
        }
    }
}
