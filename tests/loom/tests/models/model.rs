//! How the models are run.

/// Most times that a thread is stopped where it need not be: what three such stops do not show, no model here has shown so far.
/// `LOOM_MAX_PREEMPTIONS` is another number, as `cargo xtask nightly loom` sets it.
const PREEMPTIONS: usize = 3;

/// Runs a model in every order of its threads' steps, and with every value that a load may find.
pub fn every_order(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(PREEMPTIONS));
    builder.max_branches = builder.max_branches.max(10_000);
    builder.check(model);
}
