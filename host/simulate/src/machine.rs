//! What machines can do.
//!
//! Peaks are the makers' data sheets (dense, without sparsity). Efficiencies are the shares of a peak that serving
//! reaches. They are assumptions that a cluster file may replace by measurements.

use serde::{Deserialize, Serialize};

/// One device that computes, or for a CPU one machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Operations per second with 16-bit weights.
    pub flops: f64,
    /// Bytes per second at which its memory is read.
    pub bandwidth: f64,
    /// Bytes of memory.
    pub memory: f64,
    /// Bytes per second between its memory and the host's, each direction.
    pub host_bandwidth: f64,
    /// The share of `flops` that prompts reach.
    #[serde(default = "half")]
    pub compute_efficiency: f64,
    /// The share of `bandwidth` that steps reach.
    #[serde(default = "most")]
    pub bandwidth_efficiency: f64,
    /// Seconds that every step takes beside the work of the model: launching it, sampling, deciding on the next one.
    #[serde(default = "five_milliseconds")]
    pub step_seconds: f64,
}

fn half() -> f64 {
    0.5
}

fn most() -> f64 {
    0.7
}

fn five_milliseconds() -> f64 {
    0.005
}

const fn gpu(teraflops: f64, terabytes_per_second: f64, gigabytes: f64, host: f64) -> Machine {
    Machine {
        flops: teraflops * 1e12,
        bandwidth: terabytes_per_second * 1e12,
        memory: gigabytes * 1e9,
        host_bandwidth: host * 1e9,
        compute_efficiency: 0.5,
        bandwidth_efficiency: 0.7,
        step_seconds: 0.005,
    }
}

impl Machine {
    /// Machines by name. `cpu-2` is two cores with AVX2: SmolLM2-135M with F32 weights computes 680 prompt tokens and 37 tokens of
    /// an answer per second there (`docs/benchmarks.md`), from which its two rates follow.
    pub const PRESETS: [(&'static str, Machine); 4] = [
        ("b200", gpu(2250.0, 8.0, 180.0, 50.0)),
        ("h100", gpu(989.0, 3.35, 80.0, 50.0)),
        ("h200", gpu(989.0, 4.8, 141.0, 50.0)),
        (
            "cpu-2",
            Machine {
                flops: 0.19e12,
                bandwidth: 20e9,
                memory: 8e9,
                host_bandwidth: 8e9,
                compute_efficiency: 1.0,
                bandwidth_efficiency: 1.0,
                step_seconds: 0.000_1,
            },
        ),
    ];
}
