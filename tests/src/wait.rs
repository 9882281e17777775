//! Waits of all tests for something that has to happen, with one limit.

use std::fmt::Display;
use std::time::{Duration, Instant};

/// Longest wait for something that has to happen. Only the duration of a failing test depends on it, so it is long enough for a
/// machine that is ten times too busy.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// Time between two looks at other processes.
pub const PAUSE: Duration = Duration::from_millis(10);

/// Calls `look` until it has an answer, with pauses. Until then, `look` returns what it sees instead.
///
/// # Panics
/// After [`PATIENCE`], with what was waited for and what was seen last.
pub fn until<T, S: Display>(what: &str, look: impl FnMut() -> Result<T, S>) -> T {
    try_until(look).unwrap_or_else(|seen| in_vain(what, &seen))
}

/// As [`until`], for tasks and without a pause: each look waits for an answer by itself.
///
/// # Panics
/// As [`until`].
pub async fn answered_until<T, S: Display>(what: &str, mut look: impl AsyncFnMut() -> Result<T, S>) -> T {
    let start = Instant::now();
    loop {
        match look().await {
            Ok(answer) => return answer,
            Err(seen) if start.elapsed() > PATIENCE => in_vain(what, &seen),
            Err(_) => {}
        }
    }
}

/// As [`until`], for callers that can go on without an answer.
///
/// # Errors
/// After [`PATIENCE`], with what was seen last.
pub fn try_until<T, S>(look: impl FnMut() -> Result<T, S>) -> Result<T, S> {
    paced(|| std::thread::sleep(PAUSE), look)
}

/// As [`until`], but without a pause, for plugins that proceed only while they are polled.
///
/// # Panics
/// As [`until`].
pub fn poll_until<T, S: Display>(what: &str, look: impl FnMut() -> Result<T, S>) -> T {
    paced(std::thread::yield_now, look).unwrap_or_else(|seen| in_vain(what, &seen))
}

fn paced<T, S>(pause: impl Fn(), mut look: impl FnMut() -> Result<T, S>) -> Result<T, S> {
    let start = Instant::now();
    loop {
        match look() {
            Err(_) if start.elapsed() < PATIENCE => pause(),
            ended => return ended,
        }
    }
}

fn in_vain(what: &str, seen: &impl Display) -> ! {
    panic!("waited {PATIENCE:?} in vain for {what}; seen last: {seen}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_looks_until_there_is_an_answer() {
        let mut looks = 0;
        let mut third = || {
            looks += 1;
            if looks % 3 == 0 { Ok(looks) } else { Err(format!("{looks} looks")) }
        };
        assert_eq!(until("the third look", &mut third), 3);
        assert_eq!(poll_until("the sixth look", &mut third), 6);
    }

    #[test]
    #[should_panic(expected = "in vain for rain; seen last: clouds")]
    fn what_was_seen_last_is_said() {
        in_vain("rain", &"clouds");
    }
}
