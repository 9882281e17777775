//! Records a run second by second and request by request, as data for charts.

use host_core::Time;
use host_core::scheduler::Stats;
use serde::Serialize;

use crate::cluster::{Cluster, Role};
use crate::seen::Seen;
use crate::traffic::{Record, Traffic};

/// The most points of a curve.
const POINTS: usize = 400;

/// One second of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Second {
    /// Tokens of answers.
    pub tokens: u64,
    /// Requests that were answered.
    pub answered: u64,
    /// The share of the pools' pages that requests held, of each role in [`Recording::roles`].
    pub used: Vec<f64>,
    /// Requests in the queues of each role.
    pub queued: Vec<usize>,
}

/// One request. Times are in seconds since the first request was sent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Request {
    /// When it was sent.
    pub sent: f64,
    /// When its first token came, or `None` if none came.
    pub first: Option<f64>,
    /// When it ended.
    pub ended: f64,
    /// Tokens of its prompt.
    pub prompt: u32,
    /// Tokens of its answer.
    pub answer: u32,
    /// The place of the worker that computed its prompt, unless the worker that answered did.
    pub prefill: Option<usize>,
    /// The place of the worker that answered.
    pub answers: usize,
}

/// The data of one run, for charts.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Recording {
    /// The roles of workers that there are.
    pub roles: Vec<Role>,
    /// The seconds, from the first request that was sent on.
    pub seconds: Vec<Second>,
    /// The requests that are measured.
    pub requests: Vec<Request>,
    /// The latencies.
    #[serde(flatten)]
    pub curves: Curves,
}

/// The distributions of a run's latencies, for charts.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Curves {
    /// Times to the first token in milliseconds, sorted: values at even steps from the least to the largest.
    pub ttft_ms: Vec<f64>,
    /// The same for times between two tokens.
    pub itl_ms: Vec<f64>,
}

impl Curves {
    /// The latencies of these requests, of those that were answered to their end. `gaps` are the seconds between two tokens, over all
    /// tokens of all requests.
    #[must_use]
    pub fn of(seen: &[Seen], gaps: &[f64]) -> Self {
        let first = |request: &Seen| {
            let (first, _) = request.tokens.filter(|_| request.complete)?;
            Some(first.saturating_sub(request.sent).as_secs_f64() * 1e3)
        };
        Self {
            ttft_ms: curve(seen.iter().filter_map(first).collect()),
            itl_ms: curve(gaps.iter().map(|gap| gap * 1e3).collect()),
        }
    }
}

/// The state of the workers, second by second.
#[derive(Clone, Debug, Default)]
pub(crate) struct Occupancy {
    roles: Vec<Role>,
    /// The role of each worker, and the pages of its pool.
    workers: Vec<(usize, u32)>,
    pages: Vec<f64>,
    seconds: Vec<Second>,
}

impl Occupancy {
    pub(crate) fn new(cluster: &Cluster) -> Self {
        let mut new = Self::default();
        for workers in &cluster.workers {
            let known = new.roles.iter().position(|role| *role == workers.role);
            let role = known.unwrap_or_else(|| {
                new.roles.push(workers.role);
                new.pages.push(0.0);
                new.roles.len() - 1
            });
            let pages = cluster.pool_pages(workers);
            new.pages[role] += f64::from(pages) * workers.count as f64;
            new.workers.extend(std::iter::repeat_n((role, pages), workers.count));
        }
        new
    }

    /// Begins a second.
    pub(crate) fn begin(&mut self) {
        let roles = self.roles.len();
        self.seconds.push(Second { used: vec![0.0; roles], queued: vec![0; roles], ..Second::default() });
    }

    /// Adds the state of a worker at the end of the second.
    pub(crate) fn take(&mut self, place: usize, stats: &Stats) {
        let ((role, _), Some(second)) = (self.workers[place], self.seconds.last_mut()) else { return };
        let used = (stats.pool.held + stats.locked_pages + stats.pool.quarantined) as f64;
        second.used[role] += used / self.pages[role];
        second.queued[role] += stats.queued;
    }

    /// Completes the recording with what the clients saw.
    pub(crate) fn recording(mut self, traffic: &Traffic) -> Recording {
        let measured = traffic.measured();
        let begun = traffic.records.first().map_or(Time::default(), |record| record.sent);
        let skipped = usize::try_from(begun.0.as_secs()).unwrap_or_default().min(self.seconds.len());
        self.seconds.drain(..skipped);
        let since = |time: Time| (time.since(begun).as_secs_f64() * 1e4).round() / 1e4;
        let second =
            |time: Time| usize::try_from(time.0.as_secs()).unwrap_or_default().saturating_sub(skipped);
        let most = self.seconds.len().saturating_sub(1);
        for (at, tokens) in &traffic.tokens_by_second {
            let place = usize::try_from(*at).unwrap_or_default().saturating_sub(skipped);
            if let Some(second) = self.seconds.get_mut(place.min(most)) {
                second.tokens += tokens;
            }
        }
        let mut requests = Vec::new();
        for record in measured {
            let Some(ended) = record.ended else { continue };
            let first = record.tokens.map(|(first, _)| first);
            if record.complete
                && let Some(second) = self.seconds.get_mut(second(ended).min(most))
            {
                second.answered += 1;
            }
            requests.push(Request {
                sent: since(record.sent),
                first: first.map(since),
                ended: since(ended),
                prompt: record.prompt,
                answer: record.received,
                prefill: record.prefill,
                answers: record.answers,
            });
        }
        for share in self.seconds.iter_mut().flat_map(|second| &mut second.used) {
            *share = (*share * 1e4).round() / 1e4;
        }
        let seen: Vec<Seen> = measured.iter().map(Record::seen).collect();
        let curves = Curves::of(&seen, &traffic.gaps);
        Recording { roles: self.roles, seconds: self.seconds, requests, curves }
    }
}

/// The sorted values at even steps, at most [`POINTS`].
fn curve(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let points = values.len().min(POINTS);
    let place = |point: usize| if points > 1 { point * (values.len() - 1) / (points - 1) } else { 0 };
    (0..points).map(|point| (values[place(point)] * 1e3).round() / 1e3).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_goes_from_the_least_to_the_largest() {
        assert_eq!(curve(vec![3.0, 1.0, 2.0]), [1.0, 2.0, 3.0]);
        let long = curve((0..100_000).rev().map(f64::from).collect());
        assert!(long.len() == POINTS && long.is_sorted(), "{long:?}");
        assert_eq!((long[0], long[POINTS - 1]), (0.0, 99_999.0));
        assert!(curve(Vec::new()).is_empty());
    }
}
