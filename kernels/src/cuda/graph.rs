//! Launches that are recorded once and then repeated as one.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaGraph, CudaStream};

use super::{CudaError, refused};

/// A recorded sequence of launches, with the arguments that they had.
pub struct Graph(CudaGraph);

// SAFETY: the driver lets any thread use a graph, one at a time, and `&mut self` sees to that.
unsafe impl Send for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").finish_non_exhaustive()
    }
}

/// A stream that records. It goes on in any case, also after a panic.
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
            // What was recorded is given up.
            let _given_up = stream.end_capture(CUgraphInstantiate_flags(0));
        }
    }
}

impl Graph {
    /// Records what `launch` puts into the stream, instead of doing it. Nothing there may wait for the device or copy from memory of
    /// the host that is not pinned.
    ///
    /// # Errors
    /// What `launch` says, or the driver's refusal.
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
    /// The memory that the launches name is there, and is theirs until the stream has come to their end.
    pub unsafe fn launch(&mut self) -> Result<(), CudaError> {
        self.0.launch().map_err(refused("launch a graph"))
    }
}
