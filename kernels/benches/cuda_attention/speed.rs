//! How long things take on the device.

use cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};

use crate::Gpu;

const ROUNDS: usize = 5;

/// Best seconds of what `launch` enqueues, which it does `count` times in a captured graph, with the number of the time.
pub fn seconds(gpu: &Gpu, count: usize, mut launch: impl FnMut(usize)) -> f64 {
    let stream = &gpu.stream;
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    (0..count).for_each(&mut launch);
    let graph = stream
        .end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
        .unwrap()
        .unwrap();
    graph.launch().unwrap();
    let mut best = f64::MAX;
    for _ in 0..ROUNDS {
        let start = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
        graph.launch().unwrap();
        let end = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
        best = best.min(f64::from(start.elapsed_ms(&end).unwrap()) / 1e3);
    }
    best / count as f64
}
