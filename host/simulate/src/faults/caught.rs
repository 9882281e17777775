//! Returns failed checks as values. The core and the world panic when a check fails.

use std::panic::{self, AssertUnwindSafe};

use super::Broken;

/// Runs a closure, and returns the message of its panic. Its changes up to the panic stay.
pub(super) fn catch(run: impl FnOnce()) -> Result<(), Broken> {
    panic::catch_unwind(AssertUnwindSafe(run)).map_err(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        let what = text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Broken { what: what.unwrap_or_default() }
    })
}

impl Broken {
    /// Whether the same check failed: both messages are equal up to the first digit, line break or parenthesis.
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
