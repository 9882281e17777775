//! Entry points for fuzzing: the readers of requests as functions of bytes.
//!
//! Each function tells whether the bytes were accepted. None may panic, whatever the bytes are.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use host_grammar::{Compiler, Limits, Vocabulary};
use host_wire::endpoint::Credentials;
use host_wire::shares::Shares;
use serde_json::Value;
use tokio::sync::watch;

use super::{App, RequestId, TextWork, Unread, Uploads, chat, completions, generate, responses, tokens};
use crate::audit::Audit;
use crate::identity::Keys;
use crate::metrics::Metrics;
use crate::registry::{Policy, Registry, Terms};
use crate::router::{Retry, Router, Waits};
use crate::text::{ChatTemplate, TextModel};

/// A template with a place for everything that a conversation can have.
const TEMPLATE: &str = "{% if tools %}<tool_call> one of {{ tools | tojson }}{% endif %}\
{% for message in messages %}<{{ message.role }}>{{ message.content }}\
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}\
{% endfor %}<assistant>";
/// Most steps of a template: enough for any loop over a small input, and few enough to end an endless loop fast.
const FUEL: u64 = 20_000;
/// Largest body, in bytes.
const MAX_BODY: usize = 1 << 20;

pub(super) fn app() -> &'static App {
    static APP: OnceLock<App> = OnceLock::new();
    APP.get_or_init(|| {
        let mut text = TextModel::bytes(300);
        text.template = ChatTemplate::new(TEMPLATE.into(), String::new(), String::new()).ok().map(Arc::new);
        let registry = Registry::new(Terms {
            model: "model".into(),
            worker_timeout: Duration::from_secs(3),
            lost_after: Duration::from_secs(10),
            max_workers: 4,
            policy: Policy::default(),
            warm_up: false,
            seed: 1,
            credentials: Credentials::None,
        });
        let metrics = Arc::new(Metrics::new());
        let grammars = Compiler::new(&Vocabulary::bytes(), Limits::default());
        let grammars = grammars.unwrap_or_else(|error| unreachable!("bytes are a vocabulary: {error}"));
        let (_open, closing) = watch::channel(false);
        let stopping = closing.clone();
        App {
            model: "model".into(),
            aliases: Vec::new(),
            about: super::About::default(),
            text,
            router: Router::new(registry, (Retry::default(), Waits::default()), 16, metrics.clone(), closing),
            metrics,
            max_body: MAX_BODY,
            body_timeout: Duration::from_secs(1),
            default_max_tokens: 16,
            log_requests: false,
            stream_keep_alive: None,
            stall: Duration::from_secs(1),
            connections: Shares::new(1),
            audit: Audit::default(),
            uploads: Uploads::new(1, MAX_BODY),
            text_work: TextWork::new(MAX_BODY, 1),
            grammars,
            unread: Unread::new(MAX_BODY),
            stopping,
        }
    })
}

/// Reads a request's body. The first byte selects the endpoint.
#[must_use]
pub fn body(bytes: &[u8]) -> bool {
    let Some((endpoint, body)) = bytes.split_first() else { return false };
    let id = RequestId("fuzzing".to_owned());
    match endpoint % 5 {
        0 => completions::is_accepted(app(), &id, body),
        1 => chat::is_accepted(app(), &id, body),
        2 => generate::is_accepted(app(), &id, body),
        3 => tokens::is_accepted(app(), body),
        _ => responses::is_accepted(app(), &id, body),
    }
}

/// Renders a chat template with the messages that follow it, separated by a zero byte.
#[must_use]
pub fn template(bytes: &[u8]) -> bool {
    let mut texts = bytes.splitn(2, |byte| *byte == 0).map(String::from_utf8_lossy);
    let source = texts.next().unwrap_or_default().into_owned();
    let template = ChatTemplate::with_fuel(source, "<s>".into(), "</s>".into(), FUEL);
    let Ok(template) = template else { return false };
    let messages = serde_json::from_str(&texts.next().unwrap_or_default()).unwrap_or(Value::Null);
    template.render(&messages, &serde_json::Map::new(), 1_700_000_000).is_ok()
}

/// Reads a file of API keys.
#[must_use]
pub fn api_keys(bytes: &[u8]) -> bool {
    match Keys::parse(&String::from_utf8_lossy(bytes), None) {
        Ok(keys) => keys.count() > 0,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}
