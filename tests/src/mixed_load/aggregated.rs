//! One aggregated worker without caches, whose answers are the right ones.

use std::path::Path;

use super::{Answer, Job, Manner, Outcome, ask};
use crate::cluster::{Cluster, Start};

/// An aggregated worker that runs, and requests with its answers.
pub struct Aggregated {
    cluster: Cluster,
    jobs: Vec<Job>,
}

impl Aggregated {
    /// Starts it with these flags, and adds the right answers to all requests with a seed.
    ///
    /// # Panics
    /// When it does not answer.
    #[must_use]
    pub fn start(program: &Path, flags: &[String], jobs: Vec<Job>) -> Self {
        let role = ["--role", "aggregated", "--pool-pages", "512"].map(str::to_owned);
        let flags = role.into_iter().chain(flags.iter().cloned()).collect();
        let start = Start { program, flags, config: String::new(), workers: 1 };
        let mut aggregated = Self { cluster: Cluster::start(&start), jobs: Vec::new() };
        let with_right = |mut job: Job| {
            if !job.is_unseeded {
                job.right = Some(aggregated.answer(&job).expect("an answer of the aggregated worker"));
            }
            job
        };
        let jobs = jobs.into_iter().map(with_right).collect();
        aggregated.jobs = jobs;
        aggregated
    }

    /// The requests, with their answers.
    #[must_use]
    pub fn jobs(&self) -> &[Job] {
        &self.jobs
    }

    /// The right answer of a request.
    fn answer(&self, job: &Job) -> Result<Answer, String> {
        match ask(&self.cluster.url, job, Manner::Whole) {
            Outcome::Answer(answer) if answer.is_over_like(&answer) => Ok(answer),
            other => Err(format!("the aggregated worker does not answer a request {}: {other:?}", job.kind)),
        }
    }

    /// Describes the first difference of an answer from the right one, or, if the client left, of its beginning.
    #[must_use]
    pub fn difference(&self, job: &Job, outcome: &Outcome) -> Option<String> {
        let (answer, whole) = match outcome {
            Outcome::Answer(answer) => (answer, true),
            Outcome::Left(answer) => (answer, false),
            Outcome::Broken(_) | Outcome::Refused(_) => return None,
        };
        if let Some(right) = &job.right {
            return answer.difference(right, whole);
        }
        let Some(seed) = answer.seed else { return Some("it does not tell its seed".to_owned()) };
        match self.answer(&job.seeded(seed)) {
            Ok(right) => answer.difference(&right, whole),
            Err(why) => Some(why),
        }
    }
}
