//! Several plugins in one program, linked instead of loaded: their exports must not clash.

use host_plugin_api::{Opening, TransferBackend};

#[test]
fn three_plugins_are_linked_and_opened_directly() {
    let opening = Opening { name: "linked".into(), config: String::new() };
    let backends: [Box<dyn TransferBackend>; 3] = [
        Box::new(host_plugin_null::open(&opening).unwrap()),
        Box::new(host_plugin_shm::open(&opening).unwrap()),
        Box::new(host_plugin_corrupting::open(&opening).unwrap()),
    ];
    assert!(backends.iter().all(|backend| backend.limits().max_writes > 0));
}
