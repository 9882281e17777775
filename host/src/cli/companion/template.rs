//! Templates in a companion's arguments, environment and address, filled in from the configuration of its plugin.
//!
//! Braces `{...}` contain sources, separated by `|`. The first source that has a value counts:
//!
//! - `KEY`: a key of the plugin's table, or its default. A list is joined by colons
//! - `KEY:host`, `KEY:port`: a part of the address in the value of this key
//! - `$NAME`: an environment variable

use std::collections::BTreeMap;

use host_plugins::ConfigKey;

/// Sources of values for templates.
#[derive(Clone, Copy)]
pub struct Values<'a> {
    /// The plugin's table.
    pub table: Option<&'a toml::Table>,
    /// The keys that the plugin knows.
    pub keys: &'a BTreeMap<String, ConfigKey>,
    /// Looks an environment variable up.
    pub variable: &'a dyn Fn(&str) -> Option<String>,
}

impl Values<'_> {
    /// Fills in the braces of a text. Returns `None` if none of the sources in a pair of braces has a value.
    ///
    /// # Errors
    /// What is wrong with the text, or with a value.
    pub fn fill(&self, text: &str) -> Result<Option<String>, String> {
        let (mut filled, mut rest) = (String::new(), text);
        while let Some((before, after)) = rest.split_once('{') {
            let Some((places, after)) = after.split_once('}') else {
                return Err(format!("{text:?} has a {{ without a }}"));
            };
            filled.push_str(before);
            match self.first(places)? {
                Some(value) => filled.push_str(&value),
                None => return Ok(None),
            }
            rest = after;
        }
        filled.push_str(rest);
        Ok(Some(filled))
    }

    fn first(&self, places: &str) -> Result<Option<String>, String> {
        for place in places.split('|') {
            let value = match place.strip_prefix('$') {
                Some(name) => (self.variable)(name),
                None => self.key(place)?,
            };
            if let Some(value) = value.filter(|value| !value.is_empty()) {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }

    fn key(&self, place: &str) -> Result<Option<String>, String> {
        let (key, part) = place.split_once(':').unwrap_or((place, ""));
        let Some(known) = self.keys.get(key) else { return Err(format!("the plugin has no key {key:?}")) };
        let value = self.table.and_then(|table| table.get(key)).or(known.default.as_ref());
        let Some(value) = value.map(written).transpose()? else { return Ok(None) };
        if part.is_empty() || value.is_empty() {
            return Ok(Some(value));
        }
        let Some((host, port)) = value.rsplit_once(':') else {
            return Err(format!("{key} is {value:?}, which has no port"));
        };
        match part {
            "host" => Ok(Some(host.trim_matches(['[', ']']).to_owned())),
            "port" => Ok(Some(port.to_owned())),
            _ => Err(format!("{place:?} asks for something else than host or port")),
        }
    }
}

fn written(value: &toml::Value) -> Result<String, String> {
    match value {
        toml::Value::String(text) => Ok(text.clone()),
        toml::Value::Integer(_) | toml::Value::Float(_) | toml::Value::Boolean(_) => Ok(value.to_string()),
        toml::Value::Array(all) => Ok(all.iter().map(written).collect::<Result<Vec<_>, _>>()?.join(":")),
        toml::Value::Table(_) | toml::Value::Datetime(_) => {
            Err(format!("{value} is nothing that a program could be given"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(text: &str) -> Result<Option<String>, String> {
        let keys: BTreeMap<String, ConfigKey> = toml::from_str(
            "server = { type = \"string\", default = \"127.0.0.1:7\" }\nplain = { type = \"string\" }\n\
             many = { type = \"array\" }\nnumber = { type = \"integer\", default = 3 }",
        )
        .unwrap();
        let table = toml::from_str("server = \"[::1]:8\"\nmany = [\"/a\", \"/b\"]").unwrap();
        let variable = |name: &str| (name == "SET").then(|| "{plain}".to_owned());
        Values { table: Some(&table), keys: &keys, variable: &variable }.fill(text)
    }

    #[test]
    fn what_is_configured_or_the_default_or_a_variable_stands_in_the_braces() {
        for (text, filled) in [
            ("--as-it-is", "--as-it-is"),
            ("--listen={server}", "--listen=[::1]:8"),
            ("{server:host} {server:port}", "::1 8"),
            ("{many|$SET}", "/a:/b"),
            ("n={plain|number}", "n=3"),
            // Braces in the value of a variable are not filled in.
            ("{plain|$UNSET|$SET}", "{plain}"),
        ] {
            assert_eq!(fill(text).unwrap().as_deref(), Some(filled), "{text}");
        }
        assert_eq!(fill("--it={plain|$UNSET}"), Ok(None));
    }

    #[test]
    fn a_manifest_that_asks_for_nonsense_is_refused() {
        for (text, says) in [
            ("{server", "without a }"),
            ("{severe}", "no key \"severe\""),
            ("{server:name}", "host or port"),
            ("{number:port}", "no port"),
        ] {
            assert!(fill(text).unwrap_err().contains(says), "{text}");
        }
    }
}
