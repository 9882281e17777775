//! Shares of a bounded resource that clients of the API hold.

use std::net::IpAddr;

use host_shuttle::shares::{Client, Shares};
use shuttle::thread;

use crate::schedules::many_schedules;

#[test]
fn no_more_is_held_than_there_is_and_all_of_it_comes_back() {
    many_schedules(|| {
        let shares = Shares::new(5);
        let clients: Vec<_> = (1..4_u8)
            .map(|number| {
                let shares = shares.clone();
                thread::spawn(move || {
                    let client = Client::at(IpAddr::from([10, 0, 0, number]));
                    let first = shares.take(&client, 2);
                    assert!(shares.taken() <= shares.total());
                    if let Ok(mut first) = first {
                        let grown = first.grow(1).is_ok();
                        assert!(shares.taken() >= if grown { 3 } else { 2 });
                    }
                    let again = shares.take(&client, 1);
                    assert!(shares.taken() <= shares.total());
                    drop(again);
                })
            })
            .collect();
        clients.into_iter().for_each(|client| client.join().unwrap());
        assert_eq!(shares.taken(), 0);
        let all: Vec<_> =
            (4..9_u8).map(|number| shares.take(&Client::at(IpAddr::from([10, 0, 0, number])), 1)).collect();
        assert!(all.iter().all(Result::is_ok), "what came back can be taken by others");
    });
}
