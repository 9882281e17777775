//! The text of `/metrics`, shared by requests that come at the same time.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::body::Bytes;
use host_wire::exposition::Format;
use prometheus_client::registry::Registry;
use tokio::sync::Mutex;

/// Makes one text at a time, on a thread that may block, so that heartbeats do not wait for it. Requests that come while
/// a text is made share the next one. So each text has everything that happened before its request came.
#[derive(Clone)]
pub(super) struct Texts {
    registry: Arc<Registry>,
    /// Texts begun so far.
    begun: Arc<AtomicU64>,
    last: Arc<Mutex<Text>>,
}

impl fmt::Debug for Texts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Texts").field("begun", &self.begun).finish_non_exhaustive()
    }
}

/// The last text in both formats.
#[derive(Debug, Default)]
struct Text {
    /// The number of texts that had begun, this one included.
    number: u64,
    open_metrics: Bytes,
    text: Bytes,
}

impl Texts {
    /// The texts of the series in a registry.
    pub fn of(registry: Registry) -> Self {
        Self { registry: Arc::new(registry), begun: Arc::default(), last: Arc::default() }
    }

    /// A text that is begun after this call. None if it could not be made: a series panicked.
    pub async fn now(&self, format: Format) -> Option<Bytes> {
        let asked = self.begun.load(Ordering::SeqCst);
        let mut last = Arc::clone(&self.last).lock_owned().await;
        if last.number <= asked {
            let (registry, begun) = (Arc::clone(&self.registry), Arc::clone(&self.begun));
            // The lock moves to the thread. A request that is given up does not stop its text, and the next request waits
            // for it.
            let made = tokio::task::spawn_blocking(move || {
                let number = begun.fetch_add(1, Ordering::SeqCst) + 1;
                let mut written = String::new();
                // Writing to a string cannot fail.
                let _written = prometheus_client::encoding::text::encode(&mut written, &registry);
                let text = Format::Text.of(written.clone()).into();
                *last = Text { number, open_metrics: written.into(), text };
                last
            });
            last = made.await.ok()?;
        }
        Some(match format {
            Format::OpenMetrics => last.open_metrics.clone(),
            Format::Text => last.text.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Error;
    use std::sync::mpsc;
    use std::thread::ThreadId;

    use futures_util::future::{FutureExt as _, join, join_all};
    use host_tests::wait::PATIENCE;
    use parking_lot::Mutex as Locked;
    use prometheus_client::collector::Collector;
    use prometheus_client::encoding::DescriptorEncoder;

    use super::*;

    /// Records the threads on which it is read. Each read waits until the test lets it go on.
    #[derive(Debug)]
    struct Gate {
        open: Locked<mpsc::Receiver<()>>,
        read: Arc<Locked<Vec<ThreadId>>>,
    }

    impl Collector for Gate {
        fn encode(&self, _: DescriptorEncoder<'_>) -> Result<(), Error> {
            self.open.lock().recv_timeout(PATIENCE).expect("the test opens the gate");
            self.read.lock().push(std::thread::current().id());
            Ok(())
        }
    }

    fn gated() -> (Texts, mpsc::Sender<()>, Arc<Locked<Vec<ThreadId>>>) {
        let ((open, opened), read) = (mpsc::channel(), Arc::default());
        let mut registry = Registry::default();
        let gate = Gate { open: Locked::new(opened), read: Arc::clone(&read) };
        registry.register_collector(Box::new(gate));
        (Texts::of(registry), open, read)
    }

    #[tokio::test]
    async fn those_that_ask_at_once_share_a_text_that_no_control_thread_makes() {
        let (texts, open, read) = gated();
        let asked = join_all((0..100).map(|_| texts.now(Format::OpenMetrics)));
        // All have asked when the gate opens. It would never open if this thread made the text.
        let opens = async { (0..100).for_each(|_| open.send(()).unwrap()) };
        let (told, ()) = join(asked, opens).await;
        assert!(told.iter().all(|text| text.as_ref().is_some_and(|text| text.ends_with(b"# EOF\n"))));
        let read = read.lock();
        assert!(read.len() <= 2, "{} texts", read.len());
        assert!(!read.contains(&std::thread::current().id()));
    }

    #[tokio::test]
    async fn a_text_is_no_older_than_its_request() {
        let (texts, open, read) = gated();
        for number in 1..=3 {
            open.send(()).unwrap();
            texts.now(Format::Text).await.unwrap();
            assert_eq!(read.lock().len(), number);
        }
    }

    #[tokio::test]
    async fn requests_that_are_given_up_make_one_text_at_a_time() {
        let (texts, open, read) = gated();
        for _ in 0..100 {
            assert!(texts.now(Format::Text).now_or_never().is_none());
        }
        (0..2).for_each(|_| open.send(()).unwrap());
        texts.now(Format::Text).await.unwrap();
        assert!(read.lock().len() <= 2, "{} texts", read.lock().len());
    }
}
