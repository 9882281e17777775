//! Where a server is.

use std::fmt;
use std::net::SocketAddr;

use hyper::Uri;

/// A server's URL: `http://HOST:PORT`, and a path before the API's where a proxy has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Host and port, as connected to and as the header `host` says it.
    pub authority: String,
    prefix: String,
}

impl Address {
    /// A server on this machine.
    pub fn of(address: SocketAddr) -> Self {
        Self { authority: address.to_string(), prefix: String::new() }
    }

    /// Reads a URL. The scheme may be left out; `/v1` at the end, as OpenAI's clients are given it, is the API's own.
    ///
    /// # Errors
    /// A sentence that says what is expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        let invalid = |why: &str| format!("{text:?} is no URL of a server{why}: write http://IP:PORT");
        let url = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let uri: Uri = url.parse().map_err(|error| invalid(&format!(" ({error})")))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                let message = "https is not spoken here: put a proxy that speaks it between, or use http";
                return Err(format!("{text}: {message}"));
            }
            _ => return Err(invalid("")),
        }
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| invalid(""))?;
        if uri.query().is_some() || uri.authority().is_some_and(|authority| authority.as_str().contains('@'))
        {
            return Err(invalid(" (no user and no query can be given)"));
        }
        let port = match uri.port() {
            Some(port) => port.as_u16(),
            // A port that is wrong, such as 99999, must not become 80.
            None if uri.authority().is_some_and(|authority| authority.as_str() != host) => {
                return Err(invalid(" (its port is no number up to 65535)"));
            }
            None => 80,
        };
        let path = uri.path().trim_end_matches('/');
        let prefix = path.strip_suffix("/v1").unwrap_or(path).to_owned();
        Ok(Self { authority: format!("{host}:{port}"), prefix })
    }

    /// The path of a part of the API.
    pub fn path(&self, of: &str) -> String {
        format!("{}{of}", self.prefix)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority, self.prefix)
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
        assert!(Address::parse("https://x").is_err_and(|error| error.contains("https is not spoken")));
    }
}
