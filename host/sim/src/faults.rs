//! The faults that a world may have, and the counters of what happened.

use std::ops::AddAssign;

use host_core::Time;

/// How likely each mishap is, from 0 to 1. All are zero by default.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Per message: it is lost.
    pub loss: f64,
    /// Per message: it comes twice. As often, it is up to five seconds late.
    pub repeat: f64,
    /// Per write that lands: one bit of its first page flips.
    pub flip: f64,
    /// Per point in time: a prefill worker dies, and a new worker takes its place. Each place has at most one death and
    /// [`more_deaths`](Self::more_deaths) further ones.
    pub death: f64,
    /// The same for workers that answer.
    pub decode_death: f64,
    /// Per point in time: one side of a connection sees it break. Late writes may still land until a fence is proven, and
    /// up to two fences fail.
    pub disconnect: f64,
    /// Per batch of a prefill worker: it fails, some of its layers computed.
    pub executor: f64,
    /// Per report that some layers of a batch are computed: it is lost. A report that is not lost may come later than
    /// the batch.
    pub news: f64,
    /// Per point in time: all caches are emptied.
    pub flush: f64,
    /// Per batch and per page of a storage tier: it is late, hangs, loses, cuts off, refuses or gives wrong answers.
    pub tier: f64,
    /// Per page that is read from a storage tier: the tier has evicted it, and says so.
    pub missing: f64,
    /// Per page: a copy between pool and host memory fails.
    pub copy: f64,
    /// Per point in time: nothing passes from one worker to another for up to 30 seconds. Messages are lost, handshakes fail, and
    /// writes land when the way is open again.
    pub partition: f64,
    /// Per point in time: a worker freezes for up to 20 seconds, and then continues with its state. Its memory can be
    /// written meanwhile.
    pub freeze: f64,
    /// Per point in time: a worker's work takes up to 21 times as long, for up to 20 seconds.
    pub slow: f64,
    /// Per point in time: a worker's clock jumps ahead by up to two minutes.
    pub clock: f64,
    /// Per write: it fails, and either none or all of its data arrives.
    pub write: f64,
    /// Per part that arrives: the plugin reports it again, up to five seconds later.
    pub notice: f64,
    /// Per point in time: the router loses its connection to the legs of one request.
    pub stream: f64,
    /// Per point in time: storage loses everything.
    pub wipe: f64,
    /// Per batch of a worker that answers: it fails.
    pub decode_executor: f64,
    /// Per draw of a worker that answers: the tokens that may follow are not known in time. Not for models that keep a
    /// state.
    pub late_draw: f64,
    /// Deaths of each place beyond its first.
    pub more_deaths: u32,
    /// Nothing goes wrong from this time on.
    pub until: Option<Time>,
    /// Not a fault. Per write: it lands beside the receiver's pages and is copied into them later, as with staging.
    pub staged: f64,
    /// Not a fault. Per write: its pages are read when it begins, and not when it lands. A backend may do either.
    pub read_early: f64,
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// What happened in a world, or in many.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Outcome {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl AddAssign for Outcome {
            fn add_assign(&mut self, other: Self) {
                $(self.$name += other.$name;)+
            }
        }
    };
}

counters! {
    /// Requests that were answered.
    finished,
    /// Requests that ended without a complete answer.
    failed,
    /// Requests that followed an answer.
    turns,
    /// Pages in quarantine, summed over [audits](crate::World::audit_every).
    quarantined,
    /// Workers that died.
    deaths,
    /// Connections that one side saw break.
    disconnects,
    /// Fences that could not be proven at once.
    fences_failed,
    /// Writes that were copied into the receiver's pages.
    copies,
    /// Rooms that were given up while their pages were copied.
    closed_late,
    /// Batches that failed.
    batches_failed,
    /// Pages in use when caches were emptied.
    flushed_in_use,
    /// Batches of reads or writes that hung.
    hung,
    /// Transfers that arrived damaged. This and the next counters are sums over all workers (see
    /// [`Stats`](host_core::scheduler::Stats)).
    integrity_failures,
    /// Messages repeated.
    messages_repeated,
    /// Messages dropped.
    messages_stale,
    /// Prompt tokens found cached.
    cached_tokens,
    /// Cached pages given up.
    evicted_pages,
    /// Parts sent while later layers were computed.
    layer_parts_sent,
    /// Requests that shared a transfer.
    shared_transfers,
    /// Preemptions.
    retractions,
    /// Tokens that preempted requests found again.
    restored_tokens,
    /// Restored tokens that came from offload tiers.
    restored_offload_tokens,
    /// Tokens that were drafted.
    drafted_tokens,
    /// Drafted tokens that were right.
    drafts_right,
    /// Draws that were put off.
    late_draws,
    /// Tokens that preempted requests computed again.
    recomputed_tokens,
    /// Tokens computed again for a window.
    window_recomputed_tokens,
    /// Pages promised by host memory. For this and the next counters see
    /// [`HierarchyStats`](host_core::hierarchy::HierarchyStats).
    promised_host,
    /// Pages promised by storage tiers.
    promised_storage,
    /// Window parts promised.
    promised_windows,
    /// Pages loaded.
    loaded,
    /// Restores that failed.
    restores_failed,
    /// Transfers that were asked for again, larger.
    renegotiated,
    /// Prompts computed instead of restored.
    computed_instead,
    /// Pages saved.
    saved,
    /// Pages dropped.
    dropped,
    /// Pages written to storage tiers.
    written,
}
