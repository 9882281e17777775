//! Carries one request to its workers: picks a route, calls every leg, and retries failures that another try may avoid.
//!
//! The legs of a try fail together: when one leg fails, the stream of the other is dropped, which cancels it. The next try has a
//! new room, and continues the answer where it broke off ([`progress`]).

mod attempt;
mod failure;
mod progress;
mod waits;
mod warm_up;

use std::sync::Arc;
use std::time::Duration;

use host_core::radix::NamespaceKey;
pub use host_core::routing::Retry;
use host_core::routing::{Answer, Tries};
use host_core::{Instance, Room};
use host_grammar::Source;
use host_wire::clock::{self, Instant};
use host_wire::convert::write_namespace;
use host_wire::proto;
use host_wire::proto::worker_client::WorkerClient;
use host_wire::random::random_u64;
use host_wire::shares::{NoShare, Share, Shares};
use tokio::sync::{OnceCell, watch};

use self::attempt::{Attempt, Step};
pub use self::failure::Failure;
use self::progress::Progress;
pub use self::waits::Waits;
pub use self::warm_up::warm_up;
use super::identity::{Caller, number};
use super::metrics::Metrics;
use super::registry::{Abilities, Chain, Chosen, Need, NoRoute, Registry, Route};

/// A request in tokens.
#[derive(Clone, Debug)]
pub struct Job {
    /// The id in logs. It is the same in all tries.
    pub request_id: String,
    /// At least one token.
    pub prompt: Arc<Vec<u32>>,
    /// The names of the prompt's pages. The answers to a prompt share them, because finding them hashes the whole prompt.
    pub pages: Pages,
    /// Most tokens of the answer. If absent: [`Job::default_max_tokens`], or less if the model's context leaves less.
    pub max_new_tokens: Option<u32>,
    /// The name of the request's field with that number.
    pub answer_field: &'static str,
    /// Most tokens of an answer when the request gives no number. Long answers take pages from other requests.
    pub default_max_tokens: u32,
    /// Tokens that end the answer.
    pub stop_tokens: Vec<u32>,
    /// Whether to generate `max_new_tokens` even after a stop token.
    pub ignore_stop: bool,
    /// How tokens are drawn, with the client's seed.
    pub sampling: proto::Sampling,
    /// `Some(n)`: the log probabilities of the prompt's tokens are wanted before the answer, each with those of the n likeliest
    /// tokens at its place.
    pub scores: Option<u32>,
    /// Whether an answer is wanted.
    pub answers: bool,
    /// The grammar that the answer must follow.
    pub grammar: Option<Source>,
    /// Whether the client sees nothing before the end, so that an answer that broke off can begin again.
    pub restartable: bool,
    /// The namespace within which the request shares cached pages.
    pub namespace: NamespaceKey,
    /// Whether to use no cached pages and leave none.
    pub no_cache: bool,
    /// A hash of the session's name: its requests stay together unless load says otherwise.
    pub session: Option<u64>,
    /// Smaller numbers go first.
    pub priority: i32,
    /// When the request arrived. The router's time limit begins here.
    pub arrived: Instant,
    /// The client's time limit, if it ends before the router's.
    pub deadline: Option<Deadline>,
}

/// The names of a prompt's pages, once an answer has needed them.
#[derive(Clone, Debug, Default)]
pub struct Pages(Arc<OnceCell<Vec<Chain>>>);

/// When an answer has to be complete.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    /// The point in time.
    pub at: Instant,
    /// The time limit of the client, counted from the arrival of the request.
    pub given: Duration,
}

impl Job {
    /// Whether the request has settings that only later versions of the control protocol know.
    fn is_shaped(&self) -> bool {
        let proto::Sampling { temperature, top_p, top_k, seed, logprobs, .. } = self.sampling;
        self.sampling != proto::Sampling { temperature, top_p, top_k, seed, logprobs, ..Default::default() }
    }
}

/// Longest prompt, in tokens, that is hashed on the calling thread, which takes about a millisecond.
const SHORT_PROMPT: usize = 1 << 16;

