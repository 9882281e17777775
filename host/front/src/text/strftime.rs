//! `strftime_now` of chat templates: today's date in Python's format letters, always in UTC.

/// Writes `seconds` since 1970 by `format`; letters that it does not know stay as they are.
#[must_use]
pub fn strftime(format: &str, seconds: u64) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day, day_of_year) = date(days);
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    let month_name = MONTHS[usize::try_from(month - 1).unwrap_or(0)];
    // 1970 began on a Thursday.
    let day_name = DAYS[usize::try_from((days + 3) % 7).unwrap_or(0)];
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    let mut text = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        let piece = match letters.next() {
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name.chars().take(3).collect(),
            Some('d') => format!("{day:02}"),
            Some('j') => format!("{day_of_year:03}"),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name.chars().take(3).collect(),
            Some('H') => format!("{hour:02}"),
            Some('I') => format!("{hour12:02}"),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('M') => format!("{minute:02}"),
            Some('S') => format!("{second:02}"),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) => format!("%{other}"),
            None => "%".to_owned(),
        };
        text.push_str(&piece);
    }
    text
}

/// Year, month (1 to 12), day of the month and day of the year of a day counted from 1970-01-01.
fn date(mut days: u64) -> (u64, u64, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let day_of_year = days + 1;
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1, day_of_year)
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
        ] {
            assert_eq!(strftime(format, seconds), text);
        }
    }
}
