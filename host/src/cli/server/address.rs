//! The address of a server.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use hyper::Uri;

/// A server's URL, or `unix:PATH`. The URL is `http://HOST:PORT` or `https://HOST:PORT`, followed by a path if a proxy adds one
/// before the API's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// How to reach the server.
    pub way: Way,
    /// Host and port, for the connection and for the header `host`.
    pub authority: String,
    prefix: String,
}

/// A way to reach a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// Plain text over TCP.
    Plain,
    /// TLS over TCP. The certificate must have this name or this address (without brackets).
    Tls(String),
    /// A Unix socket.
    Unix(PathBuf),
}

impl Address {
    /// A server on this machine.
    pub fn of(address: SocketAddr) -> Self {
        Self { way: Way::Plain, authority: address.to_string(), prefix: String::new() }
    }

    /// Parses a URL. The scheme may be missing. `/v1` at the end, as in URLs for OpenAI's clients, is removed because it belongs to
    /// the API.
    ///
    /// # Errors
    /// A sentence that says what is expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        let invalid = |why: &str| format!("{text:?} is no URL of a server{why}: write http://IP:PORT");
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path.strip_prefix("//").unwrap_or(path));
            if !path.is_absolute() {
                return Err(format!("{text:?} is not the absolute path of a socket: write unix:/PATH"));
            }
            return Ok(Self {
                way: Way::Unix(path),
                authority: "localhost".to_owned(),
                prefix: String::new(),
            });
        }
        let url = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let uri: Uri = url.parse().map_err(|error| invalid(&format!(" ({error})")))?;
        let is_tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(invalid("")),
        };
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| invalid(""))?;
        if uri.query().is_some() || uri.authority().is_some_and(|authority| authority.as_str().contains('@'))
        {
            return Err(invalid(" (no user and no query can be given)"));
        }
        let port = match uri.port() {
            Some(port) => port.as_u16(),
            // A wrong port, such as 99999, must not be replaced by the default.
            None if uri.authority().is_some_and(|authority| authority.as_str() != host) => {
                return Err(invalid(" (its port is no number up to 65535)"));
            }
            None if is_tls => 443,
            None => 80,
        };
        let path = uri.path().trim_end_matches('/');
        let prefix = path.strip_suffix("/v1").unwrap_or(path).to_owned();
        let way = if is_tls { Way::Tls(host.trim_matches(['[', ']']).to_owned()) } else { Way::Plain };
        Ok(Self { way, authority: format!("{host}:{port}"), prefix })
    }

    /// The path of a part of the API.
    pub fn path(&self, of: &str) -> String {
        format!("{}{of}", self.prefix)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.way {
            Way::Plain => write!(f, "http://{}{}", self.authority, self.prefix),
            Way::Tls(_) => write!(f, "https://{}{}", self.authority, self.prefix),
            Way::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_as_people_write_them() {
        for (text, shown) in [
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("localhost:8000", "http://localhost:8000"),
            ("http://[::1]:8000/", "http://[::1]:8000"),
            ("http://server", "http://server:80"),
            ("http://server:80/v1", "http://server:80"),
            ("http://proxy:80/llm/v1/", "http://proxy:80/llm"),
            ("https://server", "https://server:443"),
            ("https://[::1]:8443/v1", "https://[::1]:8443"),
            ("unix:/run/host.sock", "unix:/run/host.sock"),
            ("unix:///run/host.sock", "unix:/run/host.sock"),
        ] {
            assert_eq!(
                Address::parse(text).map(|address| address.to_string()),
                Ok(shown.to_owned()),
                "{text}"
            );
        }
        assert_eq!(Address::parse("http://proxy:80/llm").unwrap().path("/v1/models"), "/llm/v1/models");
    }

    #[test]
    fn what_is_no_url_is_refused() {
        for text in [
            "",
            "http://",
            "ftp://x",
            "http://a b",
            "http://x:99999",
            "http://u:p@x:80",
            "http://x/?a",
            "/v1",
            "http://:80",
        ] {
            assert!(
                Address::parse(text).is_err_and(|error| error.contains("write http://IP:PORT")),
                "{text}"
            );
        }
        assert!(Address::parse("unix:a.sock").is_err_and(|error| error.contains("absolute path")));
        assert_eq!(Address::parse("https://[::1]:1").unwrap().way, Way::Tls("::1".to_owned()));
    }
}
