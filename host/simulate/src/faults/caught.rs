//! Checks that fail, as values: the core and the world panic where something does not hold.

use std::cell::{Cell, RefCell};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use super::Broken;

thread_local! {
    /// Whether a panic is a value here and not to be shown.
    static CATCHING: Cell<bool> = const { Cell::new(false) };
    /// Where the last one that was caught happened.
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

static HOOK: Once = Once::new();

/// Runs something, and returns what it panics with. What it has changed is left as it was then.
pub(super) fn catch(run: impl FnOnce()) -> Result<(), Broken> {
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !CATCHING.get() {
                return before(info);
            }
            let at = info.location().map_or(String::new(), |at| format!("{}:{}", at.file(), at.line()));
            LAST.set(at);
        }));
    });
    CATCHING.set(true);
    let ended = panic::catch_unwind(AssertUnwindSafe(run));
    CATCHING.set(false);
    ended.map_err(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        let what = text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Broken { what: what.unwrap_or_default(), at: LAST.take() }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_that_fails_is_told_with_its_place() {
        let broken = catch(|| panic!("page {} is held twice", 7)).unwrap_err();
        assert_eq!(broken.what, "page 7 is held twice");
        assert!(broken.at.contains("caught.rs:"), "{broken:?}");
        assert_eq!(catch(|| ()), Ok(()));
    }
}
