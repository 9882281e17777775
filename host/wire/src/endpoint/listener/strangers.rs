//! Connections that have not shown a certificate yet: few at once, and few from one address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

/// Most of them at once.
const MOST: usize = 128;
/// Most from one address, so that one machine leaves places to the others.
const MOST_OF_ONE: usize = 32;

/// How many there are, by address.
#[derive(Clone, Debug, Default)]
pub(super) struct Strangers(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// One of them, until it is dropped.
#[derive(Debug)]
pub(super) struct Stranger {
    all: Strangers,
    from: IpAddr,
}

impl Strangers {
    /// Counts another, if there is room.
    pub fn meet(&self, from: IpAddr) -> Option<Stranger> {
        let mut all = self.0.lock();
        let of_one = all.get(&from).copied().unwrap_or_default();
        if of_one >= MOST_OF_ONE || all.values().sum::<usize>() >= MOST {
            return None;
        }
        all.insert(from, of_one + 1);
        drop(all);
        Some(Stranger { all: self.clone(), from })
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut all = self.all.0.lock();
        if let Some(count) = all.get_mut(&self.from) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.from);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_leaves_room_to_others_and_all_have_a_limit() {
        let (strangers, address) = (Strangers::default(), |last: u8| IpAddr::from([10, 0, 0, last]));
        let mut met: Vec<Stranger> = (0..MOST_OF_ONE).filter_map(|_| strangers.meet(address(1))).collect();
        assert_eq!(met.len(), MOST_OF_ONE);
        assert!(strangers.meet(address(1)).is_none());
        met.extend(
            (2..100)
                .flat_map(|last| (0..2).map(move |_| last))
                .filter_map(|last| strangers.meet(address(last))),
        );
        assert_eq!(met.len(), MOST);
        assert!(strangers.meet(address(200)).is_none());
        met.clear();
        assert!(strangers.meet(address(200)).is_some());
        assert!(strangers.0.lock().is_empty());
    }
}
