//! Measures times on the device.

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};

use crate::Gpu;

const ROUNDS: usize = 5;

/// A graph of the work that `launch` enqueues.
pub fn capture(gpu: &Gpu, launch: impl FnOnce()) -> CudaGraph {
    let stream = &gpu.stream;
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    launch();
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    stream.end_capture(flags).unwrap().unwrap()
}

/// Best seconds of the work that one call of `launch` enqueues. A captured graph has `count` calls, each with its number.
pub fn seconds(gpu: &Gpu, count: usize, launch: impl FnMut(usize)) -> f64 {
    let graph = capture(gpu, || (0..count).for_each(launch));
    graph.launch().unwrap();
    let mut best = f64::MAX;
    for _ in 0..ROUNDS {
        let start = gpu.stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
        graph.launch().unwrap();
        let end = gpu.stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
        best = best.min(f64::from(start.elapsed_ms(&end).unwrap()) / 1e3);
    }
    best / count as f64
}