/// The workers that served a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedBy {
    /// Name of the prefill worker, absent when `decode` did both.
    pub prefill: Option<String>,
    /// Name of the decode or aggregated worker.
    pub decode: String,
}

/// An event of a [`Generation`].
#[derive(Clone, Debug)]
pub enum Event {
    /// Workers were chosen and called, for the first time.
    Dispatched,
    /// The prompt's KV is complete, and tokens follow.
    Began(proto::Began),
    /// The tokens of the prompt behind the first, each with its log probability. They come before the answer.
    Scored(Vec<proto::Token>),
    /// The next token.
    Token(proto::Token),
    /// All tokens so far are void, and the answer begins again. Only for restartable jobs, and where answers are not resumed.
    Restarted,
    /// The end. Nothing follows.
    Finished(proto::Finished),
}

/// Sends requests to workers.
#[derive(Clone, Debug)]
pub struct Router {
    registry: Registry,
    retry: Retry,
    waits: Waits,
    places: Shares,
    metrics: Arc<Metrics>,
    closing: watch::Receiver<bool>,
}

impl Router {
    /// A router that serves at most `max_requests` requests at once. When `closing` becomes true, requests that still run end
    /// with an error.
    #[must_use]
    pub fn new(
        registry: Registry,
        (retry, waits): (Retry, Waits),
        max_requests: usize,
        metrics: Arc<Metrics>,
        closing: watch::Receiver<bool>,
    ) -> Self {
        Self { registry, retry, waits, places: Shares::new(max_requests), metrics, closing }
    }

    /// The workers.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// How long the router waits for workers.
    #[must_use]
    pub fn waits(&self) -> Waits {
        self.waits
    }

    /// Requests under way.
    #[must_use]
    pub fn running(&self) -> usize {
        self.places.taken()
    }

    /// Takes a place for one request of a caller, before any work is done for it.
    ///
    /// # Errors
    /// [`Failure::Busy`] when all places are taken, [`Failure::OverShare`] when the caller already has its share of them, or as
    /// many as its key allows.
    pub fn admit(&self, caller: &Caller) -> Result<RequestPlace, Failure> {
        let of_key = caller.places.as_ref().map(|places| places.take_any(&caller.client, 1)).transpose();
        let of_key = of_key.map_err(|_none| Failure::OverShare)?;
        let place = self.places.take(&caller.client, 1);
        place
            .map(|place| RequestPlace { _place: place, _of_key: of_key, client: number(&caller.client) })
            .map_err(|why| match why {
                NoShare::Full => Failure::Busy(format!(
                    "{} requests are under way, which is the limit; try again when some have been answered",
                    self.places.total()
                )),
                NoShare::Client => Failure::OverShare,
            })
    }

    /// How long a request may take, from its arrival on.
    #[must_use]
    pub fn longest(&self) -> Duration {
        self.retry.longest
    }

    /// Begins a request. Dropping the generation cancels it on every worker.
    #[must_use]
    pub fn generate(&self, place: RequestPlace, job: Job) -> Generation {
        let now = clock::now();
        let deadline = now + self.retry.total;
        let progress = Progress::new(Answer::new(Arc::clone(&job.prompt)));
        let longest = job.arrived + self.retry.longest;
        let ends = job.deadline.map_or(longest, |deadline| deadline.at.min(longest));
        Generation {
            scoring: job.scores.map(|_top| Vec::new()),
            router: self.clone(),
            place,
            job,
            ends,
            decode: None,
            deadline,
            tries: Tries::default(),
            failed: Vec::new(),
            served: Vec::new(),
            attempt: None,
            served_by: None,
            progress,
        }
    }
}

/// One of the places for concurrent requests. Dropping it frees the place.
#[derive(Debug)]
pub struct RequestPlace {
    _place: Share,
    _of_key: Option<Share>,
    /// The number by which workers know the client.
    client: u64,
}

