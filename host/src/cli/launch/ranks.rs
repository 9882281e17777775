//! Tensor-parallel ranks: how many each worker has, and their executors.

use std::path::Path;
use std::thread;

use host_executor::Executor;
use host_executor::cpu::{CpuExecutor, CpuOptions};
use host_executor::cuda::CudaExecutor;
use host_executor::group::{Seat, seats};
use host_executor::model;

use super::super::Refused;
use super::super::settings::{ExecutorName, RoleName, Settings};
use super::model::synthetic;
use super::{gpu, refused};

/// Limit of the ranks of a worker.
const MOST_RANKS: u32 = 64;

/// Checks the numbers of ranks.
pub(super) fn check_bounds(settings: &Settings) -> Result<(), Refused> {
    let Settings { tp, prefill_tp, decode_tp, .. } = *settings;
    for (flag, ranks) in [("--tp", tp), ("--prefill-tp", prefill_tp), ("--decode-tp", decode_tp)] {
        if let Some(ranks) = ranks.filter(|ranks| !(1..=MOST_RANKS).contains(ranks)) {
            return Err(refused(format!("{flag} is {ranks}: it must be 1 to {MOST_RANKS}")));
        }
    }
    Ok(())
}

/// The ranks of each worker that this command starts.
pub(super) fn of_workers(settings: &Settings) -> Result<Vec<usize>, Refused> {
    check_bounds(settings)?;
    let Settings { tp, prefill_tp, decode_tp, .. } = *settings;
    let (prefill, decode) = (("--prefill-tp", prefill_tp), ("--decode-tp", decode_tp));
    let workers = match settings.role {
        None => vec![prefill, decode],
        Some(RoleName::Prefill) => vec![prefill],
        Some(RoleName::Decode) => vec![decode],
        Some(RoleName::Aggregated | RoleName::Router) => vec![("--tp", None)],
    };
    if settings.role == Some(RoleName::Aggregated)
        && let Some((flag, _)) = [prefill, decode].iter().find(|(_, ranks)| ranks.is_some())
    {
        return Err(refused(format!(
            "{flag} is for prefill or decode workers: use --tp for an aggregated one"
        )));
    }
    let heads = match settings.model.as_deref().filter(|_| settings.executor().computes_a_model()) {
        Some(model) => Some(query_heads(model)?),
        None => None,
    };
    let ranks = |(flag, own): (&str, Option<u32>)| {
        let flag = if own.is_some() { flag } else { "--tp" };
        let ranks = own.or(tp).unwrap_or(1) as usize;
        match heads {
            Some(heads) if ranks > heads => Err(refused(format!(
                "{flag} is {ranks}, and the model has {heads} query heads to share out: use at most {heads}"
            ))),
            _ => Ok(ranks),
        }
    };
    workers.into_iter().map(ranks).collect()
}

fn query_heads(directory: &Path) -> Result<usize, Refused> {
    model::read_query_heads(directory)
        .map_err(|error| refused(format!("the model cannot be served: {error}")))
}

/// Loads the executors of a worker. The ranks load their parts of the model at the same time.
pub(super) fn executors(settings: &Settings, ranks: usize) -> anyhow::Result<Vec<Box<dyn Executor>>> {
    thread::scope(|scope| {
        let load = |seat| scope.spawn(move || executor(settings, seat));
        let threads: Vec<_> = seats(ranks).into_iter().map(load).collect();
        let loaded = threads.into_iter().map(|thread| {
            let loaded = thread.join().map_err(|_panic| anyhow::anyhow!("loading the model panicked"))?;
            Ok(loaded?)
        });
        loaded.collect()
    })
}

fn executor(settings: &Settings, seat: Seat) -> Result<Box<dyn Executor>, Refused> {
    match (settings.executor(), &settings.model) {
        (ExecutorName::Cpu, Some(directory)) => {
            let threads = threads(settings.threads, seat.ranks(), seat.rank());
            let options = CpuOptions { threads, ..CpuOptions::default() };
            Ok(Box::new(CpuExecutor::load_rank(directory, options, seat).map_err(not_loaded)?))
        }
        (ExecutorName::Cuda, Some(model)) => {
            let options = gpu::options(settings);
            Ok(Box::new(CudaExecutor::load_rank(model, &options, seat).map_err(not_loaded)?))
        }
        _ => Ok(Box::new(synthetic(settings, seat).map_err(|error| refused(error.to_string()))?)),
    }
}

fn not_loaded(error: impl std::fmt::Display) -> Refused {
    refused(format!("the model cannot be loaded: {error}"))
}

/// A rank's part of a worker's threads, at least one. A worker has `wanted` threads, by default one for each core.
fn threads(wanted: Option<usize>, ranks: usize, rank: usize) -> usize {
    let all = wanted.unwrap_or_else(|| thread::available_parallelism().map_or(1, std::num::NonZero::get));
    (all * (rank + 1) / ranks - all * rank / ranks).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_shared_out_and_no_rank_is_left_without() {
        let shares = |all, ranks| (0..ranks).map(|rank| threads(Some(all), ranks, rank)).collect::<Vec<_>>();
        assert_eq!(shares(8, 1), [8]);
        assert_eq!(shares(8, 3), [2, 3, 3]);
        assert_eq!(shares(2, 4), [1, 1, 1, 1]);
    }

    #[test]
    fn a_workers_own_number_of_ranks_wins_over_the_common_one() {
        let settings = |role, tp, prefill_tp, decode_tp| Settings {
            executor: Some(ExecutorName::Synthetic),
            role,
            tp,
            prefill_tp,
            decode_tp,
            ..Settings::default()
        };
        assert_eq!(of_workers(&settings(None, None, None, None)).unwrap(), [1, 1]);
        assert_eq!(of_workers(&settings(None, Some(2), None, None)).unwrap(), [2, 2]);
        assert_eq!(of_workers(&settings(None, Some(2), Some(4), None)).unwrap(), [4, 2]);
        assert_eq!(of_workers(&settings(None, None, None, Some(3))).unwrap(), [1, 3]);
        let own = |role| of_workers(&settings(Some(role), Some(2), Some(4), Some(8))).unwrap();
        assert_eq!((own(RoleName::Prefill), own(RoleName::Decode)), (vec![4], vec![8]));
        assert_eq!(of_workers(&settings(Some(RoleName::Aggregated), Some(3), None, None)).unwrap(), [3]);
    }
}
