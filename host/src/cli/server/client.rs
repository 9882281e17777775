//! An HTTP client for one server. Each request has its own connection, and dropping the answer closes it.

use std::future::poll_fn;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::time::Duration;

use host_wire::endpoint::{Authorities, check_user, is_untrusted};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{HeaderMap, Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;

use super::Address;
use super::address::Way;
use crate::cli::Refused;

/// The environment variable with the API key. A flag would show the key in the list of processes.
const KEY: &str = "HOST_API_KEY";
/// Longest wait for a connection, and for a short answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Limit of an answer that is read as a whole, in bytes.
const LONGEST: usize = 1 << 20;
/// Limit of the characters of an error that is no JSON.
const LONGEST_ERROR: usize = 300;

/// A client for one server.
pub struct Client {
    address: Address,
    key: Option<String>,
    /// The trusted authorities, for a server with TLS.
    authorities: Option<Authorities>,
}

/// The reasons for which there is no answer, each as a sentence.
#[derive(Debug, thiserror::Error)]
pub enum NoAnswer {
    /// The server has not proved that it is the one in the URL. A repetition would not help.
    #[error("{0}")]
    Untrusted(String),
    /// The server does not answer now.
    #[error("{0}")]
    Silent(String),
}

/// A byte stream of any kind of connection.
trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

/// An answer that is still being received.
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    body: Incoming,
    connection: JoinHandle<()>,
}

impl Drop for Answer {
    fn drop(&mut self) {
        // The server notices that the connection closed, and stops computing.
        self.connection.abort();
    }
}

