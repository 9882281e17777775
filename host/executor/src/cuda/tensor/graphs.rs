//! Recorded decode steps.

use std::collections::HashMap;
use std::sync::Arc;

use host_core::KvLayout;
use host_kernels::cuda::{CudaStream, Graph};

use crate::ExecutorError;

/// Most graphs that are kept. A graph has some hundred launches and takes about a megabyte.
const MOST: usize = 128;

/// Everything that the launches of a step depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub rows: usize,
    pub outputs: usize,
    /// Most positions that a row sees, rounded up.
    pub positions: usize,
    pub likeliest: bool,
    /// Words of the batch's arrays, which the first launch copies.
    pub words: usize,
    pub layout: KvLayout,
    /// Addresses of all arrays. The partial sums of attention are represented by their number, because they only grow.
    pub addresses: Vec<u64>,
}

/// The graphs of one executor.
#[derive(Debug, Default)]
pub(super) struct Graphs {
    /// Each graph with the number of the run that used it last.
    known: HashMap<Key, (Graph, u64)>,
    runs: u64,
}

impl Graphs {
    /// Runs the launches that `launch` enqueues. Records them the first time.
    pub fn run(
        &mut self,
        stream: &Arc<CudaStream>,
        key: Key,
        launch: impl FnOnce() -> Result<(), ExecutorError>,
    ) -> Result<(), ExecutorError> {
        self.runs += 1;
        if let Some((graph, used)) = self.known.get_mut(&key) {
            *used = self.runs;
            // SAFETY: the key has the addresses of all arrays that the launches name, and the executor has these arrays now.
            return Ok(unsafe { graph.launch() }?);
        }
        if self.known.len() >= MOST {
            let oldest = self.known.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| key.clone());
            oldest.map(|oldest| self.known.remove(&oldest));
        }
        let mut graph = Graph::record(stream, launch)?;
        // SAFETY: it was recorded with the arrays that the executor has now.
        unsafe { graph.launch() }?;
        self.known.insert(key, (graph, self.runs));
        Ok(())
    }
}
