//! The runs of bytes that one copy of a device takes at once, joined where they are neighbours.

/// Bytes that lie together on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First byte of the target.
    pub to: u64,
    /// First byte of the source.
    pub from: u64,
    /// How many.
    pub bytes: u64,
    /// Whether a kernel may read and write them where they are: memory of a device on both sides, or pinned.
    pub in_reach: bool,
    /// Whether host memory is on one side.
    pub to_or_from_host: bool,
}

impl Run {
    /// Joins another run that continues this one on both sides. False when it does not.
    pub fn join(&mut self, next: &Self) -> bool {
        let continues = self.to + self.bytes == next.to && self.from + self.bytes == next.from;
        let alike = (self.in_reach, self.to_or_from_host) == (next.in_reach, next.to_or_from_host);
        if continues && alike {
            self.bytes += next.bytes;
        }
        continues && alike
    }

    /// Whether the kernel copies the run, and not the driver. The kernel takes whole words of 16 bytes, the driver
    /// takes long runs.
    pub fn is_for_kernel(&self) -> bool {
        let words = (self.to | self.from | self.bytes).is_multiple_of(16);
        let long = if self.to_or_from_host { LONG_TO_HOST } else { LONG };
        words && self.in_reach && self.bytes < long
    }
}

/// From this many bytes on, the driver's copy of a run is faster than the kernel's (1490 to 1355 GB/s on an H100). The
/// driver's copy takes 3 µs more to begin.
const LONG: u64 = 64 << 20;
/// The same between host and device: both copies are as fast as PCIe, and the driver's leaves the device's processors alone.
const LONG_TO_HOST: u64 = 2 << 20;

/// Most bytes of a batch: what a device copies in a tenth of a millisecond. Bounds how long a fence waits.
pub const BATCH_BYTES: u64 = 128 << 20;
/// Most runs of a batch.
pub const BATCH_RUNS: usize = 4096;
/// Cost of a byte that crosses between host and device. A byte that stays on the device costs 1.
const HOST_BYTES: u64 = 8;

/// Runs that are copied with one call, as far as it goes.
pub struct Batch {
    runs: Vec<Run>,
    /// Cost of the runs, in bytes between two places of a device.
    cost: u64,
}

impl Default for Batch {
    fn default() -> Self {
        Self { runs: Vec::with_capacity(BATCH_RUNS), cost: 0 }
    }
}

impl Batch {
    /// Makes it empty.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.cost = 0;
    }

    /// The runs, in the order in which they came.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Takes as many bytes of a run as there is room for. Returns how many.
    pub fn take(&mut self, run: Run) -> u64 {
        let weight = if run.to_or_from_host { HOST_BYTES } else { 1 };
        let room = (BATCH_BYTES - self.cost) / weight;
        // The rest of the run then begins at a whole word, if the run does.
        let bytes = if run.bytes <= room { run.bytes } else { room / 16 * 16 };
        let run = Run { bytes, ..run };
        if bytes == 0 || !self.runs.last_mut().is_some_and(|last| last.join(&run)) {
            if bytes == 0 || self.runs.len() == BATCH_RUNS {
                return 0;
            }
            self.runs.push(run);
        }
        self.cost += bytes * weight;
        bytes
    }
}

/// Most cells that the table holds. The table has twice the room.
const CELLS: u64 = 2 * BATCH_RUNS as u64;
const ROOM: usize = 2 * CELLS as usize;

/// Finds out whether runs write to the same byte.
pub struct Overlaps {
    /// Cells that runs write to, each with the number of the search.
    table: Vec<(u64, u32)>,
    search: u32,
    order: Vec<u32>,
}

impl Default for Overlaps {
    fn default() -> Self {
        Self { table: vec![(0, 0); ROOM], search: 0, order: Vec::with_capacity(BATCH_RUNS) }
    }
}

fn apart(first: &Run, second: &Run) -> bool {
    first.to + first.bytes <= second.to
}

impl Overlaps {
    /// Whether two of the runs write to the same byte.
    pub fn any(&mut self, runs: &[Run]) -> bool {
        if runs.is_sorted_by(apart) {
            return false;
        }
        // Pages begin at multiples of one length, so cells of this length divide them.
        let start = runs.iter().map(|run| run.to).min().unwrap_or(0);
        let bits = runs.iter().fold(0, |bits, run| bits | (run.to - start) | run.bytes);
        let cell = bits.trailing_zeros();
        let cells: u64 = runs.iter().map(|run| run.bytes >> cell).sum();
        if cells > CELLS { self.sorted(runs) } else { self.by_cells(runs, start, cell) }
    }

