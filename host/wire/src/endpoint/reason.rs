//! The reason why a call failed, in one line.

use std::error::Error;

use tonic::Status;

/// The message of a call's status, with its causes: the status of a broken connection says only that there was an error.
#[must_use]
pub fn reason(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut next = status.source();
    while let Some(cause) = next {
        let said = cause.to_string();
        if !text.contains(&said) {
            if !text.is_empty() {
                text.push_str(": ");
            }
            text.push_str(&said);
        }
        next = cause.source();
    }
    text
}
