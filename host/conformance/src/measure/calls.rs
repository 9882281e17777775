//! Calls of the plugin itself, as the host makes them.

use std::hint::black_box;
use std::sync::Arc;

use host_plugin_api::{
    Completion, Component, LayerGroup, LayerKind, NOTIFICATION_BYTES, Opening, PeerId, PoolAllocator,
    PoolOpening, PoolPage, StorageTier, Submission, Tag, TierCompletion, TransferBackend, Write,
};
use host_plugins::{Entry, PluginError, open_allocator, open_tier, open_transfer};

use super::{Call, Skipped, best};

const TURNS: usize = 20;
const CALLS: usize = 20_000;
/// Deadline of a shutdown. Nothing is in flight.
const SHUTDOWN_MS: u64 = 30_000;

/// The measurements of a role.
struct Calls {
    role: &'static str,
    all: Vec<Call>,
}

impl Calls {
    fn time(&mut self, name: impl Into<String>, mut made: impl FnMut()) {
        // One call before the measurement, for what the first call sets up.
        made();
        self.all.push(Call { role: self.role, name: name.into(), ns: best(TURNS, CALLS, made) });
    }
}

/// The calls of every role that opens, and the roles that the plugin does not open with this configuration.
pub fn measure(entry: &Entry, config: &str) -> Result<(Vec<Call>, Vec<Skipped>), String> {
    let opening = Opening { name: "bench".to_owned(), config: config.to_owned() };
    let (mut all, mut skipped, mut opened) = (Vec::new(), Vec::new(), 0);
    for role in
        ["transfer", "tier", "allocator"].into_iter().filter(|role| entry.manifest.role(role).is_some())
    {
        let mut calls = Calls { role, all: Vec::new() };
        let measured = match role {
            "transfer" => open_transfer(entry, &opening).map(|backend| transfer(&*backend, &mut calls)),
            "tier" => open_tier(entry, &opening).map(|store| tier(&*store, &mut calls)),
            _ => allocators(entry, config).map(|pools| {
                allocator(&*pools, &mut calls);
                Ok(())
            }),
        };
        match measured {
            Ok(ended) => {
                ended.map_err(|error: host_plugin_api::Error| error.to_string())?;
                all.append(&mut calls.all);
                opened += 1;
            }
            Err(error) if error.is_about_configuration() => {
                skipped.push(Skipped { role, reason: error.to_string() });
            }
            Err(error) => return Err(error.to_string()),
        }
    }
    match skipped.first() {
        // The given configuration is wrong.
        Some(first) if opened == 0 && !config.trim().is_empty() => Err(first.reason.clone()),
        _ => Ok((all, skipped)),
    }
}

fn transfer(backend: &dyn TransferBackend, calls: &mut Calls) -> host_plugin_api::Result<()> {
    let mut none = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }; 16];
    calls.time("poll, with nothing to report", || {
        black_box(backend.poll(&mut none));
    });
    calls.time("settled of a tag never seen", || {
        black_box(backend.settled(black_box(Tag(77))));
    });
    // A peer that does not exist. The plugin looks it up and refuses, or handles the submission in its own way.
    let submission = Submission {
        peer: PeerId(u32::MAX),
        notification_length: 0,
        tag: Tag(1),
        notification: [0; NOTIFICATION_BYTES],
    };
    let writes = [Write { length: 4096, ..Write::default() }; 64];
    calls.time("submit of 64 writes to an unknown peer", || {
        black_box(backend.submit(black_box(&submission), black_box(&writes)));
    });
    backend.shutdown(SHUTDOWN_MS)
}

fn tier(tier: &dyn StorageTier, calls: &mut Calls) -> host_plugin_api::Result<()> {
    let mut none = [TierCompletion::default(); 16];
    calls.time("poll, with nothing to report", || {
        black_box(tier.poll(&mut none));
    });
    calls.time("settled of a tag never seen", || {
        black_box(tier.settled(black_box(Tag(77))));
    });
    tier.shutdown(SHUTDOWN_MS)
}

fn allocators(entry: &Entry, config: &str) -> Result<Arc<dyn PoolAllocator>, PluginError> {
    let full = LayerGroup { kind: LayerKind::FULL, layers: 1, window: 0, parts: 1 };
    let (name, config) = ("bench".to_owned(), config.to_owned());
    open_allocator(entry, &PoolOpening { name, config, page_tokens: 16, pages: 4096, groups: vec![full] })
}

fn allocator(allocator: &dyn PoolAllocator, calls: &mut Calls) {
    let mut components = [Component::default(); 1];
    calls.time("components", || {
        black_box(allocator.components(&mut components));
    });
    let full = components[0].id;
    for count in [1, 8, 64, 512] {
        let mut pages = vec![PoolPage::default(); count];
        calls.time(format!("alloc and free of {count} pages"), || {
            black_box(allocator.alloc(full, &mut pages));
            black_box(allocator.free(full, &pages));
        });
    }
}
