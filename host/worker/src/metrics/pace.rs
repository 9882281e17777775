//! The series of step times, and of the limits that follow from them.

use std::fmt::Error;

use host_core::scheduler::Stats;

use super::series::Series;

/// Writes the metrics of [`host_core::scheduler::PaceStats`], and the time between tokens.
pub(super) fn encode(stats: &Stats, series: &mut Series<'_>) -> Result<(), Error> {
    let pace = &stats.pace;
    series.seconds([
        ("host_step_predicted_seconds", "What the last step was expected to take", pace.predicted),
        ("host_step_model_fixed_seconds", "Expected time of any step", pace.fixed),
        ("host_step_model_sequence_seconds", "Expected time per sequence that decodes", pace.sequence),
        (
            "host_step_model_1000_tokens_seconds",
            "Expected time per 1000 tokens of prompts and recomputation in a step",
            pace.thousand_tokens,
        ),
        (
            "host_step_model_1000_context_seconds",
            "Expected time per 1000 positions of context, over all sequences of a step",
            pace.thousand_context,
        ),
    ])?;
    series.gauges([
        ("host_decode_limit", "Requests that may decode at once for --target-itl-ms; 0 without", pace.limit),
        (
            "host_target_itl_out_of_reach",
            "1 when not even one request at a time stays under --target-itl-ms",
            u32::from(pace.out_of_reach),
        ),
    ])?;
    series.histogram(
        "host_step_seconds",
        "Time of a step, from the end of the one before if requests waited",
        &pace.steps,
    )?;
    series.histogram(
        "host_between_tokens_seconds",
        "Time between two tokens of an answer",
        &stats.between_tokens,
    )
}
