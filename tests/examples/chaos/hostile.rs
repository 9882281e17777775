//! Hostile clients: slow ones, ones that break connections, and ones that send very much.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::load::Address;

/// Longest time of one attack.
const LONGEST: Duration = Duration::from_secs(20);
/// Time between two bytes of a slow client.
const SLOW: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    ReadSlowly,
    SendSlowly,
    AbortUpload,
    Reset,
    GiantJson,
    DeepJson,
    ManyPrompts,
    NestedJson,
    Garbage,
    UnreadAnswer,
    UnreadLogprobs,
    UnreadStreams,
    UnreadRefusals,
    ResetStreams,
}

const ACTS: &[(Act, &str)] = &[
    (Act::ReadSlowly, "read a long answer byte by byte"),
    (Act::SendSlowly, "sent a head byte by byte"),
    (Act::AbortUpload, "hung up in the middle of a body"),
    (Act::Reset, "reset the connection of an answer"),
    (Act::GiantJson, "sent JSON of a million values"),
    (Act::DeepJson, "sent JSON 200,000 arrays deep"),
    (Act::ManyPrompts, "sent settings of a million values for 128 prompts"),
    (Act::NestedJson, "sent arguments of a call with a million lists"),
    (Act::Garbage, "sent what is no HTTP"),
    (Act::UnreadAnswer, "read nothing of a long text"),
    (Act::UnreadLogprobs, "read nothing of 16 answers with log probabilities"),
    (Act::UnreadStreams, "read none of 100 texts over HTTP/2"),
    (Act::UnreadRefusals, "read none of 100 refusals of a long header"),
    (Act::ResetStreams, "reset 100 streams of HTTP/2 as they began"),
];

/// Hostile clients that run.
pub struct Hostile {
    stop: Arc<AtomicBool>,
    done: Arc<Mutex<BTreeMap<&'static str, u64>>>,
    clients: Vec<JoinHandle<()>>,
}

impl Hostile {
    pub fn start(routers: &[Address], clients: u32, seed: u64) -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let clients = (0..clients).map(|client| {
            let mut random = fastrand::Rng::with_seed(seed.wrapping_mul(2000).wrapping_add(client.into()));
            let (stop, routers) = (Arc::clone(&stop), routers.to_vec());
            let done: Arc<Mutex<BTreeMap<_, u64>>> = Arc::clone(&done);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let (Some((act, name)), Some(router)) = (random.choice(ACTS), random.choice(&routers))
                    else {
                        return;
                    };
                    // The server is right to hang up.
                    let _refused = attack(*act, &router.url, &mut random);
                    *done.lock().unwrap().entry(*name).or_default() += 1;
                }
            })
        });
        Self { clients: clients.collect(), stop, done }
    }

    /// Stops the clients. Returns how often each act was done.
    pub fn stop(self) -> BTreeMap<&'static str, u64> {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.join().unwrap();
        }
        Arc::into_inner(self.done).unwrap().into_inner().unwrap()
    }
}

