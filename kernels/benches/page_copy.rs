//! Compares the speed of gathering and scattering KV pages with this machine's memcpy.
//!
//! `cargo bench -p host-kernels --bench page_copy`. With `stores` behind `--` it shows the two ways of storing beside
//! each other. All variants take turns, and the best of [`ROUNDS`] counts. Figures are GB of payload per second, each byte read
//! once and written once.

#![allow(clippy::unwrap_used, reason = "a benchmark ends at its first error")]

use std::time::Instant;

use host_kernels::copy::{Copier, Dimension, PageBlock, PagesCopy, Stores};

const ROUNDS: usize = 9;
/// Tokens of a page.
const TOKENS: usize = 16;

fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    if std::env::args().any(|argument| argument == "stores") {
        return stores();
    }
    println!("rows at twice their length apart, 64 MiB, in pages of 256 KiB in random order");
    println!(
        "{:>9} {:>8} {:>8} {:>15} {:>15} {:>15}",
        "row", "", "memcpy", "1 thread", "2 threads", "4 threads"
    );
    for run in [64, 128, 256, 512, 1 << 10, 4 << 10, 16 << 10, 64 << 10] {
        rows(run);
    }
    for bytes in [4 << 20, 64 << 20] {
        println!("\n32 layers, rows of 256 bytes, {} MiB out of a pool of eight heads", bytes >> 20);
        println!(
            "{:>16} {:>6} {:>8} {:>8} {:>15} {:>15} {:>15}",
            "pool", "heads", "", "memcpy", "1 thread", "2 threads", "4 threads"
        );
        for heads in [8, 4, 1] {
            for token_major in [true, false] {
                pool(bytes, heads, token_major);
            }
        }
    }
}

/// A buffer from a page boundary, as pools and staging regions are. Its pages of memory are mapped already.
struct Buffer(Vec<u8>);

fn buffer(bytes: usize) -> Buffer {
    Buffer(vec![1; bytes + 4096])
}

impl std::ops::Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let start = self.0.as_ptr().align_offset(4096);
        &self.0[start..self.0.len() - 4096 + start]
    }
}

impl std::ops::DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let start = self.0.as_ptr().align_offset(4096);
        let end = self.0.len() - 4096 + start;
        &mut self.0[start..end]
    }
}

/// The pages in an order that no prefetcher guesses.
fn pairs(pages: usize, source_pool: usize) -> Vec<[u32; 2]> {
    (0..pages).map(|page| [((page * 7919 + 13) % source_pool) as u32, page as u32]).collect()
}

fn memcpy(source: &[u8], target: &mut [u8]) -> f64 {
    let start = Instant::now();
    target.copy_from_slice(source);
    std::hint::black_box(&target);
    start.elapsed().as_secs_f64()
}

fn timed(copier: &Copier, copy: &PagesCopy<'_>, source: &[u8], target: &mut [u8]) -> f64 {
    let start = Instant::now();
    copier.copy(copy, source, target).unwrap();
    start.elapsed().as_secs_f64()
}

/// Gathers and scatters once with each copier, in turns with memcpy, and returns the best seconds: memcpy, then gather
/// and scatter of each copier.
fn measure(
    copiers: &[Copier],
    blocks: &[PageBlock],
    pages: &[[u32; 2]],
    pool: &mut [u8],
    dense: &mut [u8],
) -> (f64, Vec<[f64; 2]>) {
    let backwards: Vec<[u32; 2]> = pages.iter().map(|&[from, to]| [to, from]).collect();
    let reversed: Vec<PageBlock> = blocks.iter().map(|block| block.reversed()).collect();
    let gather = PagesCopy { pages, blocks };
    let scatter = PagesCopy { pages: &backwards, blocks: &reversed };
    let other = buffer(dense.len());
    let mut best = (f64::MAX, vec![[f64::MAX; 2]; copiers.len()]);
    for _ in 0..ROUNDS {
        best.0 = best.0.min(memcpy(&other, dense));
        for (copier, best) in copiers.iter().zip(&mut best.1) {
            best[0] = best[0].min(timed(copier, &gather, pool, dense));
            best[1] = best[1].min(timed(copier, &scatter, dense, pool));
        }
    }
    best
}

