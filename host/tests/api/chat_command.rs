//! Tests of `host chat`: conversations over pipes, with a real server, and with a server that breaks on purpose.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;

use host_tests::cluster::{Cluster, Start, signal};
use host_tests::wait::{PATIENCE, until};
use serde_json::{Value, json};

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_host"))
}

fn begin(arguments: &[&str]) -> Child {
    let mut command = Command::new(program());
    command.arg("chat").args(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs a whole conversation. Returns the exit code, the answers, and the text on standard error.
fn chat(arguments: &[&str], lines: &str) -> (Option<i32>, String, String) {
    let mut child = begin(arguments);
    // A failure is ignored: a conversation that is refused reads no input.
    let _unread = child.stdin.take().unwrap().write_all(lines.as_bytes());
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// How the broken server answers a request.
enum Script {
    /// Sends these bytes and closes.
    Send(String),
    /// Sends these bytes and waits until the client closes the connection.
    Hold(String),
}

/// A server that answers from scripts, one connection at a time.
struct Broken {
    url: String,
    /// The bodies of the requests, and `null` for each held connection that the client closed.
    seen: mpsc::Receiver<Value>,
}

impl Broken {
    fn start(scripts: impl IntoIterator<Item = Script>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (sender, seen) = mpsc::channel();
        let mut scripts: VecDeque<Script> = scripts.into_iter().collect();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let (path, body) = request(&mut stream);
                if path == "/v1/models" {
                    let models = r#"{"data": [{"id": "broken"}]}"#;
                    let length = models.len();
                    write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{models}").unwrap();
                    continue;
                }
                assert_eq!(path, "/v1/chat/completions");
                sender.send(serde_json::from_str(&body).unwrap()).unwrap();
                match scripts.pop_front().expect("no more answers than scripts") {
                    // A failure is ignored: the client closes the connection at a wrong answer.
                    Script::Send(bytes) => drop(stream.write_all(bytes.as_bytes())),
                    Script::Hold(bytes) => {
                        stream.write_all(bytes.as_bytes()).unwrap();
                        // A reset ends the connection, too.
                        let _closed = stream.read_to_end(&mut Vec::new());
                        sender.send(Value::Null).unwrap();
                    }
                }
            }
        });
        Self { url, seen }
    }

    fn seen(&self) -> Value {
        self.seen.recv_timeout(PATIENCE).unwrap()
    }

    /// The messages of the next request, as `role: content`.
    fn messages(&self) -> Vec<String> {
        let request = self.seen();
        assert_eq!((&request["stream"], &request["model"]), (&json!(true), &json!("broken")));
        let messages = request["messages"].as_array().unwrap().iter();
        messages
            .map(|m| format!("{}: {}", m["role"].as_str().unwrap(), m["content"].as_str().unwrap()))
            .collect()
    }
}