/// A request under way.
pub struct Generation {
    router: Router,
    place: RequestPlace,
    job: Job,
    /// While the prompt's log probabilities are being found: those that have come.
    scoring: Option<Vec<proto::Token>>,
    /// When the request has to end.
    ends: Instant,
    /// When the last try may begin.
    deadline: Instant,
    tries: Tries<Instant>,
    /// Workers that failed a try, in the order of failing.
    failed: Vec<Instance>,
    /// Workers that served a failed try.
    served: Vec<Instance>,
    attempt: Option<Attempt>,
    /// The decode worker of the last try.
    decode: Option<Chosen>,
    served_by: Option<ServedBy>,
    progress: Progress,
}

impl Generation {
    /// The workers of the last try.
    #[must_use]
    pub fn served_by(&self) -> Option<&ServedBy> {
        self.served_by.as_ref()
    }

    /// Ends the answer, because the client has all that it needs. The worker is told so and counts the request as finished. A
    /// worker that cannot be told counts the request as cancelled.
    pub fn enough(mut self) {
        let (Some(mut attempt), Some(worker)) = (self.attempt.take(), self.decode.take()) else { return };
        if !worker.protocol.knows_ended_answers() {
            return;
        }
        let request = proto::EndAnswerRequest { instance: worker.instance.0, room: attempt.room().0 };
        let mut client = WorkerClient::new(worker.channel.clone());
        let within = self.router.waits.end;
        tokio::spawn(async move {
            let ended = async {
                if let Err(status) = client.end_answer(request).await {
                    tracing::debug!(worker = worker.name, %status, "a worker was not told that an answer is complete");
                    return false;
                }
                loop {
                    match attempt.next().await {
                        Step::Began(_) | Step::Token(_) | Step::Scores(_) => {}
                        Step::Finished(_) => return true,
                        Step::Failed { .. } => return false,
                    }
                }
            };
            if clock::timeout(within, ended).await == Ok(true) {
                attempt.settle(within);
            }
        });
    }

    /// The next event. After [`Event::Finished`] or an error the generation is over.
    ///
    /// # Errors
    /// The failure that ended the generation, after all tries.
    pub async fn next(&mut self) -> Result<Event, Failure> {
        let (mut closing, ends) = (self.router.closing.clone(), self.ends);
        tokio::select! {
            event = self.step() => event,
            () = clock::sleep_until(ends) => {
                let longest = self.router.retry.longest;
                match self.job.deadline.filter(|deadline| deadline.at == ends) {
                    Some(deadline) => Err(Failure::Late(deadline.given)),
                    None => {
                        let why = format!("the request took longer than {} s (--request-timeout)", longest.as_secs_f64());
                        Err(self.given_up(why))
                    }
                }
            }
            _ = closing.wait_for(|&closing| closing) => {
                Err(Failure::Unavailable("the server is shutting down".into()))
            }
        }
    }

