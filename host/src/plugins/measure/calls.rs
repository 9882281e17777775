//! Calls of the plugin itself, as the host makes them.

use std::hint::black_box;

use host_plugin_api::{
    Budget, Completion, Component, ComponentPool, NOTIFICATION_BYTES, Opening, PeerId, PoolOpening, PoolPage,
    Submission, Tag, TierCompletion, Write,
};

use super::{Call, best};
use crate::plugins::{Entry, open_allocator, open_tier, open_transfer};

const TURNS: usize = 20;
const CALLS: usize = 20_000;

fn call(name: impl Into<String>, mut made: impl FnMut()) -> Call {
    // Once outside of the clock, for what is set up at the first call.
    made();
    Call { name: name.into(), ns: best(TURNS, CALLS, made) }
}

pub fn measure(entry: &Entry) -> Result<Vec<Call>, String> {
    let mut calls = Vec::new();
    let opening = Opening { name: "bench".to_owned(), config: String::new() };
    if entry.manifest.role("transfer").is_some() {
        let backend = open_transfer(entry, &opening).map_err(|error| error.to_string())?;
        let mut none = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }; 16];
        calls.push(call("poll, with nothing to report", || {
            black_box(backend.poll(&mut none));
        }));
        calls.push(call("settled of a tag never seen", || {
            black_box(backend.settled(black_box(Tag(77))));
        }));
        // A peer that is not there: the plugin looks and refuses, or takes it for what it is.
        let submission = Submission {
            peer: PeerId(u32::MAX),
            notification_length: 0,
            tag: Tag(1),
            notification: [0; NOTIFICATION_BYTES],
        };
        let writes = [Write { length: 4096, ..Write::default() }; 64];
        calls.push(call("submit of 64 writes to nobody", || {
            black_box(backend.submit(black_box(&submission), black_box(&writes)));
        }));
        backend.shutdown(2000).map_err(|error| error.to_string())?;
    }
    if entry.manifest.role("tier").is_some() {
        let tier = open_tier(entry, &opening).map_err(|error| error.to_string())?;
        let mut none = [TierCompletion::default(); 16];
        calls.push(call("poll, with nothing to report", || {
            black_box(tier.poll(&mut none));
        }));
        calls.push(call("settled of a tag never seen", || {
            black_box(tier.settled(black_box(Tag(77))));
        }));
        tier.shutdown(2000).map_err(|error| error.to_string())?;
    }
    if entry.manifest.role("allocator").is_some() {
        let full = ComponentPool { component: Component::FULL, pages: 4096, window: 0, reserved: 0 };
        let name = opening.name.clone();
        let opening = PoolOpening { name, config: String::new(), page_tokens: 16, components: vec![full] };
        let allocator = open_allocator(entry, &opening).map_err(|error| error.to_string())?;
        let mut budgets = [Budget::default(); 1];
        calls.push(call("budgets", || {
            black_box(allocator.budgets(&mut budgets));
        }));
        for count in [1, 8, 64, 512] {
            let mut pages = vec![PoolPage::default(); count];
            calls.push(call(format!("alloc and free of {count} pages"), || {
                black_box(allocator.alloc(Component::FULL, &mut pages));
                black_box(allocator.free(Component::FULL, &pages));
            }));
        }
    }
    Ok(calls)
}
