//! What clients of the HTTP API may hold, from the settings.

use std::time::Duration;

use host_front::connections::Limits;
use host_front::front::FrontConfig;

use super::settings::{Bytes, Settings};
use super::{Refused, memory};

/// Largest body that can be allowed. The tokens of a larger one would not fit into a control message.
const LARGEST_BODY: Bytes = Bytes(1 << 30);
/// Default of the largest body.
const BODY: Bytes = Bytes(8 << 20);
/// Default of the bytes of bodies in transit.
const UPLOADS: Bytes = Bytes(256 << 20);
/// Bytes of bodies that wait to be parsed and tokenized, by default.
const TEXT: Bytes = Bytes(256 << 20);
/// Bytes of answers that are not read, by default.
const ANSWERS: Bytes = Bytes(256 << 20);
/// By default there is room for this many bodies of the largest size at once.
const BODIES: u64 = 8;
/// Memory of the machine for each body above 1 MiB that is tokenized at once, and most of them. Larger bodies than by default need more.
const LONG_TEXT: u64 = 8 << 30;
const MOST_LONG_TEXTS: usize = 8;
/// Default of the longest waits for a client, in seconds.
const CLIENT_TIMEOUT: u32 = 30;

/// The limits of a router's clients, except the number of requests, which is another setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientLimits {
    connections: Limits,
    max_body: usize,
    max_uploads: Option<usize>,
    max_upload_bytes: usize,
    max_text_bytes: usize,
    max_answer_bytes: usize,
    body_timeout: Duration,
}

impl ClientLimits {
    /// Reads the limits from the settings.
    ///
    /// # Errors
    /// When a limit is 0, contradicts another limit, or exceeds what this process may have.
    pub fn of(settings: &Settings) -> Result<Self, Refused> {
        let seconds = |given: Option<u32>| Duration::from_secs(given.unwrap_or(CLIENT_TIMEOUT).into());
        let body = settings.max_body_bytes.unwrap_or(BODY);
        if body == Bytes(0) || body > LARGEST_BODY {
            return Err(Refused(format!("--max-body-bytes is {body}: it must be 1 to {LARGEST_BODY}")));
        }
        // A client alone gets at most four fifths of a limit.
        let least = Bytes(body.0 + body.0.div_ceil(4));
        let beside = |flag, given: Option<Bytes>, standard: Bytes| match given {
            None => in_memory(flag, Bytes(standard.0.max(body.0 * BODIES))),
            Some(given) if given < least => Err(Refused(format!(
                "{flag} is {given}, and --max-body-bytes is {body}: one client gets four fifths of the first at most, so a body, or an answer, of that \
                 size would always be refused; raise the first to {least}, or lower the second"
            ))),
            Some(given) => in_memory(flag, given),
        };
        Ok(Self {
            connections: connections(settings, seconds(settings.idle_timeout))?,
            max_body: in_memory("--max-body-bytes", body)?,
            max_uploads: settings.max_uploads.map(|most| most as usize),
            max_upload_bytes: beside("--max-upload-bytes", settings.max_upload_bytes, UPLOADS)?,
            max_text_bytes: beside("--max-text-bytes", settings.max_text_bytes, TEXT)?,
            max_answer_bytes: beside("--max-answer-bytes", settings.max_answer_bytes, ANSWERS)?,
            body_timeout: seconds(settings.body_timeout),
        })
    }

    /// The configuration of a router with these limits.
    #[must_use]
    pub fn of_front(self, front: FrontConfig) -> FrontConfig {
        let Self {
            connections,
            max_body,
            max_uploads,
            max_upload_bytes,
            max_text_bytes,
            max_answer_bytes,
            body_timeout,
        } = self;
        let max_uploads = max_uploads.unwrap_or(front.max_uploads);
        let memory = memory::available().unwrap_or(LONG_TEXT);
        let each = LONG_TEXT.max(max_body as u64 * LONG_TEXT / BODY.0);
        let longest_texts = usize::try_from(memory / each).unwrap_or(1).clamp(1, MOST_LONG_TEXTS);
        FrontConfig {
            connections,
            max_body,
            max_uploads,
            max_upload_bytes,
            max_text_bytes,
            max_answer_bytes,
            body_timeout,
            longest_texts,
            ..front
        }
    }
}