    async fn step(&mut self) -> Result<Event, Failure> {
        loop {
            let mut attempt = match self.attempt.take() {
                Some(attempt) => attempt,
                None if self.scoring.is_none() && !self.job.answers => {
                    return Ok(Event::Finished(self.progress.finished("length")));
                }
                None => {
                    let first = self.decode.is_none();
                    if first && self.tries.failed() == 0 {
                        // An answer may have waited long for another one to the same prompt.
                        self.deadline = clock::now() + self.router.retry.total;
                    }
                    let begun = self.begin().await?;
                    if first {
                        self.attempt = Some(begun);
                        return Ok(Event::Dispatched);
                    }
                    begun
                }
            };
            match attempt.next().await {
                // The request's answer is still to come.
                Step::Began(_) if self.scoring.is_some() => {
                    self.tries.came_together();
                    self.router.registry.computed(attempt.room());
                    self.attempt = Some(attempt);
                }
                Step::Scores(scores) => {
                    let worker = attempt.served_by().decode;
                    self.add_scores(&worker, scores)?;
                    self.attempt = Some(attempt);
                }
                Step::Finished(_) if self.scoring.is_some() => {
                    let worker = attempt.served_by().decode;
                    attempt.settle(self.router.waits.end);
                    return Ok(Event::Scored(self.scored(&worker)?));
                }
                Step::Token(_) if self.scoring.is_some() => {
                    let worker = attempt.served_by().decode;
                    let message =
                        format!("worker {worker:?} sent tokens where log probabilities were asked for");
                    return Err(Failure::Internal(message));
                }
                Step::Began(began) => {
                    self.tries.came_together();
                    self.router.metrics.expected_tokens.inc_by(attempt.expected());
                    self.router.registry.computed(attempt.room());
                    self.attempt = Some(attempt);
                    if let Some(began) = self.progress.begin(self.of_request(began)) {
                        return Ok(Event::Began(began));
                    }
                }
                Step::Token(token) => {
                    if !self.progress.answer.push(token.token) {
                        let worker = attempt.served_by().decode;
                        let message =
                            format!("worker {worker:?} sent more tokens than the request asked for");
                        return Err(Failure::Internal(message));
                    }
                    self.attempt = Some(attempt);
                    return Ok(Event::Token(token));
                }
                Step::Finished(finished) => {
                    attempt.settle(self.router.waits.end);
                    let mut finished = self.progress.finish(finished);
                    if self.job.scores.is_some() {
                        (finished.cached_tokens, finished.offload_tokens) = (0, 0);
                    }
                    return Ok(Event::Finished(finished));
                }
                Step::Failed { leg, failure, suspect, reported, apart } => {
                    // A failure that a worker reports may be its partner's fault. A worker that is gone is itself at fault.
                    self.served.extend(attempt.instances());
                    self.failed.extend(if reported { attempt.instances() } else { vec![leg] });
                    drop(attempt);
                    if suspect {
                        self.router.registry.suspect(leg, &failure.to_string());
                    }
                    if let Some(reason) = self.complete() {
                        return Ok(Event::Finished(self.progress.finished(reason)));
                    }
                    let restarts = self.after_failure(failure, apart).await?;
                    if restarts {
                        return Ok(Event::Restarted);
                    }
                }
            }
        }
    }

    /// A report on the prompt's KV as the request's own: a cache may have the KV because this request computed it for log
    /// probabilities.
    fn of_request(&self, began: proto::Began) -> proto::Began {
        match self.job.scores {
            Some(_) => proto::Began { cached_tokens: 0, offload_tokens: 0, ..began },
            None => began,
        }
    }

    /// Adds log probabilities of the prompt, as far as they are new. Another try, or a request that was preempted, sends them again.
    fn add_scores(&mut self, worker: &str, scores: proto::Scores) -> Result<(), Failure> {
        let prompt = self.progress.answer.prompt();
        let have = self.scoring.as_ref().map_or(0, Vec::len);
        let first = scores.first as usize;
        let fits = first >= 1
            && first <= have + 1
            && first + scores.tokens.len() <= prompt.len()
            && scores.tokens.iter().zip(&prompt[first..]).all(|(scored, token)| scored.token == *token);
        let Some(all) = self.scoring.as_mut().filter(|_| fits) else {
            let message =
                format!("worker {worker:?} sent log probabilities of other tokens than were asked for");
            return Err(Failure::Internal(message));
        };
        all.extend(scores.tokens.into_iter().skip(have + 1 - first));
        Ok(())
    }

    /// Ends the search for the prompt's log probabilities: the answer is next.
    fn scored(&mut self, worker: &str) -> Result<Vec<proto::Token>, Failure> {
        let all = self.scoring.take().unwrap_or_default();
        let (have, wanted) = (all.len(), self.progress.answer.prompt().len() - 1);
        if have < wanted {
            let message =
                format!("worker {worker:?} sent {have} of the {wanted} log probabilities of the prompt");
            return Err(Failure::Internal(message));
        }
        // The answer has its own time and tries, as if it were a request that begins now.
        self.deadline = clock::now() + self.router.retry.total;
        self.tries = Tries::default();
        Ok(all)
    }

