//! Recorded decode steps.

use std::collections::HashMap;
use std::sync::Arc;

use host_core::KvLayout;
use host_kernels::cuda::{CudaStream, Graph};

use crate::ExecutorError;

/// Most graphs that are kept. One is some hundred launches, about a megabyte.
const MOST: usize = 128;

/// What the launches of a step depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub rows: usize,
    pub outputs: usize,
    /// Most positions that a row sees, rounded up.
    pub positions: usize,
    pub likeliest: bool,
    /// Words that are copied first.
    pub words: usize,
    pub layout: KvLayout,
    /// Addresses of all arrays.
    pub addresses: Vec<u64>,
}

/// The graphs of one executor.
#[derive(Debug, Default)]
pub(super) struct Graphs(HashMap<Key, Graph>);

impl Graphs {
    /// Does what `launch` enqueues, recorded the first time.
    pub fn run(
        &mut self,
        stream: &Arc<CudaStream>,
        key: Key,
        launch: impl FnOnce() -> Result<(), ExecutorError>,
    ) -> Result<(), ExecutorError> {
        if let Some(graph) = self.0.get_mut(&key) {
            return Ok(graph.launch()?);
        }
        if self.0.len() >= MOST {
            self.0.clear();
        }
        let mut graph = Graph::record(stream, launch)?;
        graph.launch()?;
        self.0.insert(key, graph);
        Ok(())
    }
}
