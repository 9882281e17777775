//! Clients that send their prompts at the same moment.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::Barrier;
use std::time::Instant;

use anyhow::Context;
use serde_json::json;

/// Sends `count` prompts and returns the milliseconds to each one's first token. The prompts are numbered from `first` on, and no
/// two numbers share a prefix.
pub fn first_tokens(url: &str, count: usize, tokens: usize, first: usize) -> anyhow::Result<Vec<f64>> {
    let address = url.strip_prefix("http://").context("an http address")?;
    let together = Barrier::new(count);
    // All clients connect before any of them waits for the others.
    let streams: Vec<TcpStream> =
        (0..count).map(|_| TcpStream::connect(address)).collect::<Result<_, _>>().context("no connection")?;
    std::thread::scope(|scope| {
        let ask = |number: usize, mut stream: TcpStream| -> anyhow::Result<f64> {
            together.wait();
            let prompt: Vec<usize> = (0..tokens)
                .map(|place| if place < 4 { number >> (6 * place) & 63 } else { (place * 7 + number) % 250 })
                .collect();
            let body = json!({
                "input_ids": prompt,
                "stream": true,
                "sampling_params": { "max_new_tokens": 1, "temperature": 0, "ignore_eos": true },
            })
            .to_string();
            stream.set_nodelay(true)?;
            let sent = Instant::now();
            write!(
                stream,
                "POST /generate HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
                 content-length: {}\r\nconnection: close\r\n\r\n{body}",
                body.len()
            )?;
            let mut first_token = None;
            for line in BufReader::new(stream).lines() {
                let line = line?;
                if first_token.is_none() && line.starts_with("data: {") && line.contains("output_ids") {
                    first_token = Some(sent.elapsed().as_secs_f64() * 1e3);
                }
            }
            first_token.with_context(|| format!("prompt {number} was not answered"))
        };
        let clients: Vec<_> =
            (first..).zip(streams).map(|(number, stream)| scope.spawn(move || ask(number, stream))).collect();
        let join = |client: std::thread::ScopedJoinHandle<'_, anyhow::Result<f64>>| {
            client.join().map_err(|_panic| anyhow::anyhow!("a client panicked"))?
        };
        clients.into_iter().map(join).collect()
    })
}
