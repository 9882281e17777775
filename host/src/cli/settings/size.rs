//! Sizes in bytes, as people write them.

use crate::cli::Refused;

/// Reads a size such as `512MiB`, `2GiB`, `64kB` or `1048576`.
///
/// # Errors
/// When the text is not a size.
pub fn parse_bytes(text: &str) -> Result<u64, Refused> {
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
    let number: u64 = digits
        .trim()
        .parse()
        .map_err(|error| Refused(format!("{text:?} is not a size ({error}): write for example 512MiB")))?;
    number.checked_mul(factor).ok_or_else(|| Refused(format!("{text:?} is too large")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        for (text, bytes) in
            [("12", 12), ("4KiB", 4096), ("3MB", 3_000_000), ("1 GiB", 1 << 30), ("2g", 2 << 30)]
        {
            assert_eq!(parse_bytes(text).unwrap(), bytes, "{text}");
        }
        for text in ["", "MiB", "-1", "3 parsecs", "99999999999GiB"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
