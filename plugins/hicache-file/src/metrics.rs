//! The metrics of the plugin on `/metrics`, summed over its instances.

use host_plugin_api::{Counter, ErrorCode, Gauge, Result, host};

/// Names are those of `docs/plugins/hicache-file.md`.
#[derive(Clone, Copy)]
pub struct Metrics {
    pub hits: Counter,
    pub misses: Counter,
    pub stored: Counter,
    pub stored_already: Counter,
    pub bytes_read: Counter,
    pub bytes_written: Counter,
    pub corrupt: Counter,
    pub deleted: Counter,
    pub segments_evicted: Counter,
    pub pages_evicted: Counter,
    pub would_block: Counter,
    refused_no_room: Counter,
    refused_error: Counter,
    refused_cancelled: Counter,
    refused_invalid: Counter,
    pub read_errors: Counter,
    pub pages_waiting: Gauge,
    pub pages: Gauge,
    pub bytes: Gauge,
    pub segments: Gauge,
}

impl Metrics {
    pub fn new() -> Result<Self> {
        let counter = |name| host().counter(name);
        let gauge = |name| host().gauge(name);
        Ok(Self {
            hits: counter("hits")?,
            misses: counter("misses")?,
            stored: counter("stored")?,
            stored_already: counter("stored_already")?,
            bytes_read: counter("bytes_read")?,
            bytes_written: counter("bytes_written")?,
            corrupt: counter("corrupt")?,
            deleted: counter("deleted")?,
            segments_evicted: counter("segments_evicted")?,
            pages_evicted: counter("pages_evicted")?,
            would_block: counter("would_block")?,
            refused_no_room: counter("puts_refused_no_room")?,
            refused_error: counter("puts_refused_error")?,
            refused_cancelled: counter("puts_refused_cancelled")?,
            refused_invalid: counter("puts_refused_invalid")?,
            read_errors: counter("read_errors")?,
            pages_waiting: gauge("pages_waiting")?,
            pages: gauge("pages")?,
            bytes: gauge("bytes")?,
            segments: gauge("segments")?,
        })
    }

    /// Counts a put that ended in this code.
    pub fn refused(&self, code: ErrorCode) {
        match code {
            ErrorCode::NO_RESOURCE => self.refused_no_room.add(1),
            ErrorCode::CANCELLED => self.refused_cancelled.add(1),
            ErrorCode::INVALID_ARGUMENT => self.refused_invalid.add(1),
            _ => self.refused_error.add(1),
        }
    }
}
