//! Settings of the GPU for `--executor cuda`.

use std::path::PathBuf;

use host_executor::cuda::{CudaMath, CudaOptions};
use host_executor::memory;

use super::{Refused, refused};
use crate::cli::settings::{CudaMathName, ExecutorName, Settings};

/// The environment variable with the path of NVIDIA's run-time compiler. `--nvrtc` takes precedence.
const NVRTC: &str = "NVRTC";

/// Checks that the GPU exists. With another executor, checks that no settings of a GPU are given.
///
/// # Errors
/// When there is no such GPU or no driver for it, or when settings have no effect.
pub(super) fn check(settings: &Settings) -> Result<(), Refused> {
    if settings.executor() == ExecutorName::Cuda {
        return bytes(settings).map(drop);
    }
    let set = [
        ("--cuda-device", settings.cuda_device.is_some()),
        ("--nvrtc", settings.nvrtc.is_some()),
        ("--cuda-math", settings.cuda_math.is_some()),
    ];
    match set.iter().find(|(_, set)| *set) {
        Some((flag, _)) => {
            Err(refused(format!("{flag} says nothing without --executor cuda: leave it out, or give both")))
        }
        None => Ok(()),
    }
}

/// Options of the executor on the GPU.
pub(super) fn options(settings: &Settings) -> CudaOptions {
    let variable = || std::env::var_os(NVRTC).filter(|path| !path.is_empty()).map(PathBuf::from);
    let math = match settings.cuda_math.unwrap_or_default() {
        CudaMathName::Auto => CudaMath::Auto,
        CudaMathName::Exact => CudaMath::Exact,
        CudaMathName::Tensor => CudaMath::Tensor,
    };
    // All workers of this command use the same way of computing, so that they can exchange pages.
    let ranks = [settings.tp, settings.prefill_tp, settings.decode_tp].into_iter().flatten().max();
    CudaOptions {
        device: device(settings),
        nvrtc: settings.nvrtc.clone().or_else(variable),
        math,
        ranks: ranks.unwrap_or(1) as usize,
    }
}

/// Size of the GPU's memory, in bytes.
///
/// # Errors
/// When there is no such GPU, or no driver for it.
pub fn bytes(settings: &Settings) -> Result<u64, Refused> {
    let wrong = |error| {
        refused(format!(
            "--executor cuda cannot work here: {error} (--cuda-device names the GPU, --nvrtc the compiler)"
        ))
    };
    memory::bytes_of_device(device(settings)).map_err(wrong)
}

fn device(settings: &Settings) -> usize {
    // No machine has so many GPUs.
    usize::try_from(settings.cuda_device()).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use host_executor::cuda::TENSOR_MATH;

    use super::*;

    #[test]
    fn settings_of_a_gpu_that_is_not_used_are_refused() {
        let synthetic = Settings { executor: Some(ExecutorName::Synthetic), ..Settings::default() };
        assert!(check(&synthetic).is_ok() && check(&Settings::default()).is_ok());
        for (flag, settings) in [
            ("--cuda-device", Settings { cuda_device: Some(0), ..Settings::default() }),
            ("--nvrtc", Settings { nvrtc: Some("/opt".into()), ..synthetic.clone() }),
            ("--cuda-math", Settings { cuda_math: Some(CudaMathName::Exact), ..synthetic }),
        ] {
            let said = check(&settings).unwrap_err().to_string();
            assert!(said.contains(flag) && said.contains("--executor cuda"), "{said}");
        }
    }

    #[test]
    fn steps_of_prompts_are_longer_on_tensor_cores_unless_the_operator_limits_them() {
        let given = Settings { chunk_tokens: Some(64), ..Settings::default() };
        for (math, own) in [(TENSOR_MATH, 2048), ("cpu-1", 512)] {
            assert_eq!(
                (Settings::default().chunk_tokens(math), given.chunk_tokens(math)),
                (own, 64),
                "{math}"
            );
        }
    }

    #[test]
    fn the_flag_names_the_compiler_before_the_variable() {
        let settings =
            Settings { nvrtc: Some("/opt/nvrtc".into()), cuda_device: Some(3), ..Settings::default() };
        let options = options(&settings);
        assert_eq!((options.device, options.nvrtc), (3, Some("/opt/nvrtc".into())));
    }
}
