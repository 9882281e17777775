//! Why a call failed, in one line.

use std::error::Error;

use tonic::Status;

/// What a call's status says, with what lies under it: a status of a broken connection alone says that there was an error.
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
