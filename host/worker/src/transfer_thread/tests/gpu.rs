//! Pools in a GPU's memory, which the plugin reaches or does not.

use host_plugin_api::MemoryKind;

use super::staged::{STAGING, assert_received, staged_bytes};
use super::*;
use crate::CannotWork;

const PLACES: [Place; 3] = [Place::Host, Place::Gpu, Place::ReachedGpu];

fn pair_in(
    places: [Place; 2],
    from: (usize, KvOrder),
    to: (usize, KvOrder),
    modes: [StagingMode; 2],
) -> (Side, Side, Arc<Wire>) {
    let wire = Wire::new();
    let side = |role, (ranks, order), pages, mode, place| {
        Side::with_pools(&wire, role, (ranks, order, pages), (mode, STAGING), place)
    };
    let mut prefill = side("prefill", from, 7, modes[0], places[0]);
    let decode = side("decode", to, 9, modes[1], places[1]);
    prefill.fill();
    decode.links.connect(&prefill.info()).unwrap();
    prefill.links.connect(&decode.info()).unwrap();
    (prefill, decode, wire)
}

#[test]
fn pages_go_between_pools_in_any_memory_whatever_ranks_and_layouts() {
    for places in PLACES.into_iter().flat_map(|from| PLACES.map(|to| [from, to])) {
        for (ranks, orders) in [
            ((1, 1), [ORDERS[0], ORDERS[0]]),
            ((4, 2), [ORDERS[0], ORDERS[1]]),
            ((2, 3), [ORDERS[1], ORDERS[0]]),
            ((3, 16), [ORDERS[1], ORDERS[1]]),
        ] {
            for mode in [StagingMode::Auto, StagingMode::Always] {
                let (from, to) = ((ranks.0, orders[0]), (ranks.1, orders[1]));
                let (mut prefill, mut decode, _wire) = pair_in(places, from, to, [mode; 2]);
                transfer(&mut prefill, &mut decode);
                assert_received(&mut decode);
                if places.contains(&Place::Gpu) || mode == StagingMode::Always {
                    let (bytes, writes) = prefill.links.counters().direct.read();
                    assert_eq!((bytes, writes), (256, 1), "the aux row alone, {places:?} {ranks:?}");
                    assert!(staged_bytes(&prefill) > 0);
                } else if orders == [ORDERS[0]; 2] {
                    assert_eq!(staged_bytes(&prefill), 0, "{places:?} {ranks:?}");
                }
            }
        }
    }
}

#[test]
fn a_pool_on_a_gpu_is_registered_where_the_plugin_reaches_it_and_nowhere_else() {
    let kinds = |place| {
        let side =
            Side::with_pools(&Wire::new(), "decode", (1, ORDERS[0], 9), (StagingMode::Auto, STAGING), place);
        let endpoint = side.info().transfer.swap_remove(0);
        (side.nodes[0].kinds(), endpoint.kv_bytes > 0)
    };
    let dram = MemoryKind::DRAM;
    assert_eq!(kinds(Place::Host), (vec![dram, dram, dram], true));
    assert_eq!(kinds(Place::ReachedGpu), (vec![MemoryKind::VRAM, dram, dram], true));
    assert_eq!(kinds(Place::Gpu), (vec![dram, dram], false), "aux rows and staging memory");
}

#[test]
fn a_pool_that_no_plugin_and_no_staging_memory_reaches_is_refused_with_both_ways_out() {
    let open = |staging_bytes, vram| {
        let wire = Wire::new();
        let shape = KvShape {
            pages: 2,
            heads: HEADS,
            layers: LAYERS,
            page_tokens: TOKENS,
            head_dim: 2,
            value_dim: 2,
            dtype: Dtype::F32,
        };
        let pool = KvMemory::on_device(KvLayout::new(shape, ORDERS[0]), 0, &gpu_pools::device()).unwrap();
        let backend = wire.backend(&wire.node(&rank_name(DECODE, 0)));
        let opening =
            Opening { plugin: Some("wire".into()), vram, kv_heads: HEADS, aux_rows: 4, staging_bytes };
        Links::open(opening, vec![(pool, backend)]).err()
    };
    for (bytes, way) in
        [(0, "leave --staging never and --staging-bytes 0 out"), (511, "raise --staging-bytes to 512")]
    {
        let refused = open(bytes, false).unwrap();
        let said = refused.to_string();
        assert!(refused.is::<CannotWork>(), "{said}");
        assert!(said.contains("\"wire\" does not declare vram") && said.contains(way), "{said}");
        assert!(said.contains("or name a transfer plugin that declares vram"), "{said}");
        assert!(open(bytes, true).is_none());
    }
    assert!(open(512, false).is_none());
}

#[test]
fn a_peer_that_could_be_sent_nothing_is_not_connected() {
    let wire = Wire::new();
    let side =
        |role, mode, bytes, place| Side::with_pools(&wire, role, (1, ORDERS[0], 9), (mode, bytes), place);
    let gpu = side("prefill", StagingMode::Auto, STAGING, Place::Gpu);
    let unstaged = side("decode", StagingMode::Never, 0, Place::Host);
    let refused = gpu.links.connect(&unstaged.info()).unwrap_err();
    assert!(refused.contains("does not reach the KV pool of this worker"), "{refused}");
    assert!(
        refused.contains("4096 bytes here and 0 there") && refused.contains("needs 512 on both"),
        "{refused}"
    );
    let refused = unstaged.links.connect(&gpu.info()).unwrap_err();
    assert!(refused.contains("does not reach the KV pool of prefill"), "{refused}");
}

#[test]
fn a_byte_that_changes_on_a_gpu_shows() {
    let places = [Place::Gpu, Place::Gpu];
    let (mut prefill, mut decode, _wire) =
        pair_in(places, (2, ORDERS[0]), (1, ORDERS[1]), [StagingMode::Auto; 2]);
    transfer(&mut prefill, &mut decode);
    gpu_pools::change(&mut decode.pools[0], |kv| kv.write_row(PageId(EXPECTED[3]), 6, 1, 1, 2)[3] ^= 4);
    let found = decode.verify(1, &EXPECTED).lanes.unwrap();
    let damaged: Vec<u8> =
        found.iter().filter(|lane| lane.sent != lane.found).map(|lane| lane.source as u8).collect();
    assert_eq!(damaged, [1]);
}