    /// The reason why the answer is complete, if its last token has come but the worker did not report the end.
    fn complete(&self) -> Option<&'static str> {
        let last = self.progress.answer.last()?;
        if !self.job.ignore_stop && self.job.stop_tokens.contains(&last) {
            Some("stop")
        } else {
            (self.progress.answer.left() == 0).then_some("length")
        }
    }

    /// Whether the client has received a part of the answer.
    fn is_seen(&self) -> bool {
        self.progress.answer.answered() > 0 && !self.job.restartable
    }

    /// The failure of a request that is not tried again.
    fn given_up(&self, why: String) -> Failure {
        if self.is_seen() { Failure::Broken(why) } else { Failure::Unavailable(why) }
    }

    /// Decides whether another try follows a failed one, and waits until it is due. Returns whether that try begins the answer
    /// again.
    async fn after_failure(&mut self, failure: Failure, apart: bool) -> Result<bool, Failure> {
        if !failure.retryable() {
            return Err(failure);
        }
        let resume = self.router.retry.resume;
        if self.is_seen() && !resume {
            return Err(self.given_up(failure.to_string()));
        }
        let (now, retry) = (clock::now(), &self.router.retry);
        // The deadline is renewed, also for a request that waited long for its turn.
        self.deadline = now + retry.total;
        let wait = match apart {
            true => self.tries.after_apart(retry, now),
            false => {
                let since = self.tries.row_since().unwrap_or(now);
                let others_break = self.router.registry.another_broke(since, &self.served);
                self.tries.after_loss(retry, now, self.progress.answer.brought(), others_break)
            }
        };
        let tries = self.tries.failed();
        let Some(wait) = wait else {
            return Err(self.given_up(format!("{failure} (after {tries} tries)")));
        };
        let answered = self.progress.answer.answered();
        tracing::info!(request = self.job.request_id, tries, answered, %failure, "trying again");
        self.router.metrics.retries.inc();
        let restarts = !resume && self.progress.answer.brought() > 0;
        if restarts {
            self.progress.forget();
        } else if self.progress.answer.brought() > 0 {
            self.router.metrics.resumed.inc();
            self.progress.answer.keep(Arc::make_mut);
            // The prompt of the next try includes the answer so far, so it has more pages.
            self.job.pages = Pages::default();
        }
        clock::sleep(wait).await;
        Ok(restarts)
    }

    /// Begins a try: a new room on a new route. Waits for workers if there are none.
    async fn begin(&mut self) -> Result<Attempt, Failure> {
        // 63 bits, as in the rooms of other systems.
        let random = random_u64().map_err(|error| Failure::Internal(format!("no randomness: {error}")))?;
        let room = Room(random >> 1);
        let mut route = self.route(room).await?;
        let scores = self.job.scores.filter(|_| self.scoring.is_some());
        if scores.is_some() {
            route.keep_prefill();
            if !route.decode.scores {
                return Err(Failure::Refused(format!(
                    "worker {:?} is of an older release, which finds no log probabilities of prompts: update it, or leave echo or logprobs out",
                    route.decode.name
                )));
            }
        }
        if self.job.is_shaped()
            && let Some(worker) = [Some(&route.decode), route.prefill.as_ref()]
                .into_iter()
                .flatten()
                .find(|worker| !worker.protocol.knows_shaping())
        {
            return Err(Failure::Internal(format!(
                "worker {:?} is of an older version, which knows no penalties, biases and lists of tokens: update it, or leave them out",
                worker.name
            )));
        }
        if let Some(worker) = route.without_grammars().filter(|_| self.job.grammar.is_some()) {
            return Err(Failure::Refused(format!(
                "worker {worker:?} takes no requests with a grammar or a schema: it computes no model with a vocabulary, or is of an \
                 older release"
            )));
        }
        self.tries.begin(clock::now());
        let prompt = Arc::clone(self.progress.answer.prompt());
        let room_left = route.max_tokens().saturating_sub(u32::try_from(prompt.len()).unwrap_or(u32::MAX));
        self.progress
            .answer
            .limit(self.job.max_new_tokens.unwrap_or_else(|| room_left.min(self.job.default_max_tokens)));
        let request = proto::GenerateRequest {
            room: room.0,
            request_id: self.job.request_id.clone(),
            prompt: prompt.to_vec(),
            answered: self.progress.answer.answered(),
            max_new_tokens: if scores.is_some() { 1 } else { self.progress.answer.left() },
            stop_tokens: self.job.stop_tokens.clone(),
            ignore_stop: self.job.ignore_stop,
            sampling: Some(self.job.sampling.clone()),
            priority: self.job.priority,
            client: self.place.client,
            prefill: None,
            namespace: Some(write_namespace(&self.job.namespace)),
            no_cache: self.job.no_cache,
            scores,
            grammar: self.job.grammar.as_ref().filter(|_| scores.is_none()).map(|source| proto::Grammar {
                kind: source.kind.as_str().to_owned(),
                text: source.text.clone(),
                compact: source.compact,
            }),
        };
        tracing::debug!(
            request = self.job.request_id,
            %room,
            tries = self.tries.in_a_row(),
            prefill = route.prefill.as_ref().map(|worker| worker.name.as_str()),
            decode = route.decode.name,
            "dispatched"
        );
        self.decode = Some(route.decode.clone());
        let attempt = Attempt::start(&self.router.registry, route, request);
        self.served_by = Some(attempt.served_by());
        Ok(attempt)
    }

    async fn route(&mut self, room: Room) -> Result<Route, Failure> {
        let prompt = self.progress.answer.prompt().len() as u64;
        let answer = match self.progress.answer.answered() {
            // Another worker may hold fewer tokens than the one that fixed the answer's length.
            0 => self.job.max_new_tokens.unwrap_or(1),
            _ => self.progress.answer.left(),
        };
        let pages = self.job.pages.clone();
        let chains: &[Chain] = match self.job.no_cache {
            true => &[],
            // Finding log probabilities computes the whole prompt.
            false if self.scoring.is_some() => &[],
            false => {
                let (namespace, prompt) =
                    (self.job.namespace.clone(), Arc::clone(self.progress.answer.prompt()));
                let names = || name_pages(self.router.registry.clone(), namespace, prompt);
                pages.0.get_or_try_init(names).await?
            }
        };
        let session = self.job.session;
        let abilities = Abilities {
            shaping: self.job.is_shaped(),
            grammars: self.job.grammar.is_some(),
            scores: self.scoring.is_some(),
        };
        let tokens = prompt + u64::from(answer);
        let need = Need { room, tokens, prompt_tokens: prompt, chains, session, abilities };
        loop {
            let change = self.router.registry.change();
            match self.router.registry.pick(need, &self.failed) {
                // A worker that took the request before, and was lost, may come back.
                Ok(route) if self.tries.failed() > 0 && !route.has(abilities) => {
                    let why = "no worker is left that can do all that the request needs".to_owned();
                    tokio::select! {
                        () = change => {}
                        () = clock::sleep_until(self.deadline) => return Err(self.given_up(why)),
                    }
                }
                Ok(route) => return Ok(route),
                // The worker that the request fitted may come back.
                Err(NoRoute::TooLong(limit)) if self.tries.failed() > 0 => {
                    let why = format!("no worker is left that holds more than {limit} tokens");
                    tokio::select! {
                        () = change => {}
                        () = clock::sleep_until(self.deadline) => return Err(self.given_up(why)),
                    }
                }
                Err(NoRoute::TooLong(limit)) => {
                    let (answer, field) = (self.job.max_new_tokens, self.job.answer_field);
                    return Err(Failure::TooLong { limit, prompt, answer, field });
                }
                Err(NoRoute::NoWorker(why)) => {
                    self.tries.lacked_workers();
                    tokio::select! {
                        () = change => {}
                        () = clock::sleep_until(self.deadline) => return Err(self.given_up(why)),
                    }
                }
            }
        }
    }
}

/// The names of a prompt's pages on workers whose caches are followed.
async fn name_pages(
    registry: Registry,
    namespace: NamespaceKey,
    prompt: Arc<Vec<u32>>,
) -> Result<Vec<Chain>, Failure> {
    if prompt.len() <= SHORT_PROMPT {
        return Ok(registry.chains(&namespace, &prompt));
    }
    let named = tokio::task::spawn_blocking(move || registry.chains(&namespace, &prompt));
    named.await.map_err(|error| Failure::Internal(format!("the prompt could not be hashed: {error}")))
}
