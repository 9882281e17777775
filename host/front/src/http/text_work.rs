//! Work on text: parses bodies, renders templates and tokenizes texts, on threads of their own, a few at a time.
//!
//! A client that hangs up does not stop the work of a thread, so the work itself holds its permit. Abandoned work therefore takes
//! no more memory and no more threads than work that clients wait for.
//!
//! The bytes that wait or are worked on have a limit, and each client has a share of it: a client that sends prompts faster than
//! they are read gets an error. Clients take turns, so that a client that waits with many bodies does not delay one that waits
//! with one. A client has at most half of the turns for long bodies, rounded up, because nothing limits the time that one takes. If
//! there is only one turn, it may have that.
//!
//! A template may make a long text of a short body. So the text decides, too:
//!
//! ```text
//! body:  up to 16 KiB     up to 1 MiB      longer
//!             │                │              │
//!        short turn ────► long turn ───► longest turn
//!             │    text longer │  text longer │
//!             │    than 32 KiB │  than 1 MiB  │
//!             └────────────────┴──────────────┴─► done
//! ```
//!
//! In a longer turn the work begins again. It holds neither a turn nor its text while it waits.

use std::thread::available_parallelism;

use super::error::ApiError;
use crate::audit::Refusal;
use crate::turns::{Turn, Turns};
use host_wire::shares::{Client, NoShare, Share, Shares};

/// Largest short body, in bytes. A short body is some milliseconds of work, and does not wait for long ones.
const SHORT: usize = 16 << 10;
/// Longest text that a template makes in a turn for a short body. Templates add words of their own, and white space to tools.
const SHORT_TEXT: usize = 2 * SHORT;
/// Most short bodies that are worked on at once, for each thread of the machine: some read and wait, most compute.
const SHORT_PER_THREAD: usize = 4;
/// Most long bodies that are worked on at once. The tokenizer takes about 300 bytes for each byte of text, where each letter is a
/// word of its own. A body of 1 MiB takes 300 MB, then.
const LONG_AT_ONCE: usize = 8;
/// Largest long body, in bytes, and the longest text in a turn for one. The number of longer ones depends on the machine's memory.
const LONG: usize = 1 << 20;
/// Longest text that a template makes of a conversation, in bytes, unless bodies may be larger: the length for which the number of
/// turns for the longest ones has memory (`--max-body-bytes`, by default).
pub(super) const LONGEST_TEXT: usize = 8 << 20;

/// The length of a body or a text, as far as turns depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Length {
    Short,
    Long,
    Longest,
}

impl Length {
    fn of_body(bytes: usize) -> Self {
        if bytes <= SHORT {
            Self::Short
        } else if bytes <= LONG {
            Self::Long
        } else {
            Self::Longest
        }
    }

    /// Most bytes of a text that a template makes in a turn for this length.
    fn most_text(self) -> usize {
        match self {
            Self::Short => SHORT_TEXT,
            Self::Long => LONG,
            Self::Longest => usize::MAX,
        }
    }

    fn longer(self) -> Option<Self> {
        match self {
            Self::Short => Some(Self::Long),
            Self::Long => Some(Self::Longest),
            Self::Longest => None,
        }
    }
}

/// Permits for work on text.
#[derive(Clone, Debug)]
pub struct TextWork {
    short: Turns,
    long: Turns,
    longest: Turns,
    bytes: Shares,
}

impl TextWork {
    /// As many permits as this machine has threads for, at most `bytes` bytes that wait or are worked on, and at most `longest` bodies
    /// or texts above 1 MiB that are worked on at once.
    #[must_use]
    pub fn new(bytes: usize, longest: usize) -> Self {
        Self::over(available_parallelism().map_or(1, usize::from), bytes, longest)
    }

    fn over(threads: usize, bytes: usize, longest: usize) -> Self {
        Self {
            short: Turns::new(threads * SHORT_PER_THREAD),
            long: Turns::halved(threads.min(LONG_AT_ONCE)),
            longest: Turns::halved(threads.min(longest)),
            bytes: Shares::new(bytes),
        }
    }

    /// Bytes that wait or are worked on.
    pub(super) fn taken(&self) -> usize {
        self.bytes.taken()
    }

    /// Takes a client's share for a body of `bytes` bytes.
    ///
    /// # Errors
    /// When the body does not fit into the rest of the client's share, or of the limit of all clients.
    pub(super) fn take(&self, client: &Client, bytes: usize) -> Result<Share, ApiError> {
        self.bytes.take(client, bytes).map_err(|why| match why {
            NoShare::Full => {
                let message = "as much text as this server takes waits to be read".to_owned();
                ApiError::full(message, Refusal::AllText)
            }
            NoShare::Client => ApiError::over_share("bytes of requests that wait to be read", Refusal::Text),
        })
    }

