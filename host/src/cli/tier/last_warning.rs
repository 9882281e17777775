//! Keeps the last warning of a plugin. A page that ends with an error code has no text, and the warning gives the reason.

use std::fmt::{self, Write as _};
use std::sync::{Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// The target of lines that plugins write.
const PLUGIN: &str = "plugin";

static LAST: Mutex<Option<String>> = Mutex::new(None);

/// Keeps the last warning of a plugin.
pub struct LastWarning;

impl<S: Subscriber> Layer<S> for LastWarning {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        if event.metadata().target() == PLUGIN && *event.metadata().level() <= Level::WARN {
            let mut text = Text::default();
            event.record(&mut text);
            *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Some(text.0);
        }
    }
}

/// The last warning of a plugin since the last call.
pub fn take() -> Option<String> {
    LAST.lock().unwrap_or_else(PoisonError::into_inner).take()
}

#[derive(Default)]
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            let _cannot_fail = write!(self.0, "{value:?}");
        }
    }
}
