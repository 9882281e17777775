//! Without NVIDIA's driver, opening a device returns an error, and the program goes on.

#![allow(clippy::expect_used, reason = "what fails here is the test")]

use host_kernels::cuda::{CudaError, Device};
use host_tests::skip::skipped;

#[test]
fn a_machine_without_a_driver_says_so() {
    match Device::open(0, None) {
        Err(error @ CudaError::NoDriver) => {
            assert!(error.to_string().starts_with("no CUDA driver: "), "{error}");
        }
        other => {
            let found = other.err().map_or("it works".to_owned(), |error| error.to_string());
            skipped(&format!("the error without a CUDA driver: there is one here, and {found}"));
        }
    }
}
