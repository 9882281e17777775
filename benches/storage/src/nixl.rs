//! NIXL's POSIX plugin, through the storage tier of `plugins/nixl`: with a checksum, one file for each page, published by a
//! rename.

use host_plugin_api::{Opening, StorageTier};

use crate::ways::{Bench, Measured, forget, measure, sync};

pub fn both(bench: &Bench, direct: bool) -> [Measured; 2] {
    let dir = bench.dir.join("nixl");
    let config = format!("[storage]\ndirectory = {:?}\ndirect = {direct}\n", dir.display().to_string());
    let open = || {
        let tier = host_plugin_nixl::open_storage(&Opening { name: "bench".into(), config: config.clone() });
        let tier = tier.unwrap_or_else(|e| panic!("{e}"));
        let region = bench.register(&tier);
        (tier, region)
    };
    let write = measure(|| {
        let (tier, region) = open();
        bench.through(&tier, region, |tag, pages| tier.put(tag, pages));
        tier.shutdown(60_000).unwrap();
        sync(&bench.dir);
    });
    forget(&dir);
    let (tier, region) = open();
    let read = measure(|| bench.through(&tier, region, |tag, pages| tier.get(tag, pages)));
    drop(tier);
    std::fs::remove_dir_all(dir).unwrap();
    [write, read]
}
