//! The identity behind a request: a tenant with a key, a tenant that a trusted gateway names, or an address.
//!
//! Tenants do not share cached KV, so no tenant can learn from counts of cached tokens what another has sent: the tenant's name
//! is part of the salt that names pages.

mod keys;

use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::net::IpAddr;
use std::sync::Arc;

use axum::http::{HeaderMap, HeaderName, header};
use host_wire::endpoint::{host_name, is_local_host};
use sha2::{Digest, Sha256};

pub use keys::{KeyError, Keys, entry};

use host_wire::shares::{Client, Shares};

/// Longest name of a tenant, in bytes.
pub const MAX_TENANT: usize = 128;

/// How a router identifies the sender of a request.
#[derive(Clone, Debug, Default)]
pub struct Identities {
    /// Keys of tenants. If absent, a request needs no key.
    pub keys: Option<Arc<Keys>>,
    /// A header in which a trusted gateway names the tenant.
    pub tenant_header: Option<HeaderName>,
    /// Names under which clients may address this server.
    pub hosts: Hosts,
    /// Origins whose web pages may use the clients' endpoints.
    pub origins: Origins,
}

/// Web pages of other origins that may use this server from a browser (CORS).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origins {
    /// No origin.
    #[default]
    None,
    /// All origins.
    Any,
    /// These origins, as browsers write them: `https://app.example.com`.
    Named(Vec<String>),
}

impl Origins {
    /// Whether a page of this origin may use the server.
    #[must_use]
    pub fn allow(&self, origin: &str) -> bool {
        match self {
            Self::None => false,
            Self::Any => true,
            Self::Named(names) => names.iter().any(|name| name.eq_ignore_ascii_case(origin)),
        }
    }
}

/// Names under which clients may address a server: the `Host` of their requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Hosts {
    /// Any name.
    #[default]
    Any,
    /// `localhost` and addresses. Refuses a web page under another name that resolves to this machine (DNS rebinding).
    Local,
    /// These names, `localhost` and addresses.
    Named(Vec<String>),
}

/// The sender of a request.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The client of whose share the request takes a part.
    pub client: Client,
    /// The tenant, if requests have one.
    pub tenant: Option<Arc<str>>,
    /// Requests that the tenant's key allows at once.
    pub places: Option<Shares>,
    /// The smallest priority that the key allows, and the default of its requests.
    pub priority: Option<i32>,
    /// Whether the caller may use the operators' endpoints.
    pub admin: bool,
    /// Whether a gateway's header names the tenant.
    pub named_by_gateway: bool,
}

/// The reason why a request has no caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// The request has no key.
    NoKey,
    /// The key is not one of the server's.
    WrongKey,
    /// The gateway names no tenant, or the name is not valid.
    NoTenant,
}

impl Identities {
    /// The caller of a request from an address.
    ///
    /// # Errors
    /// When the request does not identify its sender, although it has to.
    pub fn caller(&self, headers: &HeaderMap, address: IpAddr) -> Result<Caller, Unknown> {
        let address = Client::at(address);
        let key = match &self.keys {
            None => None,
            Some(keys) => Some(keys.find(secret(headers).ok_or(Unknown::NoKey)?).ok_or(Unknown::WrongKey)?),
        };
        let priority = key.as_ref().and_then(|key| key.priority);
        let named = |name: &Arc<str>, places, admin| Caller {
            client: Client::Tenant(Arc::clone(name)),
            tenant: Some(Arc::clone(name)),
            places,
            priority,
            admin,
            named_by_gateway: false,
        };
        // Clients of a gateway are not operators.
        let by_gateway = |header, places| {
            let name = tenant(headers, header).ok_or(Unknown::NoTenant)?;
            // Neither a key nor a tenant has a space in its name. So a gateway cannot name the tenant of another key.
            let name = key
                .as_ref()
                .map_or_else(|| Arc::clone(&name), |key| Arc::from(format!("{} {name}", key.name)));
            Ok(Caller { named_by_gateway: true, ..named(&name, places, false) })
        };
        match (&key, &self.tenant_header) {
            (None, None) => Ok(Caller::operator_at(address)),
            (None, Some(header)) => by_gateway(header, None),
            (Some(key), Some(header)) if key.gateway => by_gateway(header, key.places.clone()),
            (Some(key), _) => Ok(named(&key.name, key.places.clone(), key.admin)),
        }
    }
}

