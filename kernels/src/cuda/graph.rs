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

impl Graph {
    /// Records what `launch` puts into the stream, instead of doing it. Nothing there may wait for the device or copy from memory of
    /// the host that is not pinned. The memory that the launches name must live as long as the graph is used.
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
        let launched = launch();
        // Ended in any case, so that the stream goes on.
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).map_err(refused("end a graph"));
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
    pub fn launch(&mut self) -> Result<(), CudaError> {
        self.0.launch().map_err(refused("launch a graph"))
    }
}
