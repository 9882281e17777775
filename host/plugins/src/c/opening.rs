//! The configuration of a plugin in C: the host parses it and passes a list of keys and values.

use host_plugin_api::{Error, ErrorCode, Result, c};

use super::super::manifest::Manifest;
use super::text;

/// The keys of a configuration, with the manifest's defaults.
pub(super) struct Settings {
    /// Owns the texts to which `crossing` points.
    _keys: Vec<(String, String)>,
    crossing: Vec<c::Setting>,
}

impl Settings {
    /// Reads a plugin's own table and the manifest's defaults.
    ///
    /// # Errors
    /// `CONFIG` when the text is no TOML.
    pub fn new(manifest: &Manifest, config: &str) -> Result<Self> {
        let given: toml::Table = config
            .parse()
            .map_err(|error: toml::de::Error| Error::new(ErrorCode::CONFIG, error.message().to_owned()))?;
        let defaults = manifest.config.iter().filter(|(key, _)| !given.contains_key(*key));
        let defaults = defaults.filter_map(|(key, of)| Some((key.clone(), of.default.clone()?)));
        let all: Vec<(String, toml::Value)> = given.clone().into_iter().chain(defaults).collect();
        let keys: Vec<(String, String)> =
            all.iter().map(|(key, value)| (key.clone(), shown(value))).collect();
        let crossing = all.iter().zip(&keys).map(|((_, value), (key, words))| setting(key, words, value));
        Ok(Self { crossing: crossing.collect(), _keys: keys })
    }

    /// The argument of `open`. It is valid as long as `self` and the two texts are.
    pub fn opening(&self, name: &str, config: &str) -> c::Opening {
        c::Opening {
            size: size_of::<c::Opening>() as u64,
            name: text(name),
            config: text(config),
            settings: self.crossing.as_ptr(),
            settings_count: self.crossing.len() as u64,
        }
    }
}

/// A value as text: strings as they are, arrays and tables as TOML.
fn shown(value: &toml::Value) -> String {
    match value {
        toml::Value::String(words) => words.clone(),
        toml::Value::Table(table) => table.to_string(),
        other => other.to_string(),
    }
}

fn setting(key: &str, words: &str, value: &toml::Value) -> c::Setting {
    use c::setting::{BOOLEAN, FLOAT, INTEGER, STRING, TOML};
    let (kind, integer, number) = match value {
        toml::Value::String(_) => (STRING, 0, 0.0),
        toml::Value::Integer(number) => (INTEGER, *number, *number as f64),
        toml::Value::Float(number) => (FLOAT, *number as i64, *number),
        toml::Value::Boolean(is) => (BOOLEAN, i64::from(*is), 0.0),
        toml::Value::Array(_) | toml::Value::Table(_) | toml::Value::Datetime(_) => (TOML, 0, 0.0),
    };
    c::Setting { key: text(key), text: text(words), integer, number, kind, reserved: 0 }
}
