//! Sequences of launches that are recorded once and then repeated by one call.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaGraph, CudaStream};

use super::{CudaError, refused};

/// A recorded sequence of launches, with the arguments that they had.
pub struct Graph(CudaGraph);

// SAFETY: the driver lets any thread use a graph, one thread at a time, and `&mut self` ensures that.
unsafe impl Send for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").finish_non_exhaustive()
    }
}

/// A stream that records. Dropping this value ends the recording, so that the stream is usable after a panic, too.
struct Recording<'a>(Option<&'a Arc<CudaStream>>);

impl Recording<'_> {
    fn end(mut self) -> Result<Option<CudaGraph>, CudaError> {
        let stream = self.0.take();
        stream.map_or(Ok(None), |stream| {
            stream.end_capture(CUgraphInstantiate_flags(0)).map_err(refused("end a graph"))
        })
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if let Some(stream) = self.0 {
            // The recorded launches are discarded.
            let _given_up = stream.end_capture(CUgraphInstantiate_flags(0));
        }
    }
}

impl Graph {
    /// Records the work that `launch` puts into the stream, without executing it. `launch` may not wait for the device, and may not
    /// copy from memory of the host that is not pinned.
    ///
    /// # Errors
    /// The error of `launch`, or the driver's refusal.
    pub fn record<E: From<CudaError>>(
        stream: &Arc<CudaStream>,
        launch: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        stream
            .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .map_err(refused("begin a graph"))?;
        let recording = Recording(Some(stream));
        let launched = launch();
        let graph = recording.end();
        launched?;
        match graph? {
            Some(graph) => Ok(Self(graph)),
            None => {
                Err(CudaError::Driver { what: "end a graph".to_owned(), reason: "it is empty".to_owned() }
                    .into())
            }
        }
    }

    /// Puts the launches into the stream that they were recorded in.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Safety
    /// The memory that the launches name exists, and only they use it until the stream has executed them.
    pub unsafe fn launch(&mut self) -> Result<(), CudaError> {
        self.0.launch().map_err(refused("launch a graph"))
    }
}
