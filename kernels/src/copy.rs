//! Copies of equally long byte runs: what moves KV pages between two layouts, and to and from staging buffers.
//!
//! A layout in which a page is one piece needs a single run per page; layouts that engines fix need one run per
//! (page, layer, K or V, token). The caller works out the offsets; this module checks all of them before it writes
//! the first byte, so a refused call has changed nothing. Runs are copied in the order given: where targets overlap,
//! the last one wins.

use std::fmt;

/// A run that would leave its buffer. Nothing was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfBounds {
    /// Which buffer: "source" or "target".
    pub buffer: &'static str,
    /// Position of the offending run in the list.
    pub index: usize,
    /// Its offset.
    pub offset: usize,
    /// Its length.
    pub run: usize,
    /// Length of the buffer.
    pub length: usize,
}

impl fmt::Display for OutOfBounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "copy run {} covers bytes {}..{} of a {} of {} bytes",
            self.index,
            self.offset,
            self.offset.saturating_add(self.run),
            self.buffer,
            self.length
        )
    }
}

impl std::error::Error for OutOfBounds {}

fn check(
    buffer: &'static str,
    length: usize,
    run: usize,
    offsets: impl Iterator<Item = usize>,
) -> Result<(), OutOfBounds> {
    for (index, offset) in offsets.enumerate() {
        if offset.checked_add(run).is_none_or(|end| end > length) {
            return Err(OutOfBounds { buffer, index, offset, run, length });
        }
    }
    Ok(())
}

/// Copies `run` bytes from each source offset to the target offset beside it.
///
/// # Errors
/// When a run leaves its buffer; nothing was copied then.
pub fn copy_runs(
    source: &[u8],
    target: &mut [u8],
    offsets: &[(usize, usize)],
    run: usize,
) -> Result<(), OutOfBounds> {
    check("source", source.len(), run, offsets.iter().map(|pair| pair.0))?;
    check("target", target.len(), run, offsets.iter().map(|pair| pair.1))?;
    for &(from, to) in offsets {
        target[to..to + run].copy_from_slice(&source[from..from + run]);
    }
    Ok(())
}

/// Collects `run` bytes from each offset of `source` into `staging`, one after the other.
///
/// # Errors
/// When a run leaves its buffer; nothing was copied then.
pub fn gather(source: &[u8], offsets: &[usize], run: usize, staging: &mut [u8]) -> Result<(), OutOfBounds> {
    check("source", source.len(), run, offsets.iter().copied())?;
    check("target", staging.len(), run, dense(offsets.len(), run))?;
    for (&from, to) in offsets.iter().zip(dense(offsets.len(), run)) {
        staging[to..to + run].copy_from_slice(&source[from..from + run]);
    }
    Ok(())
}

/// Spreads `staging`, which holds runs of `run` bytes one after the other, to the offsets of `target`.
///
/// # Errors
/// When a run leaves its buffer; nothing was copied then.
pub fn scatter(staging: &[u8], offsets: &[usize], run: usize, target: &mut [u8]) -> Result<(), OutOfBounds> {
    check("source", staging.len(), run, dense(offsets.len(), run))?;
    check("target", target.len(), run, offsets.iter().copied())?;
    for (from, &to) in dense(offsets.len(), run).zip(offsets) {
        target[to..to + run].copy_from_slice(&staging[from..from + run]);
    }
    Ok(())
}

/// Copies `run` bytes from one place of a pool to another, for each pair; source and target of a pair may overlap.
///
/// # Errors
/// When a run leaves the pool; nothing was copied then.
pub fn copy_pages(pool: &mut [u8], offsets: &[(usize, usize)], run: usize) -> Result<(), OutOfBounds> {
    check("source", pool.len(), run, offsets.iter().map(|pair| pair.0))?;
    check("target", pool.len(), run, offsets.iter().map(|pair| pair.1))?;
    for &(from, to) in offsets {
        pool.copy_within(from..from + run, to);
    }
    Ok(())
}

/// Offsets of `count` runs that lie one after the other; saturates where they could not lie in any memory.
fn dense(count: usize, run: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |index| index.saturating_mul(run))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scatter_undoes_gather() {
        let source: Vec<u8> = (0..100).collect();
        let offsets = [90, 0, 33, 47];
        let mut staging = [0; 28];
        gather(&source, &offsets, 7, &mut staging).unwrap();
        assert_eq!(&staging[..7], &source[90..97]);
        let mut back = vec![0; 100];
        scatter(&staging, &offsets, 7, &mut back).unwrap();
        for index in 0..100 {
            let covered = offsets.iter().any(|&from| (from..from + 7).contains(&index));
            assert_eq!(back[index], if covered { source[index] } else { 0 }, "byte {index}");
        }
    }

    #[test]
    fn runs_land_where_they_are_sent() {
        let source: Vec<u8> = (0..10).collect();
        let mut target = [0; 6];
        copy_runs(&source, &mut target, &[(8, 0), (2, 4)], 2).unwrap();
        assert_eq!(target, [8, 9, 0, 0, 2, 3]);
        let mut pool: Vec<u8> = (0..8).collect();
        copy_pages(&mut pool, &[(0, 2), (2, 6)], 2).unwrap();
        assert_eq!(pool, [0, 1, 0, 1, 4, 5, 0, 1]);
    }

    #[test]
    fn a_run_outside_its_buffer_is_refused_and_nothing_is_copied() {
        let source = [1; 8];
        let mut target = [0; 8];
        type Offsets = &'static [(usize, usize)];
        let cases: [(Offsets, &str, usize); 3] = [
            (&[(0, 0), (5, 0)], "source", 1),
            (&[(0, 0), (0, 4), (0, 6)], "target", 2),
            (&[(0, 0), (usize::MAX, 0)], "source", 1),
        ];
        for (offsets, buffer, index) in cases {
            let error = copy_runs(&source, &mut target, offsets, 4).unwrap_err();
            assert_eq!((error.buffer, error.index), (buffer, index));
            assert_eq!(target, [0; 8]);
        }
        assert_eq!(gather(&source, &[0, 1], 5, &mut target).unwrap_err().buffer, "target");
        assert_eq!(scatter(&source, &[0, 1], 5, &mut [0; 99]).unwrap_err().buffer, "source");
        assert_eq!(copy_pages(&mut target, &[(0, 5)], 4).unwrap_err().buffer, "target");
    }
}
