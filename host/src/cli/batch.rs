//! `host batch`: sends requests from a file and writes their answers to another file, in OpenAI's batch format.
//!
//! Every answer is appended when it comes. So an interrupted job continues when the command is repeated.

mod input;
mod job;
mod output;
mod request;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;

use super::Refused;
use super::server::{Address, Client};
use input::Input;
use job::Job;
use output::Output;

/// A file of requests, and where their answers go.
#[derive(Args, Debug)]
pub struct Batch {
    /// JSON Lines with the requests: custom_id, method (POST), url (/v1/chat/completions, /v1/completions or /v1/responses) and
    /// body, 50000 lines at most
    #[arg(long, value_name = "FILE")]
    input: PathBuf,

    /// JSON Lines with the answers, in the order in which they come. Where there are some already, the job goes on: requests that
    /// have an answer are not sent again
    #[arg(long, value_name = "FILE")]
    output: PathBuf,

    /// The server. HOST_API_KEY has the API key, if it needs one
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    url: String,

    /// PEM file with the authorities of an https:// server's certificate [default: those that this machine trusts]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,

    /// Requests under way at once
    #[arg(long, value_name = "REQUESTS", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1024))]
    concurrency: u16,

    /// Priority of requests whose body has none. Those of users have 0, and smaller numbers go first
    #[arg(long, value_name = "NUMBER", default_value_t = 100, allow_negative_numbers = true)]
    priority: i32,

    /// Seconds in which a request is sent again while the server is busy or does not answer
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(0..=604_800))]
    retry_timeout: u64,
}

impl Batch {
    /// Sends all requests that have no answer yet.
    ///
    /// # Errors
    /// [`Refused`] when a file or the URL is wrong. Another error when the server cannot be used, or when an
    /// answer is no success.
    pub fn run(self) -> anyhow::Result<()> {
        let client = Client::new(Address::parse(&self.url).map_err(Refused)?, self.ca.as_deref())?;
        let input = Input::check(&self.input)?;
        let (output, earlier) = Output::open(&self.output, &self.input, &input)?;
        let job = Job {
            client,
            concurrency: usize::from(self.concurrency),
            priority: self.priority,
            retry_timeout: Duration::from_secs(self.retry_timeout),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.context("no runtime for the job")?.block_on(job.run(&input, output, earlier))
    }
}