/// The key that a request brings: `Authorization: Bearer KEY`, or `x-api-key: KEY`.
fn secret(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let bearer = bearer.and_then(|value| {
        let (scheme, secret) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| secret.trim_ascii())
    });
    bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes()))
}

/// The tenant that the gateway names. None if the header is there twice: with a gateway that adds its own header, clients could
/// choose the tenant.
fn tenant(headers: &HeaderMap, header: &HeaderName) -> Option<Arc<str>> {
    let mut given = headers.get_all(header).iter();
    let (Some(name), None) = (given.next(), given.next()) else { return None };
    let name = name.to_str().ok()?;
    is_tenant(name).then(|| Arc::from(name))
}

/// Whether a text can name a tenant: 1 to [`MAX_TENANT`] visible ASCII characters.
#[must_use]
pub fn is_tenant(name: &str) -> bool {
    (1..=MAX_TENANT).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic())
}

/// The number by which workers know a client. It is the same from every router, and never 0.
#[must_use]
pub fn number(client: &Client) -> u64 {
    let digest = match client {
        Client::Address(address) => Sha256::new().chain_update("address\n").chain_update(address.to_string()),
        Client::Tenant(name) => Sha256::new().chain_update("tenant\n").chain_update(name.as_bytes()),
    };
    let digest: [u8; 32] = digest.finalize().into();
    digest.first_chunk().map_or(1, |first| u64::from_be_bytes(*first).max(1))
}

impl Caller {
    /// An operator that is identified by its address alone.
    fn operator_at(client: Client) -> Self {
        Self { client, tenant: None, places: None, priority: None, admin: true, named_by_gateway: false }
    }

    /// The priority of a request that asks for this one. It is not smaller than the priority of the key, or than 0 if the key has
    /// none: a caller that could choose any number would have other requests preempted.
    #[must_use]
    pub fn priority(&self, asked: Option<i32>) -> Option<i32> {
        asked.map(|asked| asked.max(self.priority.unwrap_or(0))).or(self.priority)
    }

    /// The caller's name in log lines. A gateway may use a client's secret as the tenant's name, so its digest is logged instead:
    /// the first 12 digits of its SHA-256.
    #[must_use]
    pub fn logged(&self) -> String {
        match &self.client {
            Client::Tenant(name) if self.named_by_gateway => {
                let own = name.rsplit(' ').next().unwrap_or_default();
                let hash: [u8; 32] = Sha256::digest(own.as_bytes()).into();
                format!("tenant-{}", keys::hex(&hash[..6]))
            }
            client => client.to_string(),
        }
    }

    /// The number of the caller's session, given the hash of its name. Sessions of different tenants have different numbers.
    #[must_use]
    pub fn session(&self, named: u64) -> u64 {
        // `named` is a hash with a random key already.
        self.tenant
            .as_ref()
            .map_or(named, |tenant| BuildHasherDefault::<DefaultHasher>::default().hash_one((tenant, named)))
    }

    /// The salt of the caller's pages, given the salt of the request.
    #[must_use]
    pub fn salt(&self, requested: String) -> String {
        let Some(tenant) = &self.tenant else { return requested };
        let mut hash = Sha256::new();
        hash.update((tenant.len() as u64).to_le_bytes());
        hash.update(tenant.as_bytes());
        hash.update(requested.as_bytes());
        keys::hex(&hash.finalize())
    }
}

impl Hosts {
    /// Whether a request may be addressed to this `Host`.
    #[must_use]
    pub fn allow(&self, host: &str) -> bool {
        match self {
            Hosts::Any => true,
            Hosts::Local => is_local_host(host),
            Hosts::Named(_) => is_local_host(host) || self.name(host),
        }
    }

