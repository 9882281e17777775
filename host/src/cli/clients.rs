//! How clients of the HTTP API are known, from the settings.

use std::sync::Arc;

use axum::http::HeaderName;
use host_front::identity::{Hosts, Keys};

use super::Refused;
use super::settings::Settings;

/// What the settings say of clients.
#[derive(Debug)]
pub struct Clients {
    pub keys: Option<Arc<Keys>>,
    pub tenant_header: Option<HeaderName>,
    pub hosts: Option<Hosts>,
}

/// Headers that say something else.
const TAKEN: [&str; 5] = ["authorization", "x-api-key", "host", "content-type", "content-length"];

/// Reads what the settings say of clients, the file of keys as well.
///
/// # Errors
/// When it cannot work; the flag is named.
pub fn clients(settings: &Settings) -> Result<Clients, Refused> {
    let keys = settings.api_keys.as_deref().map(|path| {
        Keys::load(path).map(Arc::new).map_err(|error| {
            Refused(format!(
                "--api-keys {}: {error}; \"host keys new TENANT --file FILE\" writes one",
                path.display()
            ))
        })
    });
    let header = settings.tenant_header.as_deref().map(|name| {
        let parsed = name.parse::<HeaderName>().ok().filter(|name| !TAKEN.contains(&name.as_str()));
        parsed.ok_or_else(|| {
            Refused(format!("--tenant-header {name:?} cannot name a tenant; use for example x-tenant"))
        })
    });
    let hosts = settings.allowed_hosts.as_deref().map(|names| match names.trim() {
        "*" => Ok(Hosts::Any),
        names => {
            let names: Vec<String> = names.split(',').map(|name| name.trim().to_owned()).collect();
            let wrong = names.iter().find(|name| name.is_empty() || name.contains(['/', ':', '*', ' ']));
            match wrong {
                None => Ok(Hosts::Named(names)),
                Some(name) => Err(Refused(format!(
                    "--allowed-hosts: {name:?} is no name; give names without scheme and port, for example api.example.com, or \
                     \"*\" alone"
                ))),
            }
        }
    });
    Ok(Clients { keys: keys.transpose()?, tenant_header: header.transpose()?, hosts: hosts.transpose()? })
}
