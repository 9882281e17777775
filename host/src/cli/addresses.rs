//! Addresses and credentials of control planes: where a process listens, how it checks its peers, and whether a worker, its router
//! and its peers can reach each other with these settings.

use host_wire::endpoint::{Address, BadAddress, Credentials, ListenAt, Tls, TlsSource};

use super::Refused;
use super::settings::Settings;

/// Default of the router's control address.
pub const ROUTER: &str = "127.0.0.1:8001";

/// Where the control plane of a process listens, and how both ends of its connections are checked.
#[derive(Clone, Debug)]
pub struct Control {
    /// The address where it listens.
    pub at: ListenAt,
    /// The credentials for both ends of its connections.
    pub credentials: Credentials,
}

impl Control {
    /// The control plane of a worker.
    ///
    /// # Errors
    /// When files cannot be used, or other machines could reach it without a check.
    pub fn of_worker(settings: &Settings) -> Result<Self, Refused> {
        let at = settings.control.clone().unwrap_or_else(ListenAt::loopback);
        if let ListenAt::Tcp(own) = at
            && own.ip().is_unspecified()
        {
            return Err(Refused(format!(
                "--control {} is no address at which other processes reach this worker: give one of this machine's own, for example \
                 --control 192.0.2.7:4000, or 127.0.0.1:0 when everything runs here",
                own.ip()
            )));
        }
        let credentials = credentials(settings, &at)?;
        Ok(Self { at, credentials })
    }

    /// The control plane of a router.
    ///
    /// # Errors
    /// As [`of_worker`](Self::of_worker).
    pub fn of_router(settings: &Settings) -> Result<Self, Refused> {
        let at = settings.control.clone().unwrap_or(ListenAt::Tcp(([127, 0, 0, 1], 8001).into()));
        let credentials = credentials(settings, &at)?;
        Ok(Self { at, credentials })
    }
}