    /// The names under which operators may address a server that asks for no keys. [`Any`](Self::Any) is for clients only: a web
    /// page whose name resolves to the server's machine would come from an operator's address.
    #[must_use]
    pub fn for_operators(&self) -> &Self {
        match self {
            Hosts::Any => &Hosts::Local,
            others => others,
        }
    }

    /// Whether the name is one of the server's own names, as configured.
    #[must_use]
    pub fn name(&self, host: &str) -> bool {
        matches!(self, Hosts::Named(names) if names.iter().any(|own| own.eq_ignore_ascii_case(host_name(host))))
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &str)| {
            (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
        };
        pairs.iter().map(pair).collect()
    }

    fn with_keys(text: &str, tenant_header: Option<HeaderName>) -> Identities {
        let keys = Keys::parse(text, None).unwrap();
        Identities { keys: Some(Arc::new(keys)), tenant_header, hosts: Hosts::Any, origins: Origins::None }
    }

    #[test]
    fn a_key_names_its_tenant_and_anything_else_is_refused() {
        let text = format!("{}\n{}", entry("a", "key-a", false), entry("b", "key-b", true));
        let identities = with_keys(&text, None);
        let of = |pairs: &[(&'static str, &str)]| identities.caller(&headers(pairs), HERE);
        let a = of(&[("authorization", "Bearer key-a")]).unwrap();
        assert_eq!((a.tenant.as_deref(), a.admin), (Some("a"), false));
        let b = of(&[("x-api-key", "key-b")]).unwrap();
        assert_eq!((b.tenant.as_deref(), b.admin), (Some("b"), true));
        assert_eq!(of(&[("authorization", "bearer  key-a")]).unwrap().tenant.as_deref(), Some("a"));
        assert_eq!(of(&[]).unwrap_err(), Unknown::NoKey);
        assert_eq!(of(&[("authorization", "Basic key-a")]).unwrap_err(), Unknown::NoKey);
        assert_eq!(of(&[("authorization", "Bearer key-A")]).unwrap_err(), Unknown::WrongKey);
        // The key, not the header, names the tenant.
        let header = Some(HeaderName::from_static("x-tenant"));
        let identities = with_keys(&text, header);
        let pairs = [("authorization", "Bearer key-a"), ("x-tenant", "b")];
        assert_eq!(identities.caller(&headers(&pairs), HERE).unwrap().tenant.as_deref(), Some("a"));
    }

    #[test]
    fn a_gateway_names_tenants() {
        let header = Some(HeaderName::from_static("x-tenant"));
        let open = Identities { tenant_header: header.clone(), ..Identities::default() };
        let named = headers(&[("x-tenant", "team-1")]);
        assert_eq!(open.caller(&named, HERE).unwrap().tenant.as_deref(), Some("team-1"));
        assert_eq!(open.caller(&headers(&[]), HERE).unwrap_err(), Unknown::NoTenant);
        let twice = [("x-tenant", "team-2"), ("x-tenant", "team-1")];
        for wrong in [&[("x-tenant", "a b")][..], &twice, &[twice[0]; 2]] {
            assert_eq!(open.caller(&headers(wrong), HERE).unwrap_err(), Unknown::NoTenant, "{wrong:?}");
        }
        let text = format!("{}gateway = true\n", entry("gate", "key-g", false));
        let identities = with_keys(&text, header);
        let pairs = [("authorization", "Bearer key-g"), ("x-tenant", "team-1")];
        let caller = identities.caller(&headers(&pairs), HERE).unwrap();
        assert_eq!(caller.tenant.as_deref(), Some("gate team-1"));
        assert_eq!(caller.logged(), open.caller(&named, HERE).unwrap().logged());
        assert_eq!(identities.caller(&headers(&pairs[..1]), HERE).unwrap_err(), Unknown::NoTenant);
    }

    #[test]
    fn a_gateway_cannot_name_the_tenant_of_another_key() {
        let text = entry("team-1", "key-t", false) + &entry("gate", "key-g", false) + "gateway = true\n";
        let identities = with_keys(&text, Some(HeaderName::from_static("x-tenant")));
        let of = |key: &str| {
            let key = format!("Bearer {key}");
            let pairs = headers(&[("authorization", &key), ("x-tenant", "team-1")]);
            identities.caller(&pairs, HERE).unwrap()
        };
        let (own, named) = (of("key-t"), of("key-g"));
        assert_eq!((own.tenant.as_deref(), own.named_by_gateway), (Some("team-1"), false));
        assert!(named.named_by_gateway);
        assert_ne!(own.client, named.client);
        assert_ne!(own.salt(String::new()), named.salt(String::new()));
        assert_ne!(own.session(7), named.session(7));
    }

    #[test]
    fn clients_of_a_gateway_are_no_operators() {
        let header = Some(HeaderName::from_static("x-tenant"));
        let open = Identities { tenant_header: header.clone(), ..Identities::default() };
        let named = headers(&[("x-tenant", "team-1")]);
        assert!(!open.caller(&named, HERE).unwrap().admin);
        let text = entry("ops", "key-o", true) + &entry("gate", "key-g", false) + "gateway = true\n";
        let identities = with_keys(&text, header);
        let gate = headers(&[("authorization", "Bearer key-g"), ("x-tenant", "team-1")]);
        assert!(!identities.caller(&gate, HERE).unwrap().admin);
        let ops = headers(&[("authorization", "Bearer key-o"), ("x-tenant", "team-1")]);
        assert!(identities.caller(&ops, HERE).unwrap().admin, "its own name, not the header's");
    }

    #[test]
    fn a_tenant_that_a_gateway_names_is_logged_as_a_digest() {
        let header = Some(HeaderName::from_static("x-tenant"));
        let open = Identities { tenant_header: header, ..Identities::default() };
        let caller = open.caller(&headers(&[("x-tenant", "team-1")]), HERE).unwrap();
        // printf %s team-1 | sha256sum
        assert_eq!(caller.logged(), "tenant-7e2a2d5f9a30");
        let keys = with_keys(&entry("a", "key-a", false), None);
        assert_eq!(keys.caller(&headers(&[("x-api-key", "key-a")]), HERE).unwrap().logged(), "a");
        assert_eq!(Identities::default().caller(&headers(&[]), HERE).unwrap().logged(), "127.0.0.1");
    }

    #[test]
    fn tenants_have_different_salts_for_one_name_and_no_tenant_keeps_its_own() {
        let caller = |tenant: Option<&str>| Caller {
            client: Client::at(HERE),
            tenant: tenant.map(Arc::from),
            places: None,
            priority: None,
            admin: false,
            named_by_gateway: false,
        };
        let salt = |tenant, requested: &str| caller(tenant).salt(requested.to_owned());
        assert_eq!(salt(None, "x"), "x");
        let all = [
            salt(Some("a"), ""),
            salt(Some("b"), ""),
            salt(Some("a"), "b"),
            salt(Some("ab"), ""),
            salt(Some("a"), "x"),
        ];
        let different: std::collections::BTreeSet<&String> = all.iter().collect();
        assert_eq!(different.len(), all.len());
        assert_eq!(salt(Some("a"), "x"), all[4]);
        assert!(all.iter().all(|salt| salt.len() <= host_core::radix::NamespaceKey::MAX_PART));
    }

    #[test]
    fn a_host_is_local_an_address_or_one_of_the_names() {
        let named = Hosts::Named(vec!["api.example.com".to_owned()]);
        for (host, local, of_names) in [
            ("localhost", true, true),
            ("LocalHost:8000", true, true),
            ("127.0.0.1:8000", true, true),
            ("[::1]:8000", true, true),
            ("10.1.2.3", true, true),
            ("api.example.com:443", false, true),
            ("API.example.com", false, true),
            ("evil.example.com", false, false),
            ("localhost.evil.example", false, false),
            ("", false, false),
        ] {
            assert_eq!((Hosts::Local.allow(host), named.allow(host)), (local, of_names), "{host}");
            assert!(Hosts::Any.allow(host));
            assert_eq!(Hosts::Any.for_operators().allow(host), local, "{host}");
            assert_eq!(named.for_operators().allow(host), of_names, "{host}");
        }
    }
}