    /// A client's share for the settings and the prompts of a request, of so many bytes, which are kept until its answers end. Short ones do not count.
    ///
    /// # Errors
    /// As [`TextWork::take`].
    pub(super) fn keep(&self, client: &Client, bytes: usize) -> Result<Share, ApiError> {
        if bytes <= SHORT { Ok(self.bytes.take_nothing(client)) } else { self.take(client, bytes) }
    }

    /// Does work on a body for whose bytes there is a share, which comes back with the result: it is to be held as long as the body's
    /// content is. The work gets the longest text, in bytes, that a template may make in its turn. If it [wants a longer
    /// turn](ApiError::wants_longer_turn), it is done again in one. Dropping the future leaves the queue. Work that has begun goes on
    /// to its end.
    ///
    /// # Errors
    /// The error of `work`, and an internal error when it panics.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        mut share: Share,
        mut work: impl FnMut(usize) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, Share), ApiError> {
        let mut length = Length::of_body(share.amount());
        loop {
            let turn = self.turn(length, share.client()).await;
            let done = tokio::task::spawn_blocking(move || {
                let done = work(length.most_text());
                drop(turn);
                (done, work, share)
            });
            let done = done.await;
            let (done, again, held) =
                done.map_err(|error| ApiError::internal(format!("the tokenizer failed: {error}")))?;
            match (done, length.longer()) {
                (Err(error), Some(longer)) if error.wants_longer_turn() => {
                    (work, share, length) = (again, held, longer);
                }
                (done, _) => return done.map(|done| (done, held)),
            }
        }
    }

    /// Takes a turn for work of this length. Work takes one turn only, so no work that has a turn waits for another one.
    async fn turn(&self, length: Length, client: &Client) -> Turn {
        let turns = match length {
            Length::Short => &self.short,
            Length::Long => &self.long,
            Length::Longest => &self.longest,
        };
        turns.take(client).await
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::mpsc;

    use futures_util::FutureExt as _;
    use host_tests::wait::{PATIENCE, answered_until};

    use super::*;

    #[tokio::test]
    async fn a_client_with_endless_long_bodies_delays_no_other() {
        let text = TextWork::over(4, 1 << 20, 4);
        let (many, one) = (Client::at(IpAddr::from([10, 0, 0, 1])), Client::at(IpAddr::from([10, 0, 0, 2])));
        let (begun, has_begun) = mpsc::channel();
        let work = |client: &Client| {
            let (text, begun) = (text.clone(), begun.clone());
            let share = text.take(client, SHORT + 1).unwrap();
            let (end, ended) = mpsc::channel::<()>();
            let task = tokio::spawn(async move {
                let work = move |_most_text: usize| {
                    begun.send(()).unwrap();
                    ended.recv().unwrap_err();
                    Ok(())
                };
                text.run(share, work).await.unwrap();
            });
            (task, end)
        };
        let endless: Vec<_> = (0..8).map(|_| work(&many)).collect();
        tokio::task::yield_now().await;
        let (other, end) = work(&one);
        drop(end);
        other.await.unwrap();
        for _ in 0..3 {
            has_begun.recv_timeout(PATIENCE).expect("two of the one begin, and one of the other");
        }
        // The one has half of the four turns and no more, and the other has ended.
        let free = [(); 2].map(|()| text.long.take(&one).now_or_never().expect("a turn is free"));
        drop(free);
        let (tasks, ends): (Vec<_>, Vec<_>) = endless.into_iter().unzip();
        drop(ends);
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(text.taken(), 0);
    }

    #[tokio::test]
    async fn bodies_above_a_mebibyte_are_worked_on_as_few_at_once_as_memory_allows() {
        let text = TextWork::over(8, 1 << 30, 1);
        let (begun, has_begun) = mpsc::channel();
        let work = |client: u8, bytes: usize| {
            let (text, begun) = (text.clone(), begun.clone());
            let share = text.take(&Client::at(IpAddr::from([10, 0, 0, client])), bytes).unwrap();
            let (end, ended) = mpsc::channel::<()>();
            let task = tokio::spawn(async move {
                let work = move |_most_text: usize| {
                    begun.send(client).unwrap();
                    ended.recv().unwrap_err();
                    Ok(())
                };
                text.run(share, work).await.unwrap();
            });
            (task, end)
        };
        let (first, end_first) = work(1, LONG + 1);
        tokio::task::yield_now().await;
        let (second, end_second) = work(2, LONG + 1);
        tokio::task::yield_now().await;
        let (third, end_third) = work(3, LONG);
        tokio::task::yield_now().await;
        let mut two =
            [(); 2].map(|()| has_begun.recv_timeout(PATIENCE).expect("the first and the third begin"));
        two.sort_unstable();
        assert_eq!(two, [1, 3]);
        assert!(text.longest.take(&Client::at(IpAddr::from([10, 0, 0, 4]))).now_or_never().is_none());
        let left: Vec<_> = (5..)
            .map_while(|client| text.long.take(&Client::at(IpAddr::from([10, 0, 0, client]))).now_or_never())
            .collect();
        assert_eq!(left.len(), 7, "the longest body takes none of the eight turns of long ones");
        drop(left);
        drop((end_first, end_third));
        first.await.unwrap();
        third.await.unwrap();
        assert_eq!(has_begun.recv_timeout(PATIENCE), Ok(2));
        drop(end_second);
        second.await.unwrap();
    }

    #[tokio::test]
    async fn a_short_body_of_which_a_long_text_is_made_waits_for_a_long_turn_and_holds_none_meanwhile() {
        let text = TextWork::over(2, 1 << 20, 1);
        let client = |number: u8| Client::at(IpAddr::from([10, 0, 0, number]));
        let long = [1, 2].map(|number| text.long.take(&client(number)).now_or_never());
        assert!(long.iter().all(Option::is_some), "both turns are free");
        let (begun, has_begun) = mpsc::channel();
        let task = tokio::spawn({
            let (text, share) = (text.clone(), text.take(&client(3), 1).unwrap());
            async move {
                let work = move |most_text: usize| {
                    begun.send(most_text).unwrap();
                    let wants = ApiError::long_text("messages", most_text, true);
                    if most_text > LONG { Ok("done") } else { Err(wants) }
                };
                text.run(share, work).await
            }
        });
        tokio::task::yield_now().await;
        assert_eq!(has_begun.recv_timeout(PATIENCE), Ok(SHORT_TEXT));
        answered_until("the short turn to be given back", async || {
            tokio::task::yield_now().await;
            let all: Vec<Turn> =
                std::iter::from_fn(|| text.short.take(&client(4)).now_or_never()).take(9).collect();
            if all.len() == 8 { Ok(()) } else { Err(all.len()) }
        })
        .await;
        assert!(has_begun.try_recv().is_err() && !task.is_finished(), "it has no long turn");
        drop(long);
        let (done, share) = task.await.unwrap().unwrap();
        assert_eq!((done, share.amount()), ("done", 1));
        assert_eq!(has_begun.try_iter().collect::<Vec<_>>(), [LONG, usize::MAX]);
        drop(share);
        assert_eq!(text.taken(), 0);
        // What the longest turn does not allow is refused.
        let share = text.take(&client(3), 1).unwrap();
        let wants = |most_text: usize| Err::<(), _>(ApiError::long_text("messages", most_text, true));
        let refused = text.run(share, wants).await.unwrap_err();
        assert!(refused.message().contains(&usize::MAX.to_string()), "{refused:?}");
        assert_eq!(text.taken(), 0);
    }

    #[tokio::test]
    async fn a_client_with_many_long_bodies_delays_another_by_one_of_them() {
        let text = TextWork::over(1, 1 << 20, 1);
        let (many, one) = (Client::at(IpAddr::from([10, 0, 0, 1])), Client::at(IpAddr::from([10, 0, 0, 2])));
        let (done, order) = mpsc::channel();
        let (begin, held) = mpsc::channel::<()>();
        let work = |name: &'static str, client: &Client, mut before: Option<mpsc::Receiver<()>>| {
            let (text, done) = (text.clone(), done.clone());
            let share = text.take(client, SHORT + 1).unwrap();
            async move {
                let work = move |_most_text: usize| {
                    // The first work holds its permit until the others wait.
                    before.take().map(|held| held.recv());
                    done.send(name).unwrap();
                    Ok(())
                };
                text.run(share, work).await.unwrap();
            }
        };
        let mut all = vec![tokio::spawn(work("first", &many, Some(held)))];
        for (name, client) in [("second", &many), ("third", &many), ("fourth", &many), ("other", &one)] {
            // A test's runtime has one thread, which runs each task until it waits.
            tokio::task::yield_now().await;
            all.push(tokio::spawn(work(name, client, None)));
        }
        tokio::task::yield_now().await;
        begin.send(()).unwrap();
        for task in all {
            task.await.unwrap();
        }
        assert_eq!(order.try_iter().collect::<Vec<_>>(), ["first", "second", "other", "third", "fourth"]);
        assert_eq!(text.taken(), 0);
    }
}
