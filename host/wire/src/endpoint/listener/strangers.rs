//! Connections that have not shown a certificate yet, or sent a first byte: few at once, and few from one network. A new one takes
//! the place of the oldest, so that those that show nothing keep no one out.

use std::collections::VecDeque;
use std::net::IpAddr;

use tokio::task::AbortHandle;

/// Most of them at once.
const MOST: usize = 128;
/// Most from one network, so that one machine leaves places to the others.
const MOST_OF_ONE: usize = 32;

/// Where a connection comes from: an IPv4 address, or an IPv6 network (/64), of which one machine may have every address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Network(u64);

impl From<IpAddr> for Network {
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Network(u32::from(address).into()),
            IpAddr::V6(address) => Network((u128::from(address) >> 64) as u64),
        }
    }
}

/// The tasks that shake hands, oldest first.
#[derive(Debug, Default)]
pub(super) struct Strangers(VecDeque<(Network, AbortHandle)>);

impl Strangers {
    /// Adds another. True when that ended an older one.
    pub fn meet(&mut self, from: IpAddr, task: AbortHandle) -> bool {
        let from = Network::from(from);
        self.0.retain(|(_, task)| !task.is_finished());
        let of_one = self.0.iter().filter(|(network, _)| *network == from).count();
        let oldest = if of_one >= MOST_OF_ONE {
            self.0.iter().position(|(network, _)| *network == from)
        } else {
            (self.0.len() >= MOST).then_some(0)
        };
        let ended = oldest.and_then(|oldest| self.0.remove(oldest));
        self.0.push_back((from, task));
        ended.is_some_and(|(_, task)| {
            task.abort();
            true
        })
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinHandle;

    use super::*;

    fn waiting() -> JoinHandle<()> {
        tokio::spawn(std::future::pending())
    }

    #[tokio::test]
    async fn the_oldest_of_a_network_that_has_many_makes_room_and_else_the_oldest_of_all() {
        let (mut strangers, address) = (Strangers::default(), |last: u8| IpAddr::from([10, 0, 0, last]));
        let (quiet, first) = (waiting(), waiting());
        assert!(!strangers.meet(address(1), quiet.abort_handle()));
        assert!(!strangers.meet(address(2), first.abort_handle()));
        assert!((1..MOST_OF_ONE).all(|_| !strangers.meet(address(2), waiting().abort_handle())));
        assert!(strangers.meet(address(2), waiting().abort_handle()));
        assert!(first.await.unwrap_err().is_cancelled());
        assert!(!quiet.is_finished());
        for last in 3..=u8::MAX {
            let before = strangers.0.len();
            assert_eq!(strangers.meet(address(last), waiting().abort_handle()), before == MOST, "{last}");
        }
        assert_eq!(strangers.0.len(), MOST);
        assert!(quiet.await.unwrap_err().is_cancelled());
    }

    #[tokio::test]
    async fn a_machine_has_one_network_however_many_addresses_it_has() {
        let (mut strangers, address) =
            (Strangers::default(), |last: u16| IpAddr::from([0x2001, 0xdb8, 0, 1, 0, 0, 0, last]));
        for last in 0..40 {
            assert_eq!(
                strangers.meet(address(last), waiting().abort_handle()),
                usize::from(last) >= MOST_OF_ONE,
                "{last}"
            );
        }
        assert_eq!(Network::from(address(1)), Network::from(address(2)));
        let mapped: IpAddr = "::ffff:10.0.0.1".parse().unwrap();
        assert_eq!(Network::from(mapped), Network::from(IpAddr::from([10, 0, 0, 1])));
    }
}
