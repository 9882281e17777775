//! Checks that plugins can move and store a model's pages. `host plugins check` and a worker that starts run the same
//! check.

use std::ptr::NonNull;
use std::sync::Arc;

use host_core::layout::KvShape;
use host_memory::{Mapping, SharedMemory};
use host_plugin_api::{Address, Error, Memory, MemoryKind, StorageTier, TierLimits, TransferBackend};
use rustix::fd::AsRawFd;

use super::OffloadTiers;
use super::cannot_work::{CannotWork, not_registered};
use super::tier_thread::value_bytes;

/// Bytes of the memory with which a transfer plugin is tried.
const TRIED_BYTES: usize = 64 << 10;
/// The largest alignment that a tier may ask for. One head of a page is seldom as long.
const LARGEST_ALIGNMENT: u64 = 64 << 20;

impl OffloadTiers {
    /// Checks that every tier takes the values of a model whose pages have this shape.
    ///
    /// # Errors
    /// With one sentence for each tier that does not.
    pub fn fit(&self, shape: &KvShape) -> Result<(), CannotWork> {
        let limits = |(name, tier): &(String, Arc<dyn StorageTier>)| (name.clone(), tier.limits());
        let all: Vec<(String, TierLimits)> = self.tiers.iter().map(limits).collect();
        let most = all.iter().map(|(_, limits)| limits.alignment).max().unwrap_or(1);
        let wrong = all.iter().filter_map(|(name, limits)| values(name, limits, shape, most).err());
        let wrong: Vec<String> = wrong.map(|CannotWork(text)| text).collect();
        if wrong.is_empty() { Ok(()) } else { Err(CannotWork(wrong.join("\n"))) }
    }

    /// Checks that every tier [fits](Self::fit), and takes a small piece of memory as a worker registers it.
    ///
    /// # Errors
    /// With a sentence for what does not work.
    pub fn try_out(&self, shape: &KvShape) -> anyhow::Result<()> {
        self.fit(shape)?;
        let alignment = self.alignment().map(usize::try_from).transpose()?;
        for (name, tier) in &self.tiers {
            let memory = Mapping::private(value_bytes(shape, alignment.unwrap_or(1)))?;
            let region = tier
                .register(&offered(memory.address(), memory.bytes(), -1))
                .map_err(|error| not_registered(name, "host memory", MemoryKind::DRAM, &error))?;
            give_back(name, tier.deregister(region), memory)?;
        }
        Ok(())
    }
}

/// Checks that a transfer plugin takes a small piece of memory as a worker registers it, and offers an endpoint.
///
/// # Errors
/// With a sentence for what does not work.
pub fn try_out_transfer(name: &str, backend: &dyn TransferBackend) -> anyhow::Result<()> {
    let memory = SharedMemory::new("host-check", TRIED_BYTES)?;
    let region = backend
        .register(&offered(memory.address(), memory.bytes(), memory.fd().as_raw_fd()))
        .map_err(|error| not_registered(name, "KV pool", MemoryKind::DRAM, &error))?;
    let endpoint = backend.endpoint();
    let given_back = give_back(name, backend.deregister(region), memory);
    // This error comes first, because a plugin that has panicked does not give memory back either.
    endpoint.map_err(|error| no_endpoint(name, &error))?;
    given_back
}

fn offered(address: NonNull<u8>, bytes: usize, fd: i32) -> Memory {
    Memory {
        address: Address::of(address.as_ptr()),
        length: bytes as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd,
        generation: 1,
        fd_offset: 0,
    }
}

fn give_back<M>(name: &str, ended: host_plugin_api::Result<()>, memory: M) -> anyhow::Result<()> {
    ended.map_err(|error| {
        // The plugin may still access the memory, so it is never freed.
        std::mem::forget(memory);
        anyhow::anyhow!("plugin {name:?} did not give memory back (deregister): {error}")
    })
}

/// The error for a transfer plugin without an endpoint, to which peers could not connect.
pub(crate) fn no_endpoint(plugin: &str, error: &Error) -> anyhow::Error {
    anyhow::anyhow!("plugin {plugin:?} offers no endpoint: {error}")
}

