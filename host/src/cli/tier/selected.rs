//! Selects the keys for a command.

use host_plugin_api::Key;

/// A prefix of keys, in hex digits. Every key has the empty prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prefix(String);

impl Prefix {
    pub fn has(&self, key: &Key) -> bool {
        self.0.is_empty() || key.to_string().starts_with(&self.0)
    }
}

impl std::str::FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits =
            !text.is_empty() && text.len() <= 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if digits {
            Ok(Self(text.to_ascii_lowercase()))
        } else {
            Err("keys are written as 64 hex digits, give the first of them".into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_may_end_within_a_byte() {
        let mut key = Key::default();
        key.0[..2].copy_from_slice(&[0xAB, 0xC0]);
        for (text, has) in
            [("a", true), ("AB", true), ("abc", true), ("abd", false), ("abc00", true), ("b", false)]
        {
            assert_eq!(text.parse::<Prefix>().unwrap().has(&key), has, "{text}");
        }
        assert!(Prefix::default().has(&key));
        for wrong in ["", "xy", "0x12", &"0".repeat(65)] {
            assert!(wrong.parse::<Prefix>().is_err(), "{wrong}");
        }
    }
}
