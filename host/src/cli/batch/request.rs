//! Sends one request until it has an answer, as long as a repetition makes sense.

use std::sync::Arc;
use std::time::Duration;

use host_wire::random::random_u64;
use hyper::StatusCode;
use hyper::header::RETRY_AFTER;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::input::Line;
use crate::cli::server::{Answer, Client, NoAnswer, message_in};

/// Limit of an answer, in bytes.
const LONGEST: usize = 64 << 20;
/// The first wait before a repetition, if the server names none, and the longest.
const FIRST_WAIT: Duration = Duration::from_millis(500);
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// Longest wait, in seconds, that a server can ask for with Retry-After.
const LONGEST_ASKED: u64 = 3600;

/// The outcome of a request.
pub enum Outcome {
    /// A line for the output, and whether it is a success.
    Line(Value, bool),
    /// The job must stop for this reason: no request would be served.
    Stop(String),
}

/// The reasons for which a try gave no answer.
enum Failed {
    /// The server cannot take it now. It may have said how many seconds to wait.
    Busy(String, Option<u64>),
    /// There is no server, or it went away.
    Silent(String),
    /// The answer is invalid.
    Broken(String),
    /// The request's own time limit has passed. A repetition would take as long.
    Late(String),
    /// No request would be served.
    Stop(String),
}

/// Sends a request and waits for its answer. Repeats it while the server is busy or does not answer, for `retry_timeout` after the
/// first failure.
pub async fn send(client: Arc<Client>, line: Line, retry_timeout: Duration) -> Outcome {
    let Line { custom_id, endpoint, body } = line;
    let body = Value::Object(body);
    let mut deadline = None;
    let mut wait = FIRST_WAIT;
    loop {
        let failed = match once(&client, endpoint, &body).await {
            Ok(response) => {
                let status = response["status_code"].as_u64().unwrap_or_default();
                return Outcome::Line(told(&custom_id, response, Value::Null), (200..300).contains(&status));
            }
            Err(Failed::Stop(why)) => return Outcome::Stop(why),
            Err(failed) => failed,
        };
        let pause = match &failed {
            Failed::Busy(_, Some(seconds)) => wait.max(Duration::from_secs(*seconds.min(&LONGEST_ASKED))),
            _ => wait,
        };
        let now = Instant::now();
        let deadline = *deadline.get_or_insert(now + retry_timeout);
        if now + pause < deadline && !matches!(failed, Failed::Late(_)) {
            tokio::time::sleep(pause).await;
            wait = (wait * 2).min(LONGEST_WAIT);
            continue;
        }
        let (code, message) = match failed {
            Failed::Silent(why) | Failed::Stop(why) => return Outcome::Stop(why),
            Failed::Busy(why, _) => ("server_busy", why),
            Failed::Broken(why) => ("no_answer", why),
            Failed::Late(why) => ("timeout", why),
        };
        let error = json!({"code": code, "message": message});
        return Outcome::Line(told(&custom_id, Value::Null, error), false);
    }
}

/// Asks the server for its models, to find out whether requests make sense. A busy server counts as usable.
///
/// # Errors
/// A sentence, when no server answers, or it does not serve these requests.
pub async fn probe(client: &Client) -> Result<(), String> {
    let mut answer = client.get("/v1/models").await.map_err(|error| error.to_string())?;
    match answer.status {
        StatusCode::OK | StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Ok(()),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(no_key(client, &answer.error().await)),
        _ => Err(wrong_address(client, &answer.error().await)),
    }
}

fn no_key(client: &Client, why: &str) -> String {
    format!("{} serves none of these requests: {why} (HOST_API_KEY has the key)", client.address())
}

fn wrong_address(client: &Client, why: &str) -> String {
    format!("{} takes no such requests: {why} (is --url right?)", client.address())
}

/// Sends a request once.
async fn once(client: &Client, endpoint: &str, body: &Value) -> Result<Value, Failed> {
    let mut answer = client.post(endpoint, body).await.map_err(|error| match error {
        NoAnswer::Untrusted(why) => Failed::Stop(why),
        NoAnswer::Silent(why) => Failed::Silent(why),
    })?;
    let status = answer.status;
    let seconds = header(&answer, RETRY_AFTER.as_str()).and_then(|seconds| seconds.parse().ok());
    let request_id = header(&answer, "x-request-id").unwrap_or_default();
    let text = answer.rest_up_to(LONGEST).await.map_err(Failed::Broken)?;
    let message = || format!("{status}: {}", message_in(&text));
    match status {
        // A failure of the server is not the answer to a request.
        StatusCode::TOO_MANY_REQUESTS
        | StatusCode::SERVICE_UNAVAILABLE
        | StatusCode::INTERNAL_SERVER_ERROR
        | StatusCode::BAD_GATEWAY
        | StatusCode::GATEWAY_TIMEOUT => return Err(Failed::Busy(message(), seconds)),
        StatusCode::REQUEST_TIMEOUT => return Err(Failed::Late(message())),
        StatusCode::METHOD_NOT_ALLOWED | StatusCode::MISDIRECTED_REQUEST => {
            return Err(Failed::Stop(wrong_address(client, &message())));
        }
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            return Err(Failed::Stop(no_key(client, &message())));
        }
        _ => {}
    }
    let body: Value = serde_json::from_str(&text)
        .map_err(|error| Failed::Broken(format!("the answer is no JSON ({error}): {}", message())))?;
    Ok(json!({"status_code": status.as_u16(), "request_id": request_id, "body": body}))
}

