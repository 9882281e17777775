//! Checks that fail, as values: the core and the world panic where something does not hold.

use std::panic::{self, AssertUnwindSafe};

use super::Broken;

/// Runs something, and returns what it panics with. What it has changed is left as it was then.
pub(super) fn catch(run: impl FnOnce()) -> Result<(), Broken> {
    panic::catch_unwind(AssertUnwindSafe(run)).map_err(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        let what = text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Broken { what: what.unwrap_or_default() }
    })
}

impl Broken {
    /// Whether it is the same check that fails: its words are the same, up to where they name what they found.
    pub(super) fn is_like(&self, other: &Broken) -> bool {
        let words = |broken: &Broken| -> String {
            let named = |letter: char| letter.is_ascii_digit() || letter == '\n' || letter == '(';
            broken.what.split(named).next().unwrap_or_default().to_owned()
        };
        words(self) == words(other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_that_fails_is_told_and_known_again_with_other_numbers() {
        let broken = |page: u32| catch(|| panic!("page {page} is held twice")).unwrap_err();
        assert_eq!(broken(7).what, "page 7 is held twice");
        assert!(broken(7).is_like(&broken(12)));
        assert!(!broken(7).is_like(&catch(|| panic!("never ended")).unwrap_err()));
        assert_eq!(catch(|| ()), Ok(()));
    }
}
