//! How the models are run.

/// Most preemptions of threads in one run of a model. So far, no model here has found an error with more of them that it did not
/// find with three. `LOOM_MAX_PREEMPTIONS` sets another limit, as `cargo xtask nightly loom` does.
const PREEMPTIONS: usize = 3;

/// Runs a model in every order of its threads' steps, and with every value that a load may return.
pub fn every_order(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(PREEMPTIONS));
    builder.max_branches = builder.max_branches.max(10_000);
    builder.check(model);
}
