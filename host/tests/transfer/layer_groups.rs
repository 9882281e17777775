//! Sending layers while later ones are computed changes no answer. Executors report no layer too early.

use std::path::Path;
use std::sync::mpsc::channel;

use host_core::layout::KvOrder;
use host_core::window::WindowPages;
use host_core::{Batch, KvLayout, KvShape, PageId, Room, Sampling, Sequence};
use host_executor::cpu::{CpuExecutor, CpuOptions};
use host_executor::synthetic::{Cost, Synthetic, SyntheticShape};
use host_executor::{Executor, KvMemory};
use host_tests::cluster::{Cluster, Start};
use host_tests::plugin_files;

fn start(plugin: &str, config: &str, flags: &[&str]) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&[plugin]);
    let directory = plugins.path().display().to_string();
    let always = ["--plugins-dir", &directory, "--plugins", plugin, "--threads", "2", "--kv-memory", "16MiB"];
    let flags: Vec<String> = always.iter().chain(flags).map(|flag| (*flag).to_owned()).collect();
    let workers = if flags.iter().any(|flag| flag == "aggregated") { 1 } else { 2 };
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    (Cluster::start(&Start { program, flags, config: config.to_owned(), workers }), plugins)
}

/// Prompts of lengths around the page size and the chunk sizes, from a fixed generator.
fn prompts() -> Vec<Vec<u32>> {
    let mut state = 0x1234_5678_u32;
    let lengths = [1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 200];
    let mut token = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 16 & 0xff
    };
    lengths.iter().map(|length| (0..*length).map(|_| token()).collect()).collect()
}