impl Answer {
    /// The next bytes, or `None` at the end.
    ///
    /// # Errors
    /// When the connection ends before the answer does.
    pub async fn next(&mut self) -> Result<Option<Bytes>, hyper::Error> {
        while let Some(frame) = poll_fn(|context| Pin::new(&mut self.body).poll_frame(context)).await {
            // Trailers carry no information here and are skipped.
            if let Ok(data) = frame?.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }

    /// The rest of the answer, at most [`LONGEST`] bytes.
    ///
    /// # Errors
    /// When the connection ends before the answer does, or the answer is too long.
    pub async fn rest(&mut self) -> Result<String, String> {
        self.rest_up_to(LONGEST).await
    }

    /// The rest of the answer, at most `most` bytes.
    ///
    /// # Errors
    /// As for [`rest`](Self::rest).
    pub async fn rest_up_to(&mut self, most: usize) -> Result<String, String> {
        let mut all = Vec::new();
        while let Some(bytes) = self.next().await.map_err(|error| error.to_string())? {
            if all.len() + bytes.len() > most {
                return Err(format!("an answer of more than {} KiB", most >> 10));
            }
            all.extend_from_slice(&bytes);
        }
        Ok(String::from_utf8_lossy(&all).into_owned())
    }

    /// The error of an answer whose status is no success, on one line.
    pub async fn error(&mut self) -> String {
        let status = self.status;
        match self.rest().await {
            Ok(text) => format!("{status}: {}", message_in(&text)),
            Err(error) => format!("{status}, and what it said cannot be read: {error}"),
        }
    }
}

/// The message of an error in OpenAI's format, or else the beginning of the text.
pub fn message_in(text: &str) -> String {
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    let message =
        value["error"]["message"].as_str().or(value["error"].as_str()).or(value["message"].as_str());
    let line = message.map_or_else(|| text.chars().take(LONGEST_ERROR).collect(), str::to_owned);
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl Client {
    /// Makes a client of this server, with the API key of the environment (`HOST_API_KEY`) if there is one. A server with TLS must
    /// have a certificate of an authority in the file `ca`, or of one that this machine trusts. Sends nothing yet.
    ///
    /// # Errors
    /// When the authorities cannot be read.
    pub fn new(address: Address, ca: Option<&Path>) -> Result<Self, Refused> {
        let authorities = match (&address.way, ca) {
            (Way::Tls(_), Some(file)) => Some(Authorities::of_file(file)),
            (Way::Tls(_), None) => Some(Authorities::of_system()),
            _ => None,
        };
        let authorities = authorities.transpose().map_err(|error| match ca {
            Some(_) => Refused(format!("--ca: {error}")),
            None => Refused(format!("{error}; give the server's as --ca FILE")),
        })?;
        let key = std::env::var(KEY).ok().filter(|key| !key.is_empty());
        Ok(Self { address, key, authorities })
    }

    /// The server's address.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The first model that the server names.
    ///
    /// # Errors
    /// A sentence, when the server does not answer or lists no model.
    pub async fn model(&self) -> Result<String, String> {
        let address = &self.address;
        let mut answer = self.get("/v1/models").await.map_err(|error| error.to_string())?;
        if answer.status != StatusCode::OK {
            return Err(format!("{address} does not name its models: {}", answer.error().await));
        }
        let text = answer.rest().await.map_err(|error| format!("{address}: {error}"))?;
        let models: Value = serde_json::from_str(&text).unwrap_or_default();
        let name = models["data"][0]["id"].as_str().map(str::to_owned);
        name.ok_or_else(|| format!("{address} serves no model, or is no server with OpenAI's API"))
    }

    /// Sends a GET for a short answer.
    ///
    /// # Errors
    /// When there is no answer in time.
    pub async fn get(&self, path: &str) -> Result<Answer, NoAnswer> {
        let answer = tokio::time::timeout(PATIENCE, self.send(Method::GET, path, String::new())).await;
        answer.unwrap_or_else(|_elapsed| {
            let waited = PATIENCE.as_secs();
            Err(NoAnswer::Silent(format!("{} does not answer within {waited} s", self.address)))
        })
    }

    /// POST of JSON. Waits as long as the server does.
    ///
    /// # Errors
    /// When the server does not answer.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Answer, NoAnswer> {
        self.send(Method::POST, path, body.to_string()).await
    }

    async fn connect(&self) -> io::Result<Box<dyn Connection>> {
        let to = &self.address;
        Ok(match (&to.way, &self.authorities) {
            (Way::Unix(path), _) => {
                let connection = UnixStream::connect(path).await?;
                // Another user may have taken the path first to get the key.
                check_user(&connection)?;
                Box::new(connection)
            }
            (Way::Tls(name), Some(authorities)) => {
                let connection = TcpStream::connect(&to.authority).await?;
                Box::new(authorities.connect(name, connection).await?)
            }
            _ => Box::new(TcpStream::connect(&to.authority).await?),
        })
    }

    async fn send(&self, method: Method, path: &str, body: String) -> Result<Answer, NoAnswer> {
        let address = &self.address;
        let failed =
            |error: &dyn std::fmt::Display| NoAnswer::Silent(format!("{address} does not answer: {error}"));
        let connected = tokio::time::timeout(PATIENCE, self.connect()).await;
        let connected = connected
            .map_err(|_elapsed| failed(&format!("no connection within {} s", PATIENCE.as_secs())))?;
        let stream = connected.map_err(|error| match is_untrusted(&error) {
            // The system also returns this error for a socket that this user may not open.
            false if error.get_ref().is_some() && error.kind() == io::ErrorKind::PermissionDenied => {
                NoAnswer::Untrusted(format!(
                    "{address} is not trusted, and nothing was sent: {error}; if that user's server is meant, run this as that user"
                ))
            }
            true => NoAnswer::Untrusted(format!(
                "{address} is not trusted: {error}; give the certificate of its authority as --ca FILE, and a name that its \
                 certificate has"
            )),
            false => failed(&error),
        })?;
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| failed(&error))?;
        let connection = tokio::spawn(async move {
            // The error is ignored here: it also appears as an error of the answer, or no answer comes.
            drop(connection.await);
        });
        let mut request = Request::builder();
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request
            .method(method)
            .uri(address.path(path))
            .header(HOST, &address.authority)
            .header(CONTENT_TYPE, "application/json")
            .body(body)
            .map_err(|error| failed(&error))?;
        match sender.send_request(request).await {
            Ok(response) => {
                let (head, body) = response.into_parts();
                Ok(Answer { status: head.status, headers: head.headers, body, connection })
            }
            Err(error) => {
                connection.abort();
                Err(failed(&error))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use host_tests::skip::skipped;
    use host_wire::endpoint::bind_socket;
    use tokio::io::AsyncReadExt as _;
    use tokio::net::UnixListener;

    use super::*;

    /// Id of a user that is not root and need not exist.
    const OTHER: u32 = 65_533;

    #[tokio::test]
    async fn a_socket_of_another_user_is_told_no_key() {
        if !rustix::process::geteuid().is_root() {
            skipped("a socket of another user: only root can make one");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let path = folder.path().join("admin.sock");
        let socket = std::thread::scope(|scope| {
            let bound = scope.spawn(|| {
                // On Linux each thread has its own user.
                let user = rustix::process::Uid::from_raw(OTHER);
                rustix::thread::set_thread_res_uid(user, user, user).unwrap();
                bind_socket(&path).unwrap()
            });
            bound.join().unwrap()
        });
        let listener = UnixListener::from_std(socket.into()).unwrap();
        let hears = tokio::spawn(async move {
            let (mut connection, _) = listener.accept().await.unwrap();
            let mut heard = Vec::new();
            // The client may have hung up with an error.
            drop(connection.read_to_end(&mut heard).await);
            String::from_utf8(heard).unwrap()
        });
        let address = Address::parse(&format!("unix:{}", path.display())).unwrap();
        let client = Client { address, key: Some("an operator's".to_owned()), authorities: None };
        let error = client.get("/health").await.err().expect("no answer");
        assert_eq!(hears.await.unwrap(), "");
        assert!(matches!(error, NoAnswer::Untrusted(_)), "{error:?}");
        let error = error.to_string();
        assert!(error.contains("admin.sock") && error.contains(&OTHER.to_string()), "{error}");
    }

    #[test]
    fn errors_are_one_line_whatever_shape_they_have() {
        for (body, line) in [
            (r#"{"error": {"message": "too\nlong"}}"#, "too long"),
            (r#"{"error": "busy"}"#, "busy"),
            (r#"{"message": "gone"}"#, "gone"),
            ("<html>\n502</html>", "<html> 502</html>"),
            ("", ""),
        ] {
            assert_eq!(message_in(body), line, "{body}");
        }
        assert_eq!(message_in(&"x".repeat(5000)).len(), LONGEST_ERROR);
    }
}