fn attack(act: Act, url: &str, random: &mut fastrand::Rng) -> std::io::Result<()> {
    let address = url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(LONGEST))?;
    stream.set_write_timeout(Some(LONGEST))?;
    let until = Instant::now() + Duration::from_millis(random.u64(100..LONGEST.as_millis() as u64));
    let head = |length: usize| {
        format!(
            "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        )
    };
    let texts = |tokens: usize| format!("{{\"tokens\": [{}97]}}", "97,".repeat(tokens));
    let long = "{\"input_ids\": [1, 2, 3], \"stream\": true, \
                \"sampling_params\": {\"max_new_tokens\": 1000, \"ignore_eos\": true}}";
    match act {
        Act::ReadSlowly => {
            stream.write_all((head(long.len()) + long).as_bytes())?;
            while Instant::now() < until && stream.read(&mut [0])? > 0 {
                std::thread::sleep(SLOW);
            }
        }
        Act::SendSlowly => {
            for byte in head(long.len()).bytes().take_while(|_| Instant::now() < until) {
                stream.write_all(&[byte])?;
                std::thread::sleep(SLOW);
            }
        }
        Act::AbortUpload => {
            let (whole, sent) = (4 << 20, random.usize(0..4 << 20));
            stream.write_all(head(whole).as_bytes())?;
            stream.write_all(&vec![b' '; sent])?;
        }
        Act::Reset => {
            stream.write_all((head(long.len()) + long).as_bytes())?;
            // The kernel ends a connection with unread data by a reset.
            stream.peek(&mut [0])?;
        }
        Act::GiantJson => {
            // As many values as are allowed. A few more, and the server would refuse the request before it parses it.
            let tokens = "7,".repeat((1 << 20) - 4);
            let body = format!("{{\"input_ids\": [{tokens}7]}}");
            answered(&mut stream, &(head(body.len()) + &body))?;
        }
        Act::DeepJson => {
            let body = "[".repeat(200_000);
            answered(&mut stream, &(head(body.len()) + &body))?;
        }
        Act::ManyPrompts => {
            let (prompts, values) = ("\"a\",".repeat(127), "0,".repeat(1_000_000));
            let body = format!("{{\"text\": [{prompts}\"a\"], \"sampling_params\": {{\"x\": [{values}0]}}}}");
            answered(&mut stream, &(head(body.len()) + &body))?;
        }
        Act::NestedJson => {
            let arguments = format!("{{\\\"a\\\": [{}0]}}", "[0],".repeat(1_000_000));
            let call = format!("{{\"function\": {{\"name\": \"f\", \"arguments\": \"{arguments}\"}}}}");
            let body = format!("{{\"messages\": [{{\"role\": \"assistant\", \"tool_calls\": [{call}]}}]}}");
            let head = head(body.len()).replace("/generate", "/v1/chat/completions");
            answered(&mut stream, &(head + &body))?;
        }
        Act::Garbage => {
            let bytes: Vec<u8> = (0..random.usize(1..4096)).map(|_| random.u8(..)).collect();
            stream.write_all(&bytes)?;
            let _said = stream.read(&mut [0; 4096]);
        }
        Act::UnreadAnswer => {
            let body = texts(500_000);
            let head = head(body.len()).replace("/generate", "/detokenize");
            stream.write_all((head + &body).as_bytes())?;
            held(&stream, until)?;
        }
        Act::UnreadLogprobs => {
            let body = "{\"input_ids\": [1, 2, 3], \"stream\": true, \"return_logprob\": true, \"top_logprobs_num\": 20, \
                        \"sampling_params\": {\"max_new_tokens\": 1000, \"ignore_eos\": true, \"n\": 16}}";
            stream.write_all((head(body.len()) + body).as_bytes())?;
            held(&stream, until)?;
        }
        Act::UnreadStreams => {
            begin_http2(&mut stream)?;
            let body = texts(5000);
            for number in of_client() {
                stream.write_all(&request(number, "/detokenize", body.as_bytes()))?;
            }
            held(&stream, until)?;
        }
        Act::UnreadRefusals => {
            begin_http2(&mut stream)?;
            let origin = "\"".repeat(4000);
            for number in of_client() {
                let head = [request_head("/generate"), literal(&[0x00, 6], "origin", &origin)].concat();
                stream.write_all(&frame(1, 5, number, &head))?;
            }
            held(&stream, until)?;
        }
        Act::ResetStreams => {
            begin_http2(&mut stream)?;
            for number in of_client() {
                stream.write_all(&request(number, "/generate", long.as_bytes()))?;
                stream.write_all(&frame(3, 0, number, &8_u32.to_be_bytes()))?;
            }
            held(&stream, until)?;
        }
    }
    Ok(())
}

/// The odd stream numbers that a client may use. They are fewer than the server allows.
fn of_client() -> impl Iterator<Item = u32> {
    (1..200).step_by(2)
}

/// Begins an HTTP/2 connection whose window allows no byte of any answer, and waits for the server's first frames.
fn begin_http2(stream: &mut TcpStream) -> std::io::Result<()> {
    // INITIAL_WINDOW_SIZE is 0.
    let settings = frame(4, 0, 0, &[0, 4, 0, 0, 0, 0]);
    stream.write_all(&[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &settings[..]].concat())?;
    stream.read(&mut [0; 4096]).map(drop)
}

/// A frame of HTTP/2. Stream 0 stands for the connection.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    let head = [length[1], length[2], length[3], kind, flags];
    [&head[..], &stream.to_be_bytes(), payload].concat()
}

/// A request of less than 16 KiB in HTTP/2: HEADERS, and DATA with the end of the stream.
fn request(number: u32, path: &str, body: &[u8]) -> Vec<u8> {
    [frame(1, 4, number, &request_head(path)), frame(0, 1, number, body)].concat()
}

/// The headers of a request in HPACK.
fn request_head(path: &str) -> Vec<u8> {
    // The method POST and the scheme http are indexed in HPACK's table. The others are literals after the index of their name.
    let (path, host) = (literal(&[0x04], "", path), literal(&[0x01], "", "localhost"));
    [vec![0x83, 0x86], path, host, literal(&[0x0f, 0x10], "", "application/json")].concat()
}

/// A header in HPACK, which no table keeps: the index of its name, or 0 and the length of the name that follows, then its value.
fn literal(index: &[u8], name: &str, value: &str) -> Vec<u8> {
    let mut length = vec![value.len().min(127) as u8];
    if let Some(mut more) = value.len().checked_sub(127) {
        while more >= 128 {
            length.push((more % 128) as u8 | 0x80);
            more /= 128;
        }
        length.push(more as u8);
    }
    [index, name.as_bytes(), &length, value.as_bytes()].concat()
}

/// Keeps a connection without reading, until `until` or until the server ends it.
fn held(stream: &TcpStream, until: Instant) -> std::io::Result<()> {
    while Instant::now() < until && stream.take_error()?.is_none() {
        std::thread::sleep(SLOW);
    }
    Ok(())
}

/// Sends a whole request, and reads the beginning of the answer.
fn answered(stream: &mut TcpStream, request: &str) -> std::io::Result<usize> {
    let sent = stream.write_all(request.as_bytes());
    // The server may refuse the request before it has read all of it.
    let read = stream.read(&mut [0; 4096]);
    sent.and(read)
}