fn print(name: &str, bytes: usize, (memcpy, seconds): &(f64, Vec<[f64; 2]>)) {
    let speed = |seconds: f64| bytes as f64 / seconds / 1e9;
    for (side, direction) in ["gather", "scatter"].into_iter().enumerate() {
        print!("{name} {direction:>8} {:>8.1}", speed(*memcpy));
        for seconds in seconds {
            print!(" {:>8.1} ({:.2})", speed(seconds[side]), memcpy / seconds[side]);
        }
        println!();
    }
}

fn copiers() -> Vec<Copier> {
    [1, 2, 4].map(|threads| Copier::new(threads).unwrap()).into()
}

/// Pages of 256 KiB out of a pool whose rows lie twice their length apart.
fn row_block(run: usize) -> PageBlock {
    let rows = (256 << 10) / run;
    PageBlock {
        run,
        source: 0,
        target: 0,
        source_page: 2 * run * rows,
        target_page: run * rows,
        dims: [Dimension { extent: rows, source: 2 * run, target: run }, Dimension::NONE, Dimension::NONE],
    }
}

fn rows(run: usize) {
    let bytes = 64 << 20;
    let (mut pool, mut dense) = (buffer(2 * bytes), buffer(bytes));
    let pages = bytes / (256 << 10);
    let best = measure(&copiers(), &[row_block(run)], &pairs(pages, pages), &mut pool, &mut dense);
    print(&format!("{run:>7} B"), bytes, &best);
}

/// `heads` of eight heads out of a pool, token-major (one array per layer and per K or V, of page, token, head) or
/// page-first (page, head, layer, K or V, token), into pieces of page, head, layer, K or V, token.
fn pool(bytes: usize, heads: usize, token_major: bool) {
    const ALL: usize = 8;
    const LAYERS: usize = 32;
    const ROW: usize = 256;
    let kv = TOKENS * ROW;
    let page = heads * LAYERS * 2 * kv;
    let pages = bytes / page;
    let pool_pages = (1 << 29) / (page / heads * ALL);
    let whole = page / heads * ALL;
    let (start, source_page, source) = if token_major {
        let page = TOKENS * ALL * ROW;
        (page * pool_pages, page, [ROW, 2 * page * pool_pages, ALL * ROW])
    } else {
        (kv, whole, [2 * kv * LAYERS, 2 * kv, ROW])
    };
    let target = [2 * kv * LAYERS, 2 * kv, ROW];
    let extents = [heads, LAYERS, TOKENS];
    let dims = [0, 1, 2].map(|d| Dimension { extent: extents[d], source: source[d], target: target[d] });
    let block = |side: usize| PageBlock {
        run: ROW,
        source: side * start,
        target: side * kv,
        source_page,
        target_page: page,
        dims,
    };
    let (mut pool, mut dense) = (buffer(whole * pool_pages), buffer(page * pages));
    let best = measure(&copiers(), &[block(0), block(1)], &pairs(pages, pool_pages), &mut pool, &mut dense);
    let name = if token_major { "token-major" } else { "page-head-first" };
    print(&format!("{name:>16} {heads:>6}"), page * pages, &best);
}

/// Compares stores through and past the caches, by size of the copy. The limit of `Stores::Auto` comes from these figures.
fn stores() {
    println!(
        "{:>9} {:>7} {:>8} {:>8} {:>17} {:>17}",
        "bytes", "row", "threads", "memcpy", "gather: cached", "streaming"
    );
    for bytes in [1_usize << 20, 4 << 20, 8 << 20, 16 << 20, 64 << 20] {
        for run in [256, 4 << 10, 64 << 10] {
            let (mut pool, mut dense) = (buffer(2 * bytes), buffer(bytes));
            let pages = bytes / (256 << 10);
            for threads in [1, 4] {
                let copiers = [Stores::Cached, Stores::Streaming]
                    .map(|stores| Copier::new(threads).unwrap().with_stores(stores));
                let (memcpy, best) =
                    measure(&copiers, &[row_block(run)], &pairs(pages, pages), &mut pool, &mut dense);
                let speed = |seconds: f64| bytes as f64 / seconds / 1e9;
                println!(
                    "{:>5} MiB {run:>7} {threads:>8} {:>8.1} {:>8.1} {:>8.1} {:>8.1} {:>8.1}",
                    bytes >> 20,
                    speed(memcpy),
                    speed(best[0][0]),
                    speed(best[0][1]),
                    speed(best[1][0]),
                    speed(best[1][1]),
                );
            }
        }
    }
}