/// Reads a request. Returns its path and body.
fn request(stream: &mut TcpStream) -> (String, String) {
    let mut reader = BufReader::new(stream);
    let (mut path, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let line = line.trim_end().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        match line.strip_prefix("content-length: ") {
            Some(number) => length = number.parse().unwrap(),
            None if path.is_empty() => path = line.split(' ').nth(1).unwrap().to_owned(),
            None => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    (path, String::from_utf8(body).unwrap())
}

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";

fn event(text: &str) -> String {
    format!("data: {}\n\n", json!({"choices": [{"delta": {"content": text}}]}))
}

fn whole(text: &str) -> Script {
    let usage = json!({"choices": [], "usage": {
        "prompt_tokens": 20, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16},
    }});
    Script::Send(format!("{HEAD}{}data: {usage}\n\ndata: [DONE]\n\n", event(text)))
}

#[test]
fn a_conversation_with_a_real_server_goes_on_from_its_cache() {
    let model = tempfile::tempdir().unwrap();
    host_tests::model::tiny_qwen3(model.path(), 0).unwrap();
    let flags = ["--role", "aggregated", "--model", model.path().to_str().unwrap(), "--prefill-radix-cache"];
    let flags = flags.map(str::to_owned).to_vec();
    let cluster = Cluster::start(&Start { program: program(), flags, config: String::new(), workers: 1 });
    let question = "A question that is long enough to fill more than one page of the cache.";
    let (code, answers, beside) = chat(
        &[&cluster.url, "--max-tokens", "4", "--temperature", "0"],
        &format!("{question}\nAnd another.\n"),
    );
    assert_eq!(code, Some(0), "{beside}");
    assert!(answers.lines().count() >= 2, "{answers:?}");
    let figures: Vec<&str> = beside.lines().filter(|line| line.contains("prompt tokens cached")).collect();
    assert_eq!(figures.len(), 2, "{beside}");
    assert!(figures[0].starts_with("[4 tokens, ") && figures[0].contains("first after "), "{beside}");
    assert!(figures[0].contains(" 0 of "), "{beside}");
    assert!(!figures[1].contains(" 0 of "), "the second turn begins as the first one did: {beside}");
}

#[test]
fn what_the_server_refuses_is_said_in_one_line_and_the_conversation_goes_on() {
    // A synthetic model has no chat template.
    let flags = ["--role", "aggregated", "--executor", "synthetic"].map(str::to_owned).to_vec();
    let cluster = Cluster::start(&Start { program: program(), flags, config: String::new(), workers: 1 });
    let (code, answers, beside) = chat(&[&cluster.url], "one\ntwo\n");
    assert_eq!((code, answers.as_str()), (Some(1), ""), "{beside}");
    let errors = beside.lines().filter(|line| line.starts_with("error: 400 Bad Request: "));
    assert_eq!(errors.filter(|line| line.contains("has no chat template")).count(), 2, "{beside}");
    assert!(beside.contains("2 of 2 turns failed"), "{beside}");
}

#[test]
fn flags_of_a_server_start_one_that_ends_with_the_conversation() {
    let model = tempfile::tempdir().unwrap();
    host_tests::model::tiny_qwen3(model.path(), 0).unwrap();
    let path = model.path().to_str().unwrap();
    let flags = ["--max-tokens", "2", "--role", "aggregated", "--model", path];
    let (code, _answers, beside) = chat(&flags, "hello\n");
    assert_eq!(code, Some(0), "{beside}");
    assert!(beside.contains(&format!("starting host --role aggregated --model {path} --port 0")), "{beside}");
    assert!(beside.contains("[2 tokens, "), "{beside}");
    assert_eq!(processes_with(path), 0, "a server was left behind");

    // A killed client cannot end its server. The system does it.
    let mut child = begin(&flags);
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"hello\n").unwrap();
    let mut answers = child.stdout.take().unwrap();
    answers.read_exact(&mut [0]).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    until("the server to end", || match processes_with(path) {
        0 => Ok(()),
        left => Err(format!("{left} processes")),
    });
}

/// Number of processes with this argument in their command line.
fn processes_with(argument: &str) -> usize {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines.filter(|line| line.split(|byte| *byte == 0).any(|word| word == argument.as_bytes())).count()
}

#[test]
fn flags_that_a_server_refuses_are_refused_here() {
    let (code, _, beside) = chat(&["--executor", "synthetic", "--page-size", "0"], "hello\n");
    assert_eq!(code, Some(2), "{beside}");
    assert!(beside.contains("the server refused its flags"), "{beside}");
    let (code, _, beside) = chat(&["--role", "decode", "--executor", "synthetic"], "hello\n");
    assert_eq!(code, Some(2), "{beside}");
    assert!(beside.contains("--role decode answers no requests alone"), "{beside}");
}

#[test]
fn a_conversation_holds_what_was_answered_until_it_is_reset() {
    let server = Broken::start(["Hi.", "Fine.", "New."].map(whole));
    let (code, answers, beside) = chat(
        &[&server.url, "--system", "be brief"],
        "hello\n\nhow are you\n/reset\n/nonsense\nagain\n/quit\nunsaid\n",
    );
    assert_eq!((code, answers.as_str()), (Some(0), "Hi.\nFine.\nNew.\n"), "{beside}");
    assert_eq!(server.messages(), ["system: be brief", "user: hello"]);
    let second = ["system: be brief", "user: hello", "assistant: Hi.", "user: how are you"];
    assert_eq!(server.messages(), second);
    assert_eq!(server.messages(), ["system: be brief", "user: again"]);
    assert!(server.seen.try_recv().is_err(), "nothing is asked after /quit");
    assert!(beside.contains("[3 tokens") && beside.contains("16 of 20 prompt tokens cached]"), "{beside}");
    assert!(beside.contains("there is no /nonsense"), "{beside}");
}

