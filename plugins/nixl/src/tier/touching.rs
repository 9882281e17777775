//! When registered memory is touched.

use std::sync::{Condvar, Mutex, PoisonError};

use host_transfer_kit::locked;

#[derive(Default)]
struct State {
    now: bool,
    /// Turns that have ended.
    ended: u64,
}

/// Turns in which the tier's thread touches memory, one right after the other.
///
/// A call that takes memory away waits for the turn that is under way. It does not wait for a pause between turns, which may
/// never come.
#[derive(Default)]
pub struct Touching {
    state: Mutex<State>,
    over: Condvar,
}

/// One turn. Regions that were gone before it are not touched in it.
pub struct Turn<'a>(&'a Touching);

impl Touching {
    /// For the tier's thread: begins a turn.
    pub fn begin(&self) -> Turn<'_> {
        locked(&self.state).now = true;
        Turn(self)
    }

    /// Waits for the end of the turn that is under way.
    pub fn wait(&self) {
        let state = locked(&self.state);
        let ended = state.ended;
        let same = |state: &mut State| state.now && state.ended == ended;
        drop(self.over.wait_while(state, same).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = locked(&self.0.state);
        state.now = false;
        state.ended += 1;
        drop(state);
        self.0.over.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_waiting_call_gets_past_the_turn_under_way_though_turns_never_pause() {
        let (touching, stop) = (Touching::default(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let first = touching.begin();
            let waiting = scope.spawn(|| touching.wait());
            scope.spawn(|| {
                let mut turn = Some(first);
                while !stop.load(Ordering::SeqCst) {
                    // The next turn begins before a waiting thread can have run.
                    drop(turn.take());
                    turn = Some(touching.begin());
                }
            });
            waiting.join().unwrap();
            stop.store(true, Ordering::SeqCst);
        });
    }
}