    fn by_cells(&mut self, runs: &[Run], start: u64, cell: u32) -> bool {
        self.search = self.search.wrapping_add(1);
        if self.search == 0 {
            self.table.fill((0, 0));
            self.search = 1;
        }
        for run in runs {
            let first = (run.to - start) >> cell;
            for number in first..first + (run.bytes >> cell) {
                let mut at = (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % ROOM;
                while self.table[at].1 == self.search {
                    if self.table[at].0 == number {
                        return true;
                    }
                    at = (at + 1) % ROOM;
                }
                self.table[at] = (number, self.search);
            }
        }
        false
    }

    fn sorted(&mut self, runs: &[Run]) -> bool {
        self.order.clear();
        self.order.extend(0..runs.len() as u32);
        self.order.sort_unstable_by_key(|at| runs[*at as usize].to);
        !self.order.is_sorted_by(|first, second| apart(&runs[*first as usize], &runs[*second as usize]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(to: u64, from: u64, bytes: u64) -> Run {
        Run { to, from, bytes, in_reach: true, to_or_from_host: false }
    }

    #[test]
    fn runs_join_where_both_sides_go_on() {
        let mut first = run(100, 500, 10);
        assert!(!first.join(&run(110, 511, 10)), "a gap at the source");
        assert!(!first.join(&run(111, 510, 10)), "a gap at the target");
        assert!(!first.join(&Run { in_reach: false, ..run(110, 510, 10) }), "another kind of copy");
        assert!(first.join(&run(110, 510, 6)));
        assert_eq!(first, run(100, 500, 16));
    }

    #[test]
    fn the_kernel_has_what_it_can_copy() {
        assert!(run(16, 32, 48).is_for_kernel());
        for odd in [run(8, 32, 48), run(16, 40, 48), run(16, 32, 40)] {
            assert!(!odd.is_for_kernel(), "{odd:?}");
        }
        let host = |bytes| Run { to_or_from_host: true, ..run(0, 0, bytes) };
        assert!(host(LONG_TO_HOST - 16).is_for_kernel() && !host(LONG_TO_HOST).is_for_kernel());
        assert!(run(0, 0, LONG - 16).is_for_kernel() && !run(0, 0, LONG).is_for_kernel());
        assert!(!Run { in_reach: false, ..host(16) }.is_for_kernel());
    }

    #[test]
    fn a_batch_joins_neighbours_and_is_bounded_in_bytes_and_runs() {
        let mut batch = Batch::default();
        assert_eq!(batch.take(run(0, 0, 10)), 10);
        assert_eq!(batch.take(run(10, 10, BATCH_BYTES)), BATCH_BYTES - 16, "the rest is for the next");
        assert_eq!(batch.take(run(0, 0, 7)), 0);
        assert_eq!(batch.runs(), [run(0, 0, BATCH_BYTES - 6)]);
        batch.clear();
        for at in 0..BATCH_RUNS as u64 {
            assert_eq!(batch.take(run(32 * at, 0, 16)), 16);
        }
        assert_eq!(batch.take(run(0, 0, 16)), 0);
        assert_eq!(
            batch.take(run(32 * (BATCH_RUNS as u64 - 1) + 16, 16, 16)),
            16,
            "goes on where the last one ends"
        );
        batch.clear();
        let host = Run { to_or_from_host: true, ..run(0, 0, BATCH_BYTES) };
        assert_eq!(batch.take(host), BATCH_BYTES / HOST_BYTES);
    }

    #[test]
    fn runs_that_write_the_same_byte_are_noticed_in_any_order() {
        let mut overlaps = Overlaps::default();
        let mut overlap = |runs: &[Run]| {
            let any = overlaps.any(runs);
            assert_eq!(any, overlaps.sorted(runs), "{runs:?}");
            any
        };
        assert!(!overlap(&[]) && !overlap(&[run(0, 0, 5)]));
        assert!(!overlap(&[run(20, 0, 5), run(0, 0, 5), run(5, 0, 15)]));
        assert!(overlap(&[run(20, 0, 5), run(0, 0, 5), run(5, 0, 16)]));
        assert!(overlap(&[run(0, 0, 5), run(4, 9, 5)]));
        assert!(overlap(&[run(0, 0, 5), run(0, 9, 5)]));
        // Pages of one length, in mixed order. Then a page twice, and a page that overlaps half of another.
        let page = |at: u64| run(4096 + at * 7 % 997 * 8192, 0, 8192);
        let mut pages: Vec<Run> = (0..997).map(page).collect();
        assert!(!overlap(&pages));
        pages[996].to = pages[500].to;
        assert!(overlap(&pages));
        pages[996].to += 4096;
        assert!(overlap(&pages));
        pages[996].to += 1 << 40;
        assert!(!overlap(&pages));
    }

    #[test]
    fn searches_do_not_see_what_others_left_even_after_all_their_numbers() {
        let mut overlaps = Overlaps { search: u32::MAX - 1, ..Overlaps::default() };
        for _ in 0..4 {
            assert!(!overlaps.any(&[run(16, 0, 16), run(0, 0, 16)]));
        }
    }
}