#[test]
fn an_answer_that_breaks_off_is_an_error_and_forgotten() {
    let failed = json!({"error": {"message": "the decode worker\nis gone"}});
    let server = Broken::start([
        Script::Send(format!("{HEAD}{}", event("half an"))),
        Script::Send(format!("{HEAD}{}data: {failed}\n\n", event("half"))),
        Script::Send(format!("{HEAD}data: nonsense\n\n")),
        Script::Send("HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy".to_owned()),
        Script::Send("\r\n\r\n".to_owned()),
        Script::Send(format!("{HEAD}data: {}\n\n", "x".repeat(2 << 20))),
        whole("Hi."),
    ]);
    let (code, answers, beside) = chat(&[&server.url], "1\n2\n3\n4\n5\n6\n7\n");
    assert_eq!((code, answers.as_str()), (Some(1), "half an\nhalf\nHi.\n"), "{beside}");
    let errors: Vec<&str> = beside.lines().filter(|line| line.starts_with("error: ")).collect();
    let expected = [
        "the server went away before the answer's end",
        "the decode worker is gone",
        "an event that is no JSON",
        "503 Service Unavailable: busy",
        "does not answer: ",
        "a line of more than 1024 KiB",
    ];
    assert_eq!(errors.len(), expected.len(), "{beside}");
    for (error, expected) in errors.iter().zip(expected) {
        assert!(error.contains(expected), "{expected:?}: {beside}");
    }
    assert!(beside.contains("6 of 7 turns failed"), "{beside}");
    for turn in 1..=7 {
        assert_eq!(server.messages(), [format!("user: {turn}")]);
    }
}

#[test]
fn ctrl_c_stops_the_answer_and_then_the_conversation() {
    let server = Broken::start([Script::Hold(format!("{HEAD}{}", event("one"))), whole("two")]);
    let mut child = begin(&[&server.url]);
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"hello\n").unwrap();
    let mut answers = child.stdout.take().unwrap();
    let mut read = [0; 3];
    answers.read_exact(&mut read).unwrap();
    assert_eq!(&read, b"one");
    signal(child.id(), "INT");
    assert_eq!(server.messages(), ["user: hello"]);
    assert_eq!(server.seen(), Value::Null, "the server is told by the connection's end");
    input.write_all(b"again\n").unwrap();
    let mut read = [0; 5];
    answers.read_exact(&mut read).unwrap();
    assert_eq!(&read, b"\ntwo\n");
    assert_eq!(server.messages(), ["user: hello", "assistant: one", "user: again"]);
    signal(child.id(), "INT");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let beside = String::from_utf8(output.stderr).unwrap();
    assert!(beside.lines().any(|line| line == "stopped"), "{beside}");
}

#[test]
fn servers_that_cannot_be_talked_to_are_named() {
    let unused = format!("http://{}", host_tests::ports::unused());
    for (arguments, code, says) in [
        (
            &["https://127.0.0.1:8000", "--ca", "/nowhere/ca.pem"][..],
            2,
            "--ca: /nowhere/ca.pem cannot be read",
        ),
        (&["ftp://127.0.0.1"], 2, "is no URL of a server"),
        (&["http://127.0.0.1:99999"], 2, "is no URL of a server"),
        (
            &["http://127.0.0.1:8000", "--model", "M"],
            2,
            "give the URL of a server, or flags to start one with",
        ),
        (&[&unused], 1, "does not answer"),
    ] {
        let (got, answers, beside) = chat(arguments, "hello\n");
        assert_eq!((got, answers.as_str()), (Some(code), ""), "{arguments:?}: {beside}");
        assert!(beside.contains(says), "{arguments:?}: {beside}");
    }
}
