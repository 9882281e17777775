//! A plugin that panics when it is given something.

use super::*;

#[test]
fn a_write_that_panicked_never_settles_and_the_thread_ends() {
    let (mut prefill, _decode, wire) = pair((1, ORDERS[0]), (1, ORDERS[0]));
    let session = prefill.links.get(DECODE).unwrap().session;
    wire.panic(&rank_name(PREFILL, 0));
    parts(session).into_iter().for_each(|part| prefill.write(part));
    // The thread has the only sender, so the channel closes when the thread ends.
    let told = prefill.inputs.blocking_recv();
    assert!(told.is_none(), "its pages may still be read, so nothing is said of them: {told:?}");
}