fn connections(settings: &Settings, head: Duration) -> Result<Limits, Refused> {
    let room = Limits::new(head);
    match settings.max_connections.map(|most| most as usize) {
        None => Ok(room),
        Some(most) if (1..=room.connections).contains(&most) => Ok(Limits { connections: most, ..room }),
        Some(most) => Err(Refused(format!(
            "--max-connections is {most}: it must be 1 to {}, which leaves a quarter of the files that this process may have open \
             (ulimit -n) to everything else",
            room.connections
        ))),
    }
}

fn in_memory(flag: &str, bytes: Bytes) -> Result<usize, Refused> {
    usize::try_from(bytes.0)
        .map_err(|_too_large| Refused(format!("{flag} is {bytes}: no process has so much memory")))
}

#[cfg(test)]
mod tests {
    use host_front::text::TextModel;

    use super::*;

    fn standard() -> FrontConfig {
        FrontConfig::new("m".to_owned(), TextModel::bytes(300))
    }

    #[test]
    fn without_flags_the_limits_are_those_of_a_router() {
        let (front, own) = (ClientLimits::of(&Settings::default()).unwrap().of_front(standard()), standard());
        let all = |front: &FrontConfig| {
            (
                (front.connections, front.max_body, front.max_uploads),
                (front.max_upload_bytes, front.max_text_bytes, front.max_answer_bytes, front.body_timeout),
            )
        };
        assert_eq!(all(&front), all(&own));
    }

    #[test]
    fn flags_set_what_a_router_allows() {
        let settings = Settings {
            max_connections: Some(7),
            max_body_bytes: Some(Bytes(1 << 10)),
            max_uploads: Some(3),
            max_upload_bytes: Some(Bytes(2 << 10)),
            max_text_bytes: Some(Bytes(3 << 10)),
            max_answer_bytes: Some(Bytes(4 << 10)),
            body_timeout: Some(5),
            idle_timeout: Some(6),
            ..Settings::default()
        };
        let front = ClientLimits::of(&settings).unwrap().of_front(standard());
        assert_eq!(front.connections, Limits { head: Duration::from_secs(6), connections: 7 });
        assert_eq!((front.max_body, front.max_uploads), (1 << 10, 3));
        assert_eq!((front.max_upload_bytes, front.max_text_bytes), (2 << 10, 3 << 10));
        assert_eq!(front.max_answer_bytes, 4 << 10);
        assert_eq!(front.body_timeout, Duration::from_secs(5));
        // Limits that are not set are large enough for eight of the largest bodies.
        let settings = Settings { max_body_bytes: Some(Bytes(100 << 20)), ..Settings::default() };
        let front = ClientLimits::of(&settings).unwrap().of_front(standard());
        assert_eq!((front.max_upload_bytes, front.max_text_bytes), (800 << 20, 800 << 20));
        assert_eq!(front.max_answer_bytes, 800 << 20);
    }

    #[test]
    fn limits_of_nothing_or_against_one_another_are_refused_with_the_flag() {
        let size = |bytes| Some(Bytes(bytes));
        let none = Settings::default;
        for (settings, says) in [
            (Settings { max_connections: Some(0), ..none() }, "--max-connections is 0: it must be 1 to "),
            (Settings { max_connections: Some(70_000), ..none() }, "(ulimit -n)"),
            (Settings { max_body_bytes: size(0), ..none() }, "--max-body-bytes is 0: it must be 1 to 1GiB"),
            (Settings { max_body_bytes: size(2 << 30), ..none() }, "it must be 1 to 1GiB"),
            (
                Settings { max_upload_bytes: size(1 << 20), ..none() },
                "--max-upload-bytes is 1MiB, and --max-body-bytes is 8MiB",
            ),
            (Settings { max_text_bytes: size(0), ..none() }, "--max-text-bytes is 0, and --max-body-bytes"),
            (
                Settings { max_answer_bytes: size(9), ..none() },
                "--max-answer-bytes is 9, and --max-body-bytes",
            ),
        ] {
            let refused = ClientLimits::of(&settings).unwrap_err().to_string();
            assert!(refused.contains(says), "{refused}");
        }
    }
}
