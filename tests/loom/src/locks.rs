//! Loom's locks with the interface of `parking_lot`.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::time::Duration;

use crate::sync::locks;

#[derive(Debug, Default)]
pub struct Mutex<T>(locks::Mutex<T>);

/// A locked [`Mutex`]. Empty only while its thread waits.
#[derive(Debug)]
pub struct MutexGuard<'a, T>(Option<locks::MutexGuard<'a, T>>);

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Self(locks::Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().unwrap_or_else(|| unreachable!("a guard is given away while its thread waits"))
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().unwrap_or_else(|| unreachable!("a guard is given away while its thread waits"))
    }
}

#[derive(Debug, Default)]
pub struct Condvar(locks::Condvar);

impl Condvar {
    pub fn new() -> Self {
        Self(locks::Condvar::new())
    }

    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        guard.0 = guard.0.take().map(|guard| self.0.wait(guard).unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits. Returns whether the time is over, which never happens in a model.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, most: Duration) -> bool {
        let given = guard.0.take();
        guard.0 =
            given.map(|given| self.0.wait_timeout(given, most).unwrap_or_else(PoisonError::into_inner).0);
        false
    }

    pub fn notify_one(&self) -> bool {
        self.0.notify_one();
        true
    }

    pub fn notify_all(&self) -> usize {
        self.0.notify_all();
        0
    }
}

#[derive(Debug, Default)]
pub struct RwLock<T>(locks::RwLock<T>);

impl<T> RwLock<T> {
    pub fn read(&self) -> locks::RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn write(&self) -> locks::RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