/// Checks that a tier takes one KV head of one page with its seal. Tiers of a worker share values, whose length is a multiple of
/// the largest `alignment` of all.
pub(crate) fn values(
    name: &str,
    limits: &TierLimits,
    shape: &KvShape,
    alignment: u64,
) -> Result<(), CannotWork> {
    let wrong = |text: String| Err(CannotWork(format!("plugin {name:?} {text}")));
    if limits.max_pages == 0 || limits.max_batches == 0 {
        return wrong(format!(
            "takes no batches: it says that at most {} batches of {} pages are under way; its limits are a defect of the plugin",
            limits.max_batches, limits.max_pages
        ));
    }
    if limits.alignment == 0 || limits.alignment > LARGEST_ALIGNMENT {
        return wrong(format!(
            "stores multiples of {} bytes: 1 to {LARGEST_ALIGNMENT} work; name another tier with --hicache-storage",
            limits.alignment
        ));
    }
    let step = usize::try_from(alignment.min(LARGEST_ALIGNMENT)).unwrap_or(1);
    let of = |page_tokens| value_bytes(&KvShape { page_tokens, ..*shape }, step) as u64;
    let (bytes, most) = (of(shape.page_tokens), limits.max_value.min(u32::MAX.into()));
    if bytes > most {
        let smaller = (1..shape.page_tokens).rev().find(|tokens| of(*tokens) <= most);
        let way_out = smaller.map_or_else(
            || "no --page-size is small enough".to_owned(),
            |tokens| format!("--page-size {tokens} has {} bytes and fits", of(tokens)),
        );
        return wrong(format!(
            "stores values of at most {most} bytes, and this model's have {bytes} (one KV head of a page of {} tokens, and its \
             seal): {way_out}; or raise the limit, if the plugin has a setting for it, or name another tier with --hicache-storage",
            shape.page_tokens
        ));
    }
    if !bytes.is_multiple_of(limits.alignment) {
        return wrong(format!(
            "stores multiples of {} bytes, and another tier of {alignment}: values of {bytes} bytes, which go to both, do not \
             fit; leave one of the tiers out",
            limits.alignment
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use host_core::Dtype;

    use super::*;

    /// A model whose head of a page has 1 KiB for each token.
    const SHAPE: KvShape = KvShape {
        pages: 4,
        heads: 2,
        layers: 8,
        page_tokens: 16,
        head_dim: 32,
        value_dim: 32,
        dtype: Dtype::Bf16,
    };

    fn limits(max_value: u64, alignment: u64) -> TierLimits {
        TierLimits { max_pages: 4, max_batches: 2, max_value, alignment, reserved: [0; 4] }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_numbers_and_the_page_size_that_does() {
        assert_eq!(values("disk", &limits(17 << 10, 1), &SHAPE, 1), Ok(()));
        let CannotWork(said) = values("disk", &limits(9 << 10, 1), &SHAPE, 1).unwrap_err();
        assert!(said.contains("plugin \"disk\" stores values of at most 9216 bytes"), "{said}");
        assert!(said.contains("have 17408 (one KV head of a page of 16 tokens"), "{said}");
        assert!(said.contains("--page-size 8 has 8704 bytes and fits"), "{said}");
        let CannotWork(said) = values("disk", &limits(100, 1), &SHAPE, 1).unwrap_err();
        assert!(said.contains("no --page-size is small enough"), "{said}");
    }

    #[test]
    fn alignments_that_no_value_has_are_refused() {
        assert_eq!(values("disk", &limits(1 << 20, 4096), &SHAPE, 4096), Ok(()));
        for (alignment, most, says) in [
            (0, 1, "stores multiples of 0 bytes: 1 to"),
            (u64::MAX, u64::MAX, "stores multiples of 18446744073709551615 bytes: 1 to"),
            (3000, 4096, "stores multiples of 3000 bytes, and another tier of 4096"),
        ] {
            let CannotWork(said) = values("disk", &limits(1 << 20, alignment), &SHAPE, most).unwrap_err();
            assert!(said.contains(says), "{said}");
        }
        let none = TierLimits { max_batches: 0, ..limits(1 << 20, 1) };
        let CannotWork(said) = values("disk", &none, &SHAPE, 1).unwrap_err();
        assert!(said.contains("at most 0 batches of 4 pages"), "{said}");
    }
}
