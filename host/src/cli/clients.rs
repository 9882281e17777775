//! Settings about clients of the HTTP API: how they are authenticated, and how they authenticate the server.

use std::sync::Arc;

use axum::http::HeaderName;
use host_front::identity::{Hosts, Keys, Origins};
use host_wire::endpoint::{ApiTls, ListenAt};

use super::Refused;
use super::limits::ClientLimits;
use super::settings::Settings;

/// Settings about the clients of a router.
#[derive(Debug)]
pub struct Clients {
    pub keys: Option<Arc<Keys>>,
    pub tenant_header: Option<HeaderName>,
    pub hosts: Option<Hosts>,
    /// Origins whose web pages may use the API.
    pub origins: Origins,
    /// The certificate that the API shows.
    pub tls: Option<ApiTls>,
    /// The address for operators, if they have one of their own.
    pub operators: Option<ListenAt>,
    /// Limits of what clients may hold.
    pub limits: ClientLimits,
}

/// Headers that have another meaning, so that they cannot name a tenant.
const TAKEN: [&str; 5] = ["authorization", "x-api-key", "host", "content-type", "content-length"];

/// Reads the settings about clients, with the file of keys.
///
/// # Errors
/// When the settings cannot work. The error names the flag.
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
    let origins = settings.cors_origins.as_deref().map(origins).transpose()?;
    plain_text(settings)?;
    Ok(Clients {
        origins: origins.unwrap_or_default(),
        keys: keys.transpose()?,
        tenant_header: header.transpose()?,
        hosts: hosts.transpose()?,
        tls: tls(settings)?,
        operators: operators(settings)?,
        limits: ClientLimits::of(settings)?,
    })
}

fn tls(settings: &Settings) -> Result<Option<ApiTls>, Refused> {
    match (&settings.tls_cert, &settings.tls_key) {
        (None, None) => Ok(None),
        (Some(certificate), Some(key)) => {
            let loaded = ApiTls::load(certificate, key);
            loaded.map(Some).map_err(|error| Refused(format!("--tls-cert and --tls-key: {error}")))
        }
        _ => Err(Refused("--tls-cert and --tls-key go together: a certificate needs its key".to_owned())),
    }
}

fn operators(settings: &Settings) -> Result<Option<ListenAt>, Refused> {
    let Some(at) = &settings.admin else { return Ok(None) };
    if at.is_reachable_from_elsewhere() && settings.api_keys.is_none() {
        return Err(Refused(format!(
            "--admin {at} can be reached from other machines, and every process there could watch this server: give --api-keys FILE \
             (`host keys new NAME --admin --file FILE` writes one), or listen at 127.0.0.1:PORT or unix:PATH"
        )));
    }
    Ok(Some(at.clone()))
}

/// Refuses an API in plain text that other machines reach, unless a setting says that this is meant.
fn plain_text(settings: &Settings) -> Result<(), Refused> {
    let at = settings.http_address();
    if at.ip().to_canonical().is_loopback() || settings.tls_cert.is_some() || settings.insecure_api {
        return Ok(());
    }
    let all = match (&settings.api_keys, &settings.tenant_header) {
        (None, Some(_)) => "each client can name any tenant, and ",
        (None, None) => "every process there can use it, and ",
        (Some(_), _) => "API keys, ",
    };
    Err(Refused(format!(
        "--host {} can be reached from other machines, and the HTTP API would speak plain text there: {all}prompts and answers can be \
         read and changed on the way; give --tls-cert and --tls-key (`host certs server` makes them), or say --insecure-api where a \
         gateway that speaks TLS stands before it, or where only your own network carries it",
        at.ip()
    )))
}

fn origins(given: &str) -> Result<Origins, Refused> {
    if given.trim() == "*" {
        return Ok(Origins::Any);
    }
    let names: Vec<String> =
        given.split(',').map(|name| name.trim().trim_end_matches('/').to_owned()).collect();
    let is_origin = |name: &str| {
        name.split_once("://").is_some_and(|(scheme, host)| {
            matches!(scheme, "http" | "https") && !host.is_empty() && !host.contains(['/', '*', ' '])
        })
    };
    match names.iter().find(|name| !is_origin(name)) {
        None => Ok(Origins::Named(names)),
        Some(name) => Err(Refused(format!(
            "--cors-origins: {name:?} is no origin; give scheme and name, for example https://app.example.com, or \"*\" alone"
        ))),
    }
}

/// Checks that a worker without a router gets no settings about clients, because it serves none.
///
/// # Errors
/// Names the flag that only a router takes.
pub fn check_none(settings: &Settings) -> Result<(), Refused> {
    for (flag, given) in [
        ("--tls-cert", settings.tls_cert.is_some()),
        ("--tls-key", settings.tls_key.is_some()),
        ("--admin", settings.admin.is_some()),
        ("--insecure-api", settings.insecure_api),
        ("--max-connections", settings.max_connections.is_some()),
        ("--max-body-bytes", settings.max_body_bytes.is_some()),
        ("--max-uploads", settings.max_uploads.is_some()),
        ("--max-upload-bytes", settings.max_upload_bytes.is_some()),
        ("--max-text-bytes", settings.max_text_bytes.is_some()),
        ("--max-answer-bytes", settings.max_answer_bytes.is_some()),
        ("--body-timeout", settings.body_timeout.is_some()),
        ("--idle-timeout", settings.idle_timeout.is_some()),
        ("--stream-keep-alive", settings.stream_keep_alive.is_some()),
        ("--cors-origins", settings.cors_origins.is_some()),
        ("--no-request-log", settings.no_request_log),
    ] {
        if given {
            let message = format!(
                "{flag} is for processes with an HTTP API, and a worker has none: give it to the router (--metrics is where a worker \
                 is watched)"
            );
            return Err(Refused(message));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_api_that_other_machines_reach_is_refused_unless_it_is_meant() {
        let at = |host: &str| Settings { host: Some(host.parse().unwrap()), ..Settings::default() };
        let said = |settings: Settings| plain_text(&settings).unwrap_err().0;
        for host in ["0.0.0.0", "192.0.2.7", "::", "2001:db8::1", "::ffff:192.0.2.7"] {
            let said = said(at(host));
            for part in
                ["every process there can use it, and prompts", "--tls-cert", "a gateway", "--insecure-api"]
            {
                assert!(said.contains(part), "{said}");
            }
        }
        let with_keys = Settings { api_keys: Some("keys.toml".into()), ..at("0.0.0.0") };
        assert!(said(with_keys).contains("API keys, prompts"));
        let with_tenants = Settings { tenant_header: Some("x-tenant".into()), ..at("0.0.0.0") };
        assert!(said(with_tenants).contains("can name any tenant"));
        for quiet in [
            Settings::default(),
            at("127.0.0.1"),
            at("127.1.2.3"),
            at("::1"),
            at("::ffff:127.0.0.1"),
            Settings { tls_cert: Some("cert.pem".into()), ..at("0.0.0.0") },
            Settings { insecure_api: true, ..at("0.0.0.0") },
        ] {
            assert!(plain_text(&quiet).is_ok(), "{:?}", quiet.host);
        }
    }
}
