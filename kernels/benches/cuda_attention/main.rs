//! Checks attention and the other kernels of rows on a GPU, and times them. The checks show that values are right, and that no
//! bit depends on the batch.
//!
//!     NVRTC=FOLDER cargo bench -p host-kernels --bench cuda_attention
//!
//! or, on another machine than the one that built it, the program alone with `--bench`. It needs the driver and NVRTC, which
//! `NVRTC` names. First every result is compared with a plain computation on the CPU, within a bound. Results of the same rows
//! are also compared with each other, bit for bit: rows alone, in decode and in prefill, in prompts cut anywhere, in other pages
//! and in another order of the pool. The exit code is 1 if a result differs. Then come times: the best of several batches
//! between two events, over more data than the L2 cache holds. `-- check` leaves out the times.

#![allow(clippy::unwrap_used, reason = "a benchmark ends at its first error")]

mod attention;
mod pool;
mod rows;
mod speed;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use host_kernels::cuda::{Array, CudaError, Device};

/// The device, and the stream that all work is in.
struct Gpu {
    device: Arc<Device>,
    stream: Arc<CudaStream>,
}

impl Gpu {
    fn open() -> Result<Self, CudaError> {
        let nvrtc = std::env::var_os("NVRTC").map(PathBuf::from);
        let device = Device::open(0, nvrtc.as_deref())?;
        Ok(Self { stream: device.stream()?, device })
    }

    fn array<T: cudarc::driver::DeviceRepr + Copy>(&self, values: &[T]) -> Array<T> {
        let mut array = Array::new(&self.device, values.len()).unwrap();
        array.upload(&self.stream, values).unwrap();
        array
    }

    fn read<T: cudarc::driver::DeviceRepr + Copy + Default>(&self, array: &Array<T>) -> Vec<T> {
        let mut values = vec![T::default(); array.len()];
        array.download(&self.stream, &mut values).unwrap();
        values
    }
}

fn main() -> ExitCode {
    if !std::env::args().any(|argument| argument == "--bench") {
        return ExitCode::SUCCESS;
    }
    let gpu = match Gpu::open() {
        Ok(gpu) => gpu,
        Err(error) => {
            println!("{error}");
            return ExitCode::from(2);
        }
    };
    println!("{}, compute capability {}", gpu.device.context().name().unwrap(), gpu.device.capability());
    for check in [rows::check, attention::check] {
        if let Err(difference) = check(&gpu) {
            println!("{difference}");
            return ExitCode::FAILURE;
        }
    }
    if !std::env::args().any(|argument| argument == "check") {
        attention::time(&gpu);
        rows::time(&gpu);
    }
    ExitCode::SUCCESS
}
