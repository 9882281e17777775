//! Stops instances in reverse order or together, each within a deadline. Unloads no library.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use host_plugin_api::{Error, ErrorCode, Result};

/// Extra time for a plugin after its own deadline, before it is left behind.
const SLACK: Duration = Duration::from_secs(1);

type Stop = Box<dyn FnOnce(u64) -> Result<()> + Send>;

/// Running instances, in the order in which they were opened.
#[derive(Default)]
pub struct Running(Vec<(String, Stop)>);

impl Running {
    /// Adds an instance. `stop` is its `shutdown` and takes a deadline in milliseconds.
    pub fn opened(&mut self, plugin: &str, stop: impl FnOnce(u64) -> Result<()> + Send + 'static) {
        self.0.push((plugin.to_owned(), Box::new(stop)));
    }

    /// Stops all instances, the last opened first. An instance that does not return in time is left behind with its thread, which
    /// only the end of the process can end. The remaining instances are stopped all the same.
    ///
    /// # Errors
    /// The error of each instance that did not stop, with the name of its plugin.
    pub fn stop(self, deadline: Duration) -> std::result::Result<(), Vec<(String, Error)>> {
        let mut failed = Vec::new();
        for (plugin, stop) in self.0.into_iter().rev() {
            if let Err(error) = within(deadline, stop) {
                tracing::error!(plugin, %error, "a plugin did not stop; the process ends without it");
                failed.push((plugin, error));
            }
        }
        if failed.is_empty() { Ok(()) } else { Err(failed) }
    }

    /// As [`stop`](Self::stop) for instances that do not depend on each other. Stops all at the same time, so that many that hang
    /// take no longer than one.
    ///
    /// # Errors
    /// As for [`stop`](Self::stop).
    pub fn stop_together(self, deadline: Duration) -> std::result::Result<(), Vec<(String, Error)>> {
        let alone = |one| Running(vec![one]).stop(deadline);
        let ends: Vec<_> = std::thread::scope(|scope| {
            let stops: Vec<_> = self.0.into_iter().map(|one| scope.spawn(move || alone(one))).collect();
            stops.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
        });
        // A join cannot fail: a plugin's panic ends its own thread, and these threads only wait.
        let failed: Vec<_> =
            ends.into_iter().flatten().filter_map(std::result::Result::err).flatten().collect();
        if failed.is_empty() { Ok(()) } else { Err(failed) }
    }
}

fn within(deadline: Duration, stop: Stop) -> Result<()> {
    let (told, answer) = channel();
    let milliseconds = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
    let thread = std::thread::Builder::new().name("plugin-stop".into()).spawn(move || {
        // After a timeout the receiver is gone and the answer is dropped.
        let _unheard = told.send(stop(milliseconds));
    });
    let timeout = |text: String| Error::new(ErrorCode::TIMEOUT, text);
    thread.map_err(|error| timeout(format!("no thread to stop it with: {error}")))?;
    match answer.recv_timeout(deadline + SLACK) {
        Ok(answer) => answer,
        Err(RecvTimeoutError::Timeout) => {
            Err(timeout(format!("its shutdown has not returned after {} s", (deadline + SLACK).as_secs())))
        }
        Err(RecvTimeoutError::Disconnected) => {
            Err(Error::new(ErrorCode::PANICKED, "its shutdown ended without an answer"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn the_last_opened_stops_first_and_one_that_fails_does_not_delay_the_others() {
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut running = Running::default();
        for (name, fails) in [("first", false), ("second", true), ("third", false)] {
            let order = order.clone();
            running.opened(name, move |deadline| {
                order.lock().unwrap().push((name, deadline));
                if fails { Err(Error::new(ErrorCode::IO, "cannot")) } else { Ok(()) }
            });
        }
        let failed = running.stop(Duration::from_millis(300_000)).unwrap_err();
        assert_eq!(*order.lock().unwrap(), [("third", 300_000), ("second", 300_000), ("first", 300_000)]);
        assert_eq!(failed.len(), 1);
        assert_eq!((failed[0].0.as_str(), failed[0].1.message.as_str()), ("second", "cannot"));
    }

    #[test]
    fn those_that_stop_together_do_not_wait_for_each_other() {
        let all = Arc::new(std::sync::Barrier::new(3));
        let mut running = Running::default();
        for rank in 0..3 {
            let all = all.clone();
            running.opened(&format!("rank {rank}"), move |_| {
                all.wait();
                if rank == 1 { Err(Error::new(ErrorCode::IO, "cannot")) } else { Ok(()) }
            });
        }
        let failed = running.stop_together(Duration::from_secs(300)).unwrap_err();
        assert_eq!(failed.len(), 1);
        assert_eq!((failed[0].0.as_str(), failed[0].1.message.as_str()), ("rank 1", "cannot"));
    }

    #[test]
    fn one_that_never_returns_is_left_behind() {
        let mut running = Running::default();
        let stopped = Arc::new(Mutex::new(false));
        let seen = stopped.clone();
        running.opened("good", move |_| {
            *seen.lock().unwrap() = true;
            Ok(())
        });
        running.opened("stuck", |_| {
            loop {
                std::thread::park();
            }
        });
        let failed = running.stop(Duration::ZERO).unwrap_err();
        assert_eq!((failed[0].0.as_str(), failed[0].1.code), ("stuck", ErrorCode::TIMEOUT));
        // Its stop may still run after its deadline, if its thread gets no processor.
        let had_its_turn = || if *stopped.lock().unwrap() { Ok(()) } else { Err("it still runs") };
        host_tests::wait::until("the other to have its turn", had_its_turn);
    }
}
