//! `strftime_now` of chat templates: today's date in Python's format letters, always in UTC.

use std::fmt::Write as _;

use chrono::format::StrftimeItems;
use chrono::{DateTime, Utc};

/// Formats `seconds` since 1970. Letters of `format` without a meaning stay as they are.
#[must_use]
pub fn strftime(format: &str, seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| DateTime::from_timestamp(seconds, 0));
    let mut text = String::new();
    let written = time.map(|time: DateTime<Utc>| {
        write!(text, "{}", time.format_with_items(StrftimeItems::new_lenient(format)))
    });
    match written {
        Some(Ok(())) => text,
        // The calendar does not have this year.
        Some(Err(_)) | None => format.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn dates_agree_with_python() {
        for (seconds, format, text) in [
            (0, "%d %b %Y", "01 Jan 1970"),
            (951_782_400, "%A %B %d %Y %j", "Tuesday February 29 2000 060"),
            (1_735_689_599, "%F %T %I %p %y", "2024-12-31 23:59:59 11 PM 24"),
            (1_735_689_600, "%a %m %H%% %Q", "Wed 01 00% %Q"),
            (1_767_225_600, "%-d %B %Y, %e %k %l", "1 January 2026,  1  0 12"),
            (1_735_689_599, "%D %R %U %W %u %w %V %G", "12/31/24 23:59 52 53 2 2 01 2025"),
            (1_735_689_599, "%c %x %X %r %h", "Tue Dec 31 23:59:59 2024 12/31/24 23:59:59 11:59:59 PM Dec"),
            (0, "%S %M %Z %E %K %i %é %", "00 00 UTC %E %K %i %é %"),
        ] {
            assert_eq!(strftime(format, seconds), text);
        }
        assert_eq!(strftime("%Y", u64::MAX), "%Y", "a time that no calendar has");
    }
}