/// Asks for all prompts at once, so that batches mix.
fn answers(cluster: &Cluster) -> Vec<Vec<u64>> {
    let prompts = prompts();
    std::thread::scope(|scope| {
        let ask = |prompt: &'_ Vec<u32>| {
            let prompt = prompt.clone();
            scope.spawn(move || cluster.generate(&prompt, 8).unwrap().tokens)
        };
        let threads: Vec<_> = prompts.iter().map(ask).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn metric(cluster: &Cluster, role: &str, name: &str) -> f64 {
    cluster.metrics(&cluster.worker(role))[name]
}

#[test]
fn tokens_equal_the_aggregated_workers_for_every_layout_chunk_size_and_number_of_groups() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("tiny").display().to_string();
    host_tests::model::tiny_qwen3(Path::new(&model), 1).unwrap();
    let models = [("synthetic", ["--executor", "synthetic"]), ("tiny Qwen3", ["--model", &model])];
    for (name, model) in models {
        let (whole, _plugins) = start("shm", "", &[&model[..], &["--role", "aggregated"]].concat());
        let right = answers(&whole);
        for layout in KvOrder::ALL {
            for (chunk, batch, groups) in [("512", "64", "2"), ("33", "4", "2"), ("16", "2", "off")] {
                let layout = layout.to_string();
                let flags = ["--kv-layout", &layout, "--chunk-tokens", chunk, "--max-batch", batch];
                let (split, _plugins) =
                    start("shm", "", &[&model[..], &flags, &["--layer-groups", groups]].concat());
                let how = format!("{name}, {layout}, chunk {chunk}, batch {batch}, layer groups {groups}");
                assert_eq!(answers(&split), right, "{how}");
                split.wait("all pages to be free", || split.all_free());
                let parts = metric(&split, "prefill", "host_layer_parts_sent_total");
                println!("{how}: {parts} parts ahead");
                assert_eq!(parts > 0.0, groups != "off", "{how}");
                assert_eq!(metric(&split, "decode", "host_integrity_failures_total"), 0.0, "{how}");
            }
        }
    }
}

#[test]
fn a_byte_flipped_in_a_layer_sent_ahead_costs_a_second_transfer_and_no_answer() {
    let synthetic = ["--executor", "synthetic"];
    let (whole, _plugins) = start("shm", "", &[&synthetic[..], &["--role", "aggregated"]].concat());
    let prompt: Vec<u32> = (0..100).collect();
    let right = whole.generate(&prompt, 16).unwrap().tokens;
    let config = "[plugin.corrupting]\nflip_write = 1\nflips = 1\n[synthetic]\nstep-us = 2000\n";
    for integrity in [true, false] {
        let off: &[&str] = if integrity { &[] } else { &["--no-page-integrity"] };
        let flags = [&synthetic[..], &["--layer-groups", "4"], off].concat();
        let (split, _plugins) = start("corrupting", config, &flags);
        let answer = split.generate(&prompt, 16).unwrap().tokens;
        // The first write sends first layers of pages.
        assert!(metric(&split, "prefill", "host_layer_parts_sent_total") > 0.0);
        assert_eq!(answer == right, integrity, "the flipped byte was read only where digests were off");
        let failures = metric(&split, "decode", "host_integrity_failures_total");
        assert_eq!(failures, f64::from(u8::from(integrity)));
        split.wait("all pages to be free", || split.all_free());
    }
}

/// A batch with one sequence of a bit more than two pages, and one decode step.
fn batch() -> Batch {
    let pages = |first: u32, count: u32| (first..first + count).map(PageId).collect();
    let long = (0..35).map(|token| token * 7 % 200).collect();
    let sequence = |room, tokens, pages, sample| Sequence {
        room,
        tokens,
        start: 0,
        pages,
        window: WindowPages::default(),
        recompute: 0..0,
        drafted: 0,
        sample,
        scored: None,
    };
    let sequences = vec![
        sequence(Room(1), long, pages(0, 3), Some(Sampling::GREEDY.into())),
        sequence(Room(2), vec![9], pages(5, 1), None),
    ];
    Batch { id: 1, sequences, layer_group: 1 }
}

/// The bytes of some layers at all positions of the batch.
fn layers_of(kv: &KvMemory, batch: &Batch, layers: std::ops::Range<usize>) -> Vec<u8> {
    let shape = kv.layout().shape;
    let mut bytes = Vec::new();
    for (sequence, layer) in batch.sequences.iter().flat_map(|s| layers.clone().map(move |layer| (s, layer)))
    {
        for position in 0..sequence.end() {
            let (page, slot) = (sequence.pages[position / shape.page_tokens], position % shape.page_tokens);
            for (head, side) in (0..shape.heads).flat_map(|head| [(head, 0), (head, 1)]) {
                bytes.extend_from_slice(kv.read_row(page, head, layer, side, slot));
            }
        }
    }
    bytes
}

#[test]
fn layers_that_an_executor_calls_done_are_final() {
    let directory = tempfile::tempdir().unwrap();
    host_tests::model::tiny_qwen3(directory.path(), 1).unwrap();
    let executors: [Box<dyn Executor>; 2] = [
        Box::new(Synthetic::new(SyntheticShape::default(), Cost::default()).unwrap()),
        Box::new(
            CpuExecutor::load(directory.path(), CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap(),
        ),
    ];
    for mut executor in executors {
        for order in KvOrder::ALL {
            let model = executor.shape().clone();
            let shape = KvShape {
                pages: 8,
                heads: model.kv_heads,
                layers: model.layers,
                page_tokens: 16,
                head_dim: model.head_dim,
                value_dim: model.head_dim,
                dtype: model.kv_dtype,
            };
            let mut kv = KvMemory::new(KvLayout::new(shape, order)).unwrap();
            // SAFETY: the reader reads only layers that the executor has reported as done, within that call, and is not used
            // afterwards.
            let reader = unsafe { kv.share() };
            let (batch, read) = (batch(), batch());
            let (said, heard) = channel();
            let mut layers_done = |done: usize| {
                // The transfer thread also reads while the executor works.
                said.send((done, layers_of(&reader, &read, 0..done))).unwrap();
            };
            let outputs = executor.forward_by_layer(&mut kv, &batch, &mut layers_done).unwrap();
            let news: Vec<(usize, Vec<u8>)> = heard.try_iter().collect();
            let told: Vec<usize> = news.iter().map(|(done, _)| *done).collect();
            assert!((1..model.layers).all(|layer| told.contains(&layer)), "{} told of {told:?}", model.math);
            for (done, bytes) in news {
                assert!(bytes == layers_of(&kv, &batch, 0..done), "{}: {done} layers, {order}", model.math);
            }
            // The outputs are the same without reports of layers.
            let mut other = KvMemory::new(KvLayout::new(shape, order)).unwrap();
            assert_eq!(executor.forward(&mut other, &batch).unwrap(), outputs);
            assert!(layers_of(&kv, &batch, 0..model.layers) == layers_of(&other, &batch, 0..model.layers));
        }
    }
}
