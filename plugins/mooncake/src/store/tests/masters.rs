//! Masters that are not there, or do not answer.

use crate::store::master::tests::port;

use super::*;

#[test]
fn without_a_master_nothing_is_called_until_it_answers_again() {
    let rig = rig("", NEVER);
    assert_eq!(rig.put(0..1), [STORED]);
    rig.world.master_is_gone.store(true, Ordering::SeqCst);
    let lost = ErrorCode::PEER_LOST.0;
    assert_eq!(rig.get(0..4), [lost; 4]);
    // From here on only the probe is sent.
    let calls = rig.calls();
    for _ in 0..50 {
        assert_eq!((rig.get(0..1), rig.put(0..1), rig.exist(0..1)), (vec![lost], vec![lost], vec![lost]));
    }
    assert_eq!(rig.calls(), calls);
    locked(&rig.world.values).clear();
    rig.world.master_is_gone.store(false, Ordering::SeqCst);
    rig.wait("the link", || (rig.exist(0..1) == [MISSING]).then_some(()));
    assert_eq!(rig.put(0..1), [STORED]);
    let counts = [&rig.world.connected, &rig.world.closed].map(|count| count.load(Ordering::SeqCst));
    assert_eq!(counts, [1, 0], "the client comes back by itself");
}

#[test]
fn without_a_master_opening_fails_with_its_address_and_mooncake_is_not_called() {
    let (_held, address) = port();
    let address = address.to_string();
    let world = Arc::new(World::default());
    let table = format!("master_server_address = \"{address}\"\nmaster_timeout_ms = 60000\n");
    let config = Config::parse(&table).unwrap();
    let library = FakeLibrary(world.clone());
    let error = MooncakeTier::start(&config, Box::new(|| Ok(Box::new(library))), NEVER).err().unwrap();
    assert_eq!(error.code, ErrorCode::IO);
    assert!(error.message.contains(&address) && error.message.contains("start mooncake_master"), "{error}");
    assert_eq!(world.connected.load(Ordering::SeqCst), 0);
}

#[test]
fn a_tier_that_needs_no_master_at_its_start_finds_one_later() {
    let (socket, address) = port();
    let world = Arc::new(World::default());
    let keys = "master_timeout_ms = 20\nstore_deadline_ms = 600000\nstart_without_master = true\n";
    let table = format!("master_server_address = \"{address}\"\n{keys}");
    let library = FakeLibrary(world.clone());
    let find = Box::new(|| Ok(Box::new(library) as Box<dyn Library>));
    let tier = Arc::new(MooncakeTier::start(&Config::parse(&table).unwrap(), find, NEVER).unwrap());
    let rig = Rig { region: RegionId(0), world, tier, memory: &mut [], master: Master::default(), address };
    assert_eq!(rig.exist(0..2), [ErrorCode::PEER_LOST.0; 2]);
    rustix::net::listen(&socket, 16).unwrap();
    rig.master.serve(TcpListener::from(socket));
    rig.wait("a client", || (rig.exist(0..1) == [MISSING]).then_some(()));
}

#[test]
fn a_master_that_takes_connections_and_never_answers_is_an_error_before_mooncake_is_called() {
    let (master, listener) = (Master::default(), TcpListener::bind("127.0.0.1:0").unwrap());
    let address = listener.local_addr().unwrap();
    master.is_stopped.store(true, Ordering::SeqCst);
    master.serve(listener);
    let world = Arc::new(World::default());
    let table = format!("master_server_address = \"{address}\"\nmaster_timeout_ms = 20\n");
    let start = |more: &str| {
        let library = FakeLibrary(world.clone());
        let config = Config::parse(&format!("{table}{more}")).unwrap();
        MooncakeTier::start(&config, Box::new(|| Ok(Box::new(library))), NEVER)
    };
    let error = start("").err().unwrap();
    let says = |part: &str| error.message.contains(part);
    assert!(
        error.code == ErrorCode::TIMEOUT && says(&address.to_string()) && says("is it stopped"),
        "{error}"
    );
    let tier = start("start_without_master = true\n").unwrap();
    assert_eq!(world.connected.load(Ordering::SeqCst), 0);
    tier.shutdown(60_000).unwrap();
}

#[test]
fn a_client_that_holds_others_up_is_closed_when_the_master_answers_and_shutdown_does_not_wait_for_that() {
    for holds_others_up in [false, true] {
        let rig = rig("master_timeout_ms = 300\n", NEVER);
        assert_eq!(rig.put(0..1), [STORED]);
        rig.world.holds_others_up.store(holds_others_up, Ordering::SeqCst);
        rig.master.is_stopped.store(true, Ordering::SeqCst);
        let closed = || rig.world.closed.load(Ordering::SeqCst);
        rig.wait_quiet();
        rig.tier.shutdown(if holds_others_up { 100 } else { 60_000 }).unwrap();
        assert_eq!(closed(), usize::from(!holds_others_up));
        rig.master.is_stopped.store(false, Ordering::SeqCst);
        rig.wait("the client to be closed", || (closed() == 1).then_some(()));
    }
}

#[test]
fn a_master_that_stops_while_a_client_is_closed_holds_no_call_up() {
    let rig = rig("master_timeout_ms = 300\n", NEVER);
    assert_eq!(rig.put(0..1), [STORED]);
    rig.world.holds_others_up.store(true, Ordering::SeqCst);
    *locked(&rig.world.stops_at_goodbye) = Some((rig.master.clone(), rig.address));
    rig.wait_quiet();
    rig.tier.shutdown(0).unwrap();
    rig.wait("the client to be closed", || (rig.world.closed.load(Ordering::SeqCst) == 1).then_some(()));
    assert!(rig.master.is_stopped.load(Ordering::SeqCst), "it is still stopped");
}
