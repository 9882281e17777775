//! One request whose answer is read token by token, as a client sees it.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::Instant;

use serde_json::{Value, json};

/// The tokens of one request, and their times.
#[derive(Debug)]
pub struct Streamed {
    /// When it was begun, before there was a connection.
    pub sent: Instant,
    /// When each token was read.
    pub read: Vec<Instant>,
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Bytes of KV that came through a plugin.
    pub transferred_bytes: u64,
}

/// Generates exactly so many tokens, greedily, from token ids; on a connection of its own, without waiting for more than
/// the next line.
///
/// # Errors
/// With what the server said when the answer is not that long.
pub fn generate(url: &str, prompt: &[u32], count: usize) -> Result<Streamed, String> {
    let body = json!({
        "input_ids": prompt,
        "stream": true,
        "sampling_params": { "max_new_tokens": count, "temperature": 0, "ignore_eos": true },
    })
    .to_string();
    let address = url.strip_prefix("http://").ok_or("an http address is needed")?;
    let failed = |error: std::io::Error| error.to_string();
    let sent = Instant::now();
    let mut stream = TcpStream::connect(address).map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    write!(
        stream,
        "POST /generate HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )
    .map_err(failed)?;
    let (mut read, mut last) = (Vec::new(), String::new());
    for line in BufReader::new(stream).lines() {
        let line = line.map_err(failed)?;
        let now = Instant::now();
        let Some(event) = line.strip_prefix("data: ").filter(|event| *event != "[DONE]") else {
            continue;
        };
        let value: Value = serde_json::from_str(event).map_err(|error| error.to_string())?;
        let tokens = value["output_ids"].as_array().map_or(0, Vec::len);
        // Tokens that come together were waited for together.
        read.resize(tokens.max(read.len()), now);
        event.clone_into(&mut last);
    }
    let value: Value = serde_json::from_str(&last).unwrap_or_default();
    let tokens = value["output_ids"].as_array().into_iter().flatten();
    let tokens: Vec<u32> = tokens.filter_map(|token| u32::try_from(token.as_u64()?).ok()).collect();
    if tokens.len() != count || read.len() != count {
        return Err(format!("{count} tokens were requested, and the answer ended with {last:?}"));
    }
    let transferred_bytes = value["meta_info"]["transferred_bytes"].as_u64().unwrap_or(0);
    Ok(Streamed { sent, read, tokens, transferred_bytes })
}
