//! The guard around a plugin's code, linked instead of loaded, so that Miri and the sanitizers can check it:
//!
//!     cargo xtask nightly asan valgrind miri
//!
//! One leak is intended: the payload of a panic is forgotten, because its own drop may panic.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use host_plugin_api::abi::{AllocatorObject, RSlice, RSliceMut, open_guarded_allocator};
use host_plugin_api::{Component, ComponentId, ErrorCode, PoolAllocator, PoolOpening, PoolPage, Result};

/// Panics in `components` and in its drop, and counts calls of `alloc`.
struct Panicking(Arc<AtomicU32>);

impl Drop for Panicking {
    fn drop(&mut self) {
        self.0.fetch_add(100, Ordering::SeqCst);
        panic!("in the drop");
    }
}

/// A payload whose own drop panics.
struct Nasty;

impl Drop for Nasty {
    fn drop(&mut self) {
        panic!("in the payload's drop");
    }
}

impl PoolAllocator for Panicking {
    fn components(&self, _components: &mut [Component]) -> i32 {
        std::panic::panic_any(Nasty)
    }
    fn alloc(&self, _component: ComponentId, pages: &mut [PoolPage]) -> i32 {
        self.0.fetch_add(1, Ordering::SeqCst);
        pages.fill(PoolPage(7));
        0
    }
    fn free(&self, _component: ComponentId, pages: &[PoolPage]) -> i32 {
        pages.len() as i32
    }
}

fn open(
    factory: impl FnOnce(&PoolOpening) -> Result<Panicking>,
) -> std::result::Result<AllocatorObject, String> {
    let opened = open_guarded_allocator(factory, "test".into(), "".into(), 16, 64, RSlice::from_slice(&[]));
    opened.into_result().map_err(|error| error.message.into())
}

#[test]
fn a_panic_is_a_code_the_instance_is_poisoned_and_its_drop_is_contained() {
    let entered = Arc::new(AtomicU32::new(0));
    let object = open(|_| Ok(Panicking(entered.clone()))).unwrap();
    let mut pages = [PoolPage(0); 2];
    assert_eq!(object.alloc(ComponentId(0), RSliceMut::from_mut_slice(&mut pages)), 0);
    assert_eq!(pages, [PoolPage(7); 2]);
    assert_eq!(object.free(ComponentId(0), RSlice::from_slice(&pages)), 2);
    let mut components = [Component::default(); 1];
    for _ in 0..2 {
        assert_eq!(object.components(RSliceMut::from_mut_slice(&mut components)), ErrorCode::PANICKED.0);
    }
    let refused = object.alloc(ComponentId(0), RSliceMut::from_mut_slice(&mut pages));
    assert_eq!((refused, entered.load(Ordering::SeqCst)), (ErrorCode::PANICKED.0, 1), "not entered again");
    drop(object);
    assert_eq!(entered.load(Ordering::SeqCst), 101, "dropped once");
}

#[test]
fn a_factory_that_panics_is_an_error_with_its_text() {
    let error = open(|_| panic!("no pool of {} tokens", 16)).err().unwrap();
    assert_eq!(error, "the plugin panicked: no pool of 16 tokens");
}

#[test]
fn instances_of_several_threads_come_and_go() {
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let entered = Arc::new(AtomicU32::new(0));
                let object = open(|_| Ok(Panicking(entered.clone()))).unwrap();
                let mut pages = vec![PoolPage(0); 100];
                assert_eq!(object.alloc(ComponentId(0), RSliceMut::from_mut_slice(&mut pages)), 0);
                drop(object);
                assert_eq!(entered.load(Ordering::SeqCst), 101);
            });
        }
    });
}
