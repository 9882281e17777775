//! An eventfd as a model needs it: a flag under a lock.

use std::sync::PoisonError;

use loom::sync::{Arc, Mutex};

/// An event. Clones are descriptors of the same event.
#[derive(Clone)]
pub struct Event(Arc<Mutex<bool>>);

impl Event {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(Arc::new(Mutex::new(false))))
    }

    pub fn fd(&self) -> i32 {
        -1
    }

    pub fn set(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }

    pub fn take(&self) -> bool {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether `poll` would report the descriptor as readable.
    pub fn is_readable(&self) -> bool {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