/// The first flag that was given.
pub fn first_given(flags: &[(&'static str, bool)]) -> Option<&'static str> {
    flags.iter().find(|(_, given)| *given).map(|(flag, _)| *flag)
}

/// The first given flag about control connections between machines or users. It has no effect on a process without such
/// connections.
pub fn of_a_cluster(settings: &Settings) -> Option<&'static str> {
    first_given(&[
        ("--control", settings.control.is_some()),
        ("--cluster-secret", settings.cluster_secret.is_some()),
        ("--cluster-certs", settings.cluster_certs.is_some()),
    ])
}

fn credentials(settings: &Settings, at: &ListenAt) -> Result<Credentials, Refused> {
    let source = match (&settings.cluster_secret, &settings.cluster_certs) {
        (Some(_), Some(_)) => {
            let message = "--cluster-secret and --cluster-certs both say which processes belong to this cluster: give one of them";
            return Err(Refused(message.to_owned()));
        }
        (Some(file), None) => Some(TlsSource::Secret(file.clone())),
        (None, Some(folder)) => Some(TlsSource::Certificates(folder.clone())),
        (None, None) => None,
    };
    match (at, source) {
        (ListenAt::Unix(_), None) => Ok(Credentials::SameUser),
        (ListenAt::Unix(_), Some(_)) => Err(Refused(format!(
            "--control {at} takes processes of the same user, known by the system: leave --cluster-secret and --cluster-certs out, or \
             listen at an IP:PORT"
        ))),
        (ListenAt::Tcp(_), Some(source)) => {
            let loaded = Tls::load(source).map_err(|error| Refused(error.to_string()))?;
            Ok(Credentials::Tls(loaded))
        }
        (ListenAt::Tcp(_), None) if at.is_reachable_from_elsewhere() && !settings.insecure_control => {
            Err(Refused(format!(
                "--control {at} can be reached from other machines, and every process there would be believed: give all processes of \
                 this cluster the same --cluster-secret FILE (`host certs secret FILE` makes one) or each its --cluster-certs DIR \
                 (`host certs new DIR`), or say --insecure-control where only your own processes reach it"
            )))
        }
        (ListenAt::Tcp(_), None) => Ok(Credentials::None),
    }
}

/// Limit of the routers of one worker: each may follow its cache.
const MAX_ROUTERS: usize = 16;

/// Checks a worker's addresses and returns them: its own, and its routers'.
///
/// # Errors
/// When a router's address is invalid, other processes could not reach this worker, or there are too many routers.
pub fn check_worker(settings: &Settings) -> Result<(Control, Vec<Address>), Refused> {
    let control = Control::of_worker(settings)?;
    let scheme = match control.credentials {
        Credentials::Tls(_) => "https",
        _ => "http",
    };
    let standard = format!("{scheme}://{ROUTER}");
    let given = settings.router.as_deref().unwrap_or(&standard);
    let mut routers = Vec::new();
    for text in given.split(',').map(str::trim) {
        let router = check_router(text, &control, &standard)?;
        if routers.contains(&router) {
            return Err(Refused(format!("--router names {text} twice: once is enough")));
        }
        routers.push(router);
    }
    if routers.len() > MAX_ROUTERS {
        return Err(Refused(format!(
            "--router names {} routers: a worker registers with at most {MAX_ROUTERS}",
            routers.len()
        )));
    }
    Ok((control, routers))
}

fn check_router(text: &str, control: &Control, example: &str) -> Result<Address, Refused> {
    let wrong = |error: BadAddress| {
        Refused(format!(
            "--router {text:?} {error}: give the router's control address, for example {example}"
        ))
    };
    let router: Address = text.parse().map_err(wrong)?;
    let why = match (&router, &control.credentials) {
        (Address::Tls(_), Credentials::None) => Some(
            "is TLS: give this process the cluster's --cluster-secret or --cluster-certs, or write http://",
        ),
        (Address::Plain(_), Credentials::Tls(_)) => Some(
            "is plain text, and --cluster-secret or --cluster-certs makes control connections TLS: write https://",
        ),
        (Address::Unix(_), Credentials::None | Credentials::Tls(_)) => Some(
            "is a Unix socket: the router's calls come over one, too, so give this worker a --control unix:PATH",
        ),
        (_, Credentials::SameUser) if !matches!(router, Address::Unix(_)) => {
            Some("may not reach a worker that listens at a Unix socket: give unix:PATH, or another --control")
        }
        _ => None,
    };
    if let Some(why) = why {
        return Err(Refused(format!("--router {text:?} {why}")));
    }
    let (Address::Plain(host) | Address::Tls(host), ListenAt::Tcp(own)) = (&router, &control.at) else {
        return Ok(router);
    };
    let own = own.ip();
    if own.is_loopback() && host.may_be_elsewhere() {
        return Err(Refused(format!(
            "the router at {router} may be on another machine, and this worker's --control {own} can be reached from \
             this one only: give an address of this machine that the router and the other workers reach, for example \
             --control 192.0.2.7:4000"
        )));
    }
    Ok(router)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn router(control: &str, insecure_control: bool) -> Result<Control, Refused> {
        let control = Some(control.parse().unwrap());
        Control::of_router(&Settings { control, insecure_control, ..Settings::default() })
    }

    #[test]
    fn an_address_that_strangers_reach_needs_credentials_or_a_word_that_it_has_none() {
        for control in ["127.0.0.1:0", "127.3.0.1:0", "[::1]:8001"] {
            assert!(matches!(router(control, false).unwrap().credentials, Credentials::None), "{control}");
        }
        for control in ["192.0.2.7:0", "0.0.0.0:8001", "[::]:8001", "[2001:db8::1]:8001"] {
            let refused = router(control, false).unwrap_err().to_string();
            for way in ["--cluster-secret FILE", "--cluster-certs DIR", "--insecure-control"] {
                assert!(refused.contains(way) && refused.contains(control), "{refused}");
            }
            assert!(matches!(router(control, true).unwrap().credentials, Credentials::None), "{control}");
        }
        assert!(matches!(router("unix:/run/a.sock", false).unwrap().credentials, Credentials::SameUser));
    }

    #[test]
    fn a_worker_looks_for_its_router_where_its_credentials_lead() {
        let folder = tempfile::tempdir().unwrap();
        let secret = folder.path().join("secret");
        std::fs::write(&secret, "0123456789abcdef0123456789abcdef").unwrap();
        std::fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let (control, routers) = check_worker(&Settings::default()).unwrap();
        assert_eq!(
            (control.at, routers[0].to_string()),
            (ListenAt::loopback(), "http://127.0.0.1:8001".into())
        );
        let settings = Settings { cluster_secret: Some(secret), ..Settings::default() };
        let (control, routers) = check_worker(&settings).unwrap();
        assert!(matches!(control.credentials, Credentials::Tls(_)));
        assert_eq!(routers[0].to_string(), "https://127.0.0.1:8001");
    }
}
