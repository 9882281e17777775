//! Memory, descriptors and threads of a process, and whether they grow.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

/// Time between two samples of a trend.
const SAMPLE: std::time::Duration = std::time::Duration::from_secs(2);
/// Bytes that memory may grow by over the second half of a run, by the fit.
const GROWTH: f64 = 16.0 * 1024.0 * 1024.0;
/// Least number of samples that make a trend.
const SAMPLES: usize = 10;

/// A number from `/proc/PID/status`, in the unit of that file.
pub fn status(pid: u32, key: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(key)).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// What one process holds at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Anonymous resident memory.
    pub bytes: u64,
    /// Open descriptors, without those of stored segments (`disk/pages` in both file systems), which the tier's size bounds.
    pub descriptors: usize,
    pub threads: u64,
    /// Memory that is locked or pinned.
    pub locked: u64,
}

impl Footprint {
    pub fn of(pid: u32) -> Self {
        Self {
            bytes: status(pid, "RssAnon:") << 10,
            descriptors: descriptors(pid),
            threads: status(pid, "Threads:"),
            locked: (status(pid, "VmLck:") + status(pid, "VmPin:")) << 10,
        }
    }

    /// Whether this is much more than before. Memory may double, because `before` was taken soon after the start.
    pub fn outgrew(&self, before: &Self) -> bool {
        self.bytes > 2 * before.bytes + (48 << 20)
            || self.descriptors > before.descriptors + 24
            || self.threads > before.threads + 16
            || self.locked > before.locked + (8 << 20)
    }
}

impl fmt::Display for Footprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let Self { bytes, descriptors, threads, locked } = *self;
        write!(
            f,
            "{:.1} MiB, {descriptors} descriptors, {threads} threads, {:.1} MiB locked",
            mib(bytes),
            mib(locked)
        )
    }
}

fn descriptors(pid: u32) -> usize {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).ok().into_iter().flatten().flatten();
    let files = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    files.filter(|file| !file.ancestors().any(|folder| folder.ends_with("disk/pages"))).count()
}

/// Memory over time of the processes that live as long as the run.
pub struct Trend {
    began: Instant,
    last: Instant,
    samples: BTreeMap<String, Vec<(f64, f64)>>,
}

impl Trend {
    pub fn new() -> Self {
        Self { began: Instant::now(), last: Instant::now(), samples: BTreeMap::new() }
    }

    pub fn is_due(&mut self) -> bool {
        let due = self.last.elapsed() >= SAMPLE;
        if due {
            self.last = Instant::now();
        }
        due
    }

    pub fn sample(&mut self, name: &str, pid: u32) {
        let sample = (self.began.elapsed().as_secs_f64(), (status(pid, "RssAnon:") << 10) as f64);
        self.samples.entry(name.to_owned()).or_default().push(sample);
    }

    /// Bytes that each process grew by over the second half, by the line of least squares, and the seconds of that half.
    pub fn growth(&self) -> BTreeMap<&str, (f64, f64)> {
        self.samples
            .iter()
            .map(|(name, samples)| (name.as_str(), grown(&samples[samples.len() / 2..])))
            .collect()
    }

    pub fn leaks(&self) -> Vec<String> {
        let is_trend = |name: &str| self.samples.get(name).is_some_and(|samples| samples.len() >= SAMPLES);
        let growth = self.growth().into_iter();
        let grew = growth.filter(|(name, (bytes, _))| is_trend(name) && *bytes > GROWTH);
        grew.map(|(name, (bytes, seconds))| format!("{name} grew by {bytes:.0} bytes in {seconds:.0} s"))
            .collect()
    }
}

fn grown(samples: &[(f64, f64)]) -> (f64, f64) {
    let (Some(first), Some(last)) = (samples.first(), samples.last()) else { return (0.0, 0.0) };
    let count = samples.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| samples.iter().map(of).sum::<f64>() / count;
    let (time, bytes) = (mean(|sample| sample.0), mean(|sample| sample.1));
    let up: f64 = samples.iter().map(|sample| (sample.0 - time) * (sample.1 - bytes)).sum();
    let along: f64 = samples.iter().map(|sample| (sample.0 - time).powi(2)).sum();
    let seconds = last.0 - first.0;
    (if along > 0.0 { up / along * seconds } else { 0.0 }, seconds)
}
