//! The metrics of the tier on `/metrics`, summed over its instances. The names are those of `docs/plugins/mooncake-store.md`.

use host_plugin_api::{Counter, ErrorCode, Gauge, Result, host};

use super::queue::Work;

#[derive(Clone, Copy)]
pub struct Metrics {
    pub hits: Counter,
    pub misses: Counter,
    pub stored: Counter,
    pub bytes_read: Counter,
    pub bytes_written: Counter,
    pub get_errors: Counter,
    pub put_errors: Counter,
    pub puts_refused_no_room: Counter,
    pub skipped_no_master: Counter,
    pub timed_out: Counter,
    pub master_lost: Counter,
    pub master_back: Counter,
    pub fences: Counter,
    pub master_up: Gauge,
    pub pages_held: Gauge,
}

impl Metrics {
    pub fn new() -> Result<Self> {
        let counter = |name| host().counter(name);
        Ok(Self {
            hits: counter("store_hits")?,
            misses: counter("store_misses")?,
            stored: counter("store_stored")?,
            bytes_read: counter("store_bytes_read")?,
            bytes_written: counter("store_bytes_written")?,
            get_errors: counter("store_get_errors")?,
            put_errors: counter("store_put_errors")?,
            puts_refused_no_room: counter("store_puts_refused_no_room")?,
            skipped_no_master: counter("store_skipped_no_master")?,
            timed_out: counter("store_timed_out")?,
            master_lost: counter("store_master_lost")?,
            master_back: counter("store_master_back")?,
            fences: counter("store_fences")?,
            master_up: host().gauge("store_master_up")?,
            pages_held: host().gauge("store_pages_held")?,
        })
    }

    /// Counts how a get or put ended.
    pub fn ended(&self, work: Work, (status, bytes): (i32, u64)) {
        match (work, status) {
            (Work::Get, 1) => {
                self.hits.add(1);
                self.bytes_read.add(bytes);
            }
            (Work::Get, 0) => self.misses.add(1),
            (Work::Get, _) => self.get_errors.add(1),
            (Work::Put, 1) => {
                self.stored.add(1);
                self.bytes_written.add(bytes);
            }
            (Work::Put, code) if code == ErrorCode::NO_RESOURCE.0 => self.puts_refused_no_room.add(1),
            (Work::Put, _) => self.put_errors.add(1),
            (Work::Exists | Work::Delete, _) => {}
        }
    }
}
