//! Counts the steps of work on an answer's text, so that tests can limit them. Outside of tests nothing is counted.

#[cfg(test)]
thread_local! {
    static STEPS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Notes that so many bytes were looked at or moved.
pub(crate) fn looked_at(bytes: usize) {
    #[cfg(test)]
    STEPS.set(STEPS.get() + bytes);
    #[cfg(not(test))]
    let _: usize = bytes;
}

/// The steps that `work` takes on this thread.
#[cfg(test)]
pub(crate) fn steps<T>(work: impl FnOnce() -> T) -> (usize, T) {
    let before = STEPS.get();
    let result = work();
    (STEPS.get() - before, result)
}
