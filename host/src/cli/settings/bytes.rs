//! Sizes in bytes, in the form that settings use.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;

use crate::cli::Refused;

/// A number of bytes, written as `512MiB`, `2GiB`, `64kB` or `1048576`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct Bytes(pub u64);

impl Bytes {
    /// The size in the largest unit that it reaches, with one decimal: `1.5 KiB`.
    #[must_use]
    pub fn rounded(self) -> String {
        let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
        let steps = (self.0.max(1).ilog2() / 10).min(5);
        match steps {
            0 => format!("{} B", self.0),
            _ => format!("{:.1} {}", self.0 as f64 / (1_u64 << (10 * steps)) as f64, units[steps as usize]),
        }
    }
}

impl FromStr for Bytes {
    type Err = Refused;

    fn from_str(text: &str) -> Result<Self, Refused> {
        let digits = text.trim().trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
        let unit = text.trim()[digits.len()..].to_ascii_lowercase();
        let factor: u64 = match unit.as_str() {
            "" | "b" => 1,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            _ => return Err(Refused(format!("{text:?} is not a size: write for example 512MiB or 2GiB"))),
        };
        let number: u64 = digits.trim().parse().map_err(|error| {
            Refused(format!("{text:?} is not a size ({error}): write for example 512MiB"))
        })?;
        let bytes = number.checked_mul(factor);
        bytes.map(Self).ok_or_else(|| Refused(format!("{text:?} is too large")))
    }
}

impl TryFrom<String> for Bytes {
    type Error = Refused;

    fn try_from(text: String) -> Result<Self, Refused> {
        text.parse()
    }
}

/// Formats a size as flags write it: a whole number of the largest unit that divides it.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        let whole = |(_, size): &(&str, u64)| self.0 > 0 && self.0.is_multiple_of(*size);
        let (unit, size) = units.into_iter().find(whole).unwrap_or(("", 1));
        write!(f, "{}{unit}", self.0 / size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        for (text, bytes) in
            [("12", 12), ("4KiB", 4096), ("3MB", 3_000_000), ("1 GiB", 1 << 30), ("2g", 2 << 30)]
        {
            assert_eq!(text.parse::<Bytes>().unwrap(), Bytes(bytes), "{text}");
        }
        for text in ["", "MiB", "-1", "3 parsecs", "99999999999GiB"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_written_such_that_they_can_be_read() {
        for (bytes, text) in [
            (0, "0"),
            (1023, "1023"),
            (1536, "1536"),
            (64 << 10, "64KiB"),
            (5 << 20, "5MiB"),
            (1 << 40, "1024GiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
            assert_eq!(text.parse::<Bytes>().unwrap(), Bytes(bytes), "{text}");
        }
    }

    #[test]
    fn sizes_for_people_are_rounded_in_the_largest_unit_that_fits() {
        let all = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (10 << 30, "10.0 GiB"),
            (u64::MAX, "16384.0 PiB"),
        ];
        for (bytes, text) in all {
            assert_eq!(Bytes(bytes).rounded(), text);
        }
    }
}