fn header(answer: &Answer, name: &str) -> Option<String> {
    Some(answer.headers.get(name)?.to_str().ok()?.to_owned())
}

/// A line of the output.
fn told(custom_id: &str, response: Value, error: Value) -> Value {
    // The id is only for readers of the file. Lines are told apart by `custom_id`.
    let id = format!("batch_req_{:016x}", random_u64().unwrap_or_default());
    json!({"id": id, "custom_id": custom_id, "response": response, "error": error})
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde_json::Map;

    use super::*;
    use crate::cli::server::Address;

    /// Starts a server that gives these answers, one after the other, and counts its requests.
    fn server(answers: &[&str]) -> (Address, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::of(listener.local_addr().unwrap());
        let answers: Vec<String> = answers.iter().map(|answer| (*answer).to_owned()).collect();
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        // The thread ends with the test, which may send fewer requests than there are answers.
        std::thread::spawn(move || {
            for (answer, connection) in answers.iter().zip(listener.incoming()) {
                let mut connection = connection.unwrap();
                counted.fetch_add(1, Ordering::SeqCst);
                let (mut request, mut some) = (Vec::new(), [0; 1024]);
                while !request.ends_with(b"{}") {
                    let read = connection.read(&mut some).unwrap();
                    assert!(read > 0, "{}", String::from_utf8_lossy(&request));
                    request.extend_from_slice(&some[..read]);
                }
                let (head, body) = answer.split_once('|').unwrap();
                let length = body.len();
                write!(connection, "HTTP/1.1 {head}\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
            }
        });
        (address, count)
    }

    async fn sent(answers: &[&str], retry_timeout: u64) -> Outcome {
        let (address, count) = server(answers);
        let line = Line { custom_id: "a".to_owned(), endpoint: "/v1/completions", body: Map::new() };
        let client = Arc::new(Client::new(address, None).unwrap());
        let outcome = send(client, line, Duration::from_secs(retry_timeout)).await;
        assert_eq!(count.load(Ordering::SeqCst), answers.len());
        outcome
    }

    #[tokio::test]
    async fn a_busy_server_is_asked_again_until_it_answers() {
        let busy = "503 Service Unavailable\r\nretry-after: 0|{}";
        let good = "200 OK\r\nx-request-id: r1|{\"id\": 1}";
        let Outcome::Line(line, is_success) = sent(&[busy, good], 600).await else { panic!("it stopped") };
        assert!(is_success && line["id"].as_str().unwrap().starts_with("batch_req_"), "{line}");
        assert_eq!(line["response"], json!({"status_code": 200, "request_id": "r1", "body": {"id": 1}}));
        assert_eq!((&line["custom_id"], &line["error"]), (&json!("a"), &Value::Null));
    }

    #[tokio::test]
    async fn what_has_no_answer_in_time_is_a_line_with_an_error() {
        let busy = "429 Too Many Requests\r\nretry-after: 9|{\"error\": {\"message\": \"too many\"}}";
        let late = "408 Request Timeout|{}";
        let broken = "500 Internal Server Error|{}";
        for (answer, timeout, code) in [
            (busy, 9, "server_busy"),
            (broken, 0, "server_busy"),
            (late, 600, "timeout"),
            ("200 OK|<html>", 0, "no_answer"),
        ] {
            let Outcome::Line(line, is_success) = sent(&[answer], timeout).await else {
                panic!("it stopped")
            };
            assert!(!is_success && line["response"].is_null(), "{line}");
            assert_eq!(line["error"]["code"], code, "{line}");
        }
    }

    #[tokio::test]
    async fn an_answer_that_is_no_success_is_an_answer() {
        let Outcome::Line(line, is_success) = sent(&["400 Bad Request|{}"], 600).await else {
            panic!("it stopped")
        };
        assert!(!is_success, "{line}");
        assert_eq!((&line["response"]["status_code"], &line["error"]), (&json!(400), &Value::Null));
    }

    #[tokio::test]
    async fn no_number_of_a_server_is_too_large() {
        let busy = "503 Service Unavailable\r\nretry-after: 18446744073709551615|{}";
        let Outcome::Line(line, is_success) = sent(&[busy], 600).await else { panic!("it stopped") };
        assert!(!is_success, "{line}");
    }

    #[tokio::test]
    async fn a_wrong_key_stops_the_job_and_is_no_answer() {
        let Outcome::Stop(why) = sent(&["401 Unauthorized|{}"], 600).await else { panic!("it went on") };
        assert!(why.contains("HOST_API_KEY"), "{why}");
    }
}
