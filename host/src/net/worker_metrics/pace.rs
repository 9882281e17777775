//! How long steps take, and what is made of it.

use host_core::histogram::Histogram;
use host_core::scheduler::Stats;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;

/// Writes the metrics of [`host_core::scheduler::PaceStats`], and the time between tokens.
pub(super) fn encode(stats: &Stats, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
    let pace = &stats.pace;
    let seconds = [
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
    ];
    for (name, help, value) in seconds {
        let gauge = ConstGauge::new(value.as_secs_f64());
        gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
    }
    let numbers = [
        ("host_decode_limit", "Requests that may decode at once for --target-itl-ms; 0 without", pace.limit),
        (
            "host_target_itl_out_of_reach",
            "1 when not even one request at a time stays under --target-itl-ms",
            u32::from(pace.out_of_reach),
        ),
    ];
    for (name, help, value) in numbers {
        let gauge = ConstGauge::new(i64::from(value));
        gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
    }
    let histograms = [
        (
            "host_step_seconds",
            "Time of a step, from the end of the one before if somebody waited",
            &pace.steps,
        ),
        ("host_between_tokens_seconds", "Time between two tokens of an answer", &stats.between_tokens),
    ];
    for (name, help, histogram) in histograms {
        encode_histogram(name, help, histogram, encoder)?;
    }
    Ok(())
}

fn encode_histogram(
    name: &str,
    help: &str,
    histogram: &Histogram,
    encoder: &mut DescriptorEncoder<'_>,
) -> Result<(), std::fmt::Error> {
    // The encoder adds the counts up.
    let buckets: Vec<(f64, u64)> = histogram.buckets().collect();
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
    metric.encode_histogram::<NoLabelSet>(histogram.sum().as_secs_f64(), histogram.count(), &buckets, None)
}
