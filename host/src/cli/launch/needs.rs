//! Adds up the memory that workers will take on this machine and on its GPU, before they take it.

use host_core::KvLayout;
use host_core::hierarchy::HierarchyConfig;
use host_worker::StagingSettings;

use super::super::memory;
use super::super::settings::{ExecutorName, Settings};
use super::{Refused, gpu, refused, share};

/// Memory that all workers of this machine take, in bytes.
#[derive(Debug, Default)]
pub(super) struct Needs {
    workers: usize,
    pools: u64,
    offload: u64,
    staging: u64,
}

impl Needs {
    /// Adds a worker: its ranks' pools, its host memory for pages, and its staging memory.
    pub(super) fn add(
        &mut self,
        layouts: &[KvLayout],
        offload: Option<&HierarchyConfig>,
        staging: Option<&StagingSettings>,
    ) {
        let product = |count: usize, bytes: usize| (count as u64).saturating_mul(bytes as u64);
        let pools = layouts.iter().map(|layout| product(layout.shape.pages, layout.shape.page_bytes()));
        let offload = offload.map(|offload| u64::from(offload.host_slots).saturating_mul(offload.page_bytes));
        let staging = staging.map(|staging| product(layouts.len(), staging.bytes_of_rank(layouts.len())));
        self.workers += 1;
        self.pools = pools.fold(self.pools, u64::saturating_add);
        self.offload = self.offload.saturating_add(offload.unwrap_or_default());
        self.staging = self.staging.saturating_add(staging.unwrap_or_default());
    }

    /// Compares the sum with the memory of the machine and of its GPU.
    ///
    /// # Errors
    /// When there is less memory. The error says which settings ask for how much.
    pub(super) fn check(&self, settings: &Settings) -> Result<(), Refused> {
        if settings.executor() == ExecutorName::Cuda {
            self.check_gpu(settings, gpu::bytes(settings)?)?;
        }
        match memory::available() {
            Some(available) => self.check_against(settings, available),
            None => Ok(()),
        }
    }

    fn check_gpu(&self, settings: &Settings, has: u64) -> Result<(), Refused> {
        if self.pools <= has {
            return Ok(());
        }
        Err(refused(format!(
            "the settings ask for {} bytes of KV pages ({}) in {} workers on GPU {}, which has {has}: lower it, and leave room for the \
             weights",
            self.pools,
            pool_flag(settings),
            self.workers,
            settings.cuda_device()
        )))
    }

    fn check_against(&self, settings: &Settings, available: u64) -> Result<(), Refused> {
        let pools = share::pool_of_machine(settings, self.pools);
        let parts = [
            (pools, "of KV pages", pool_flag(settings)),
            (self.offload, "of host memory for pages", "--hicache-memory"),
            (self.staging, "to pack pages in", "--staging-bytes"),
        ];
        let needed = parts.iter().fold(0u64, |sum, (bytes, _, _)| sum.saturating_add(*bytes));
        if needed <= available {
            return Ok(());
        }
        let said = parts.iter().filter(|(bytes, _, _)| *bytes > 0);
        let said: Vec<String> =
            said.map(|(bytes, what, flag)| format!("{bytes} bytes {what} ({flag})")).collect();
        Err(refused(format!(
            "the settings ask for {needed} bytes of memory in {} workers on this machine, which has {available}: {}; lower one",
            self.workers,
            said.join(", ")
        )))
    }
}

/// The flag that sets the size of a pool.
fn pool_flag(settings: &Settings) -> &'static str {
    if settings.pool_pages.is_some() { "--pool-pages" } else { "--kv-memory" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host_core::layout::{Dtype, KvOrder, KvShape};

    #[test]
    fn what_fits_alone_is_refused_when_the_sum_does_not() {
        let shape = KvShape {
            pages: 10,
            heads: 1,
            layers: 1,
            page_tokens: 1,
            head_dim: 25,
            value_dim: 25,
            dtype: Dtype::Bf16,
        };
        // Each of two ranks has a pool of 1000 bytes.
        let layouts = [KvLayout::new(shape, KvOrder::PageHeadLayerKvTokenDim); 2];
        let offload = HierarchyConfig::new(15, 200, Vec::new());
        let staging = StagingSettings { bytes: 700, ..StagingSettings::default() };
        let settings = Settings { pool_pages: Some(10), ..Settings::default() };
        let mut needs = Needs::default();
        needs.add(&layouts, Some(&offload), Some(&staging));
        assert!(needs.check_against(&settings, 5_700).is_ok());
        let refused = needs.check_against(&settings, 5_699).unwrap_err().to_string();
        for part in ["5700 bytes", "1 workers", "2000 bytes of KV pages (--pool-pages)", "3000", "700"] {
            assert!(refused.contains(part), "{refused}");
        }
        // Two more workers without offload tiers, one of them without staging memory.
        needs.add(&layouts, None, Some(&staging));
        needs.add(&layouts, None, None);
        let refused = needs.check_against(&settings, 10_399).unwrap_err().to_string();
        assert!(refused.contains("10400 bytes") && refused.contains("3 workers"), "{refused}");
        assert!(needs.check_against(&settings, 10_400).is_ok());
    }
}
