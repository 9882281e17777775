//! A tokenizer that tests make wait.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use host_front::front::FrontConfig;
use host_front::text::{ByteTokenizer, TextError, TextModel, TextStream, Tokenizer};
use host_tests::wait::{PATIENCE, answered_until};

use super::fake_worker::{FakeWorker, Script};
use super::fixture::Front;

/// A tokenizer of bytes that waits while its gate is closed.
pub struct Gated {
    bytes: Arc<ByteTokenizer>,
    open: Mutex<bool>,
    changed: Condvar,
    pub begun: AtomicUsize,
    working: AtomicUsize,
    pub most_working: AtomicUsize,
    /// The token that a text begins with if special tokens are wanted.
    first: Option<u32>,
}

impl Gated {
    pub fn new() -> Arc<Self> {
        Self::of(None)
    }

    /// One that begins texts with this token if special tokens are wanted.
    pub fn beginning_with(first: u32) -> Arc<Self> {
        Self::of(Some(first))
    }

    fn of(first: Option<u32>) -> Arc<Self> {
        Arc::new(Self {
            first,
            bytes: Arc::new(ByteTokenizer::new(300)),
            open: Mutex::new(false),
            changed: Condvar::new(),
            begun: AtomicUsize::new(0),
            working: AtomicUsize::new(0),
            most_working: AtomicUsize::new(0),
        })
    }

    pub fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.changed.notify_all();
    }

    pub async fn until_begun(&self, count: usize) {
        answered_until("the tokenizer to begin", async || {
            tokio::task::yield_now().await;
            let begun = self.begun.load(Ordering::SeqCst);
            if begun >= count { Ok(()) } else { Err(format!("{begun} of {count} begun")) }
        })
        .await;
    }
}

impl Tokenizer for Gated {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        let working = self.working.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_working.fetch_max(working, Ordering::SeqCst);
        let open = self.open.lock().unwrap();
        let (_open, timeout) = self.changed.wait_timeout_while(open, PATIENCE, |open| !*open).unwrap();
        assert!(!timeout.timed_out(), "the gate was not opened");
        self.working.fetch_sub(1, Ordering::SeqCst);
        let first = self.first.filter(|_| add_special);
        Ok(first.into_iter().chain(self.bytes.encode(text, add_special)?).collect())
    }

    fn token_bytes(&self, token: u32) -> Vec<u8> {
        self.bytes.token_bytes(token)
    }

    fn is_special(&self, token: u32) -> bool {
        self.bytes.is_special(token)
    }

    fn vocabulary(&self) -> u32 {
        self.bytes.vocabulary()
    }

    fn stream(self: Arc<Self>, specials: host_front::text::Specials) -> Box<dyn TextStream> {
        Arc::clone(&self.bytes).stream(specials)
    }
}

/// A front whose requests are tokenized once the gate is open.
pub async fn with_gate(config: FrontConfig, script: Script) -> (Front, FakeWorker, Arc<Gated>) {
    let gate = Gated::new();
    let text =
        TextModel { tokenizer: gate.clone(), template: None, end: Vec::new(), dialect: Default::default() };
    let mut front = Front::start(FrontConfig { text, ..config }).await;
    let worker = front.worker("all", "aggregated", script).await;
    (front, worker, gate)
}
