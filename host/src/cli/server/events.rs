//! The lines of an event stream.

/// Longest line that is read.
const LONGEST: usize = 1 << 20;

/// Splits received bytes into the data of events.
#[derive(Default)]
pub struct Events {
    line: Vec<u8>,
}

impl Events {
    /// The data of the events that end within these bytes, in order. Leaves out comments and other fields.
    ///
    /// # Errors
    /// A sentence, when a line is too long.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<Vec<String>, String> {
        let mut found = Vec::new();
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            self.take(&bytes[..end])?;
            bytes = &bytes[end + 1..];
            let line = String::from_utf8_lossy(&self.line);
            if let Some(data) = line.trim_end_matches('\r').strip_prefix("data:") {
                found.push(data.strip_prefix(' ').unwrap_or(data).to_owned());
            }
            self.line.clear();
        }
        self.take(bytes)?;
        Ok(found)
    }

    fn take(&mut self, bytes: &[u8]) -> Result<(), String> {
        if self.line.len() + bytes.len() > LONGEST {
            return Err(format!("the server sent a line of more than {} KiB", LONGEST >> 10));
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_the_same_however_they_are_cut() {
        let text = ": hello\n\ndata: {\"é\": 1}\r\n\r\nevent: x\ndata:[DONE]\n\n".as_bytes();
        for size in 1..=text.len() {
            let mut events = Events::default();
            let all: Vec<String> = text.chunks(size).flat_map(|piece| events.push(piece).unwrap()).collect();
            assert_eq!(all, ["{\"é\": 1}", "[DONE]"], "in pieces of {size}");
        }
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut events = Events::default();
        let piece = vec![b'x'; LONGEST / 2];
        assert!(events.push(&piece).is_ok() && events.push(&piece).is_ok());
        assert!(events.push(b"x").is_err_and(|error| error.contains("1024 KiB")));
    }
}
