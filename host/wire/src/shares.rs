//! Fair shares of limited resources: connections, requests, bytes of requests.
//!
//! A client may hold at most [`TIMES_FREE`] times the amount that stays free (the dynamic threshold of Choudhury and Hahne,
//! "Dynamic queue length thresholds for shared-memory packet switches", 1998). A client alone gets four fifths. The more clients
//! hold much, the less each of them gets, and some stays free for a client that holds nothing: `k` greedy clients leave
//! `1 / (1 + 4 k)` of all.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use parking_lot::Mutex;

/// A client holds at most this many times the amount that is free.
const TIMES_FREE: usize = 4;

/// The identity of a client.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Client {
    /// An IPv4 address, or the network of an IPv6 address: its first 64 bits, which one machine has to itself.
    Address(IpAddr),
    /// A tenant, from any address.
    Tenant(Arc<str>),
}

impl Client {
    /// The client behind an address.
    #[must_use]
    pub fn at(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(address) if !address.is_loopback() => {
                let network = address.to_bits() >> 64 << 64;
                Self::Address(IpAddr::V6(Ipv6Addr::from_bits(network)))
            }
            address => Self::Address(address),
        }
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Tenant(name) => f.write_str(name),
        }
    }
}

/// A limited amount of something, divided among clients.
#[derive(Clone, Debug)]
pub struct Shares {
    total: usize,
    held: Arc<Mutex<Held>>,
}

#[derive(Debug, Default)]
struct Held {
    all: usize,
    clients: HashMap<Client, usize>,
}

/// The reason why a client gets nothing more now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoShare {
    /// Everything is taken.
    Full,
    /// The client already holds its share.
    Client,
}

/// A part that a client holds. Dropping it frees it.
#[derive(Debug)]
pub struct Share {
    of: Shares,
    client: Client,
    amount: usize,
}

impl Shares {
    /// An amount that is all free.
    #[must_use]
    pub fn new(total: usize) -> Self {
        Self { total, held: Arc::default() }
    }

    /// The whole amount.
    #[must_use]
    pub fn total(&self) -> usize {
        self.total
    }

    /// The amount that is taken.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.held.lock().all
    }

    /// Gives a client a part.
    ///
    /// # Errors
    /// When less than `amount` is free, or when the client would hold more than its share. A client that holds nothing gets all
    /// that is free.
    pub fn take(&self, client: &Client, amount: usize) -> Result<Share, NoShare> {
        let mut share = self.take_nothing(client);
        share.grow(amount)?;
        Ok(share)
    }

    /// Gives a client an empty part, which may grow.
    #[must_use]
    pub fn take_nothing(&self, client: &Client) -> Share {
        Share { of: self.clone(), client: client.clone(), amount: 0 }
    }
}

impl Shares {
    /// Gives a client a part, however much the client holds already.
    ///
    /// # Errors
    /// When less than `amount` is free.
    pub fn take_any(&self, client: &Client, amount: usize) -> Result<Share, NoShare> {
        let mut share = self.take_nothing(client);
        share.add(amount, usize::MAX)?;
        Ok(share)
    }

    /// Takes a part back from a client, or some of it.
    fn give_back(&self, client: &Client, amount: usize) {
        let mut held = self.held.lock();
        held.all -= amount;
        if let Some(of_client) = held.clients.get_mut(client) {
            *of_client -= amount;
            if *of_client == 0 {
                held.clients.remove(client);
            }
        }
    }
}

impl Share {
    /// The size of the part.
    #[must_use]
    pub fn amount(&self) -> usize {
        self.amount
    }

    /// The client that holds the part.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Adds to the part.
    ///
    /// # Errors
    /// The same as for [`Shares::take`]. The part then stays as it was.
    pub fn grow(&mut self, amount: usize) -> Result<(), NoShare> {
        self.add(amount, TIMES_FREE)
    }

    /// Adds to the part for work that is under way, which another client's beginning should not end. A client may hold so much of
    /// all as it could alone.
    ///
    /// # Errors
    /// As [`Shares::take`]. The part stays as it was.
    pub fn grow_under_way(&mut self, amount: usize) -> Result<(), NoShare> {
        let held = self.of.held.lock().clients.get(&self.client).copied().unwrap_or(0);
        let most = self.of.total / (TIMES_FREE + 1) * TIMES_FREE;
        if held > 0 && held.saturating_add(amount) > most {
            return if amount == 0 { Ok(()) } else { Err(NoShare::Client) };
        }
        self.add(amount, usize::MAX)
    }

    /// Gives back all but so much.
    pub fn shrink_to(&mut self, amount: usize) {
        let less = self.amount.saturating_sub(amount);
        if less == 0 {
            return;
        }
        self.of.give_back(&self.client, less);
        self.amount -= less;
    }

    fn add(&mut self, amount: usize, times_free: usize) -> Result<(), NoShare> {
        if amount == 0 {
            return Ok(());
        }
        let mut held = self.of.held.lock();
        let Some(free) = (self.of.total - held.all).checked_sub(amount) else { return Err(NoShare::Full) };
        let before = held.clients.get(&self.client).copied().unwrap_or(0);
        if before > 0 && before + amount > times_free.saturating_mul(free + 1) {
            return Err(NoShare::Client);
        }
        held.all += amount;
        held.clients.insert(self.client.clone(), before + amount);
        self.amount += amount;
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.of.give_back(&self.client, self.amount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(number: u8) -> Client {
        Client::at(IpAddr::from([10, 0, 0, number]))
    }

    /// Takes one after the other until the client gets no more.
    fn all_for(shares: &Shares, number: u8) -> Vec<Share> {
        std::iter::from_fn(|| shares.take(&client(number), 1).ok()).collect()
    }

    #[test]
    fn work_under_way_grows_up_to_what_a_client_has_alone() {
        let shares = Shares::new(1000);
        let mut first = shares.take(&client(1), 300).unwrap();
        let others: Vec<_> = (2..5).map(|number| shares.take(&client(number), 200).unwrap()).collect();
        assert_eq!(first.grow(50), Err(NoShare::Client), "more than four times of what is free with it");
        first.grow_under_way(80).unwrap();
        assert_eq!(first.grow_under_way(100), Err(NoShare::Full));
        drop(others);
        first.grow_under_way(420).unwrap();
        assert_eq!((first.amount(), first.grow_under_way(1)), (800, Err(NoShare::Client)));
        assert_eq!(first.grow_under_way(0), Ok(()));
    }

    #[test]
    fn a_part_that_shrinks_leaves_room() {
        let shares = Shares::new(1000);
        let mut share = shares.take(&client(1), 800).unwrap();
        assert_eq!(share.grow(1), Err(NoShare::Client));
        share.shrink_to(300);
        assert_eq!((share.amount(), shares.taken()), (300, 300));
        share.shrink_to(500);
        assert_eq!(share.amount(), 300, "it does not grow");
        share.grow(500).unwrap();
        drop(share);
        assert_eq!(shares.taken(), 0);
        assert_eq!(all_for(&shares, 1).len(), 800, "nothing is left of the client");
    }

    #[test]
    fn a_client_alone_gets_four_fifths_and_others_still_find_some() {
        let shares = Shares::new(1000);
        let first = all_for(&shares, 1);
        assert_eq!(first.len(), 800);
        assert_eq!(shares.take(&client(1), 1).unwrap_err(), NoShare::Client);
        let second = all_for(&shares, 2);
        assert_eq!(second.len(), 160);
        let third = all_for(&shares, 3);
        assert_eq!(third.len(), 32);
        assert_eq!(shares.taken(), 992);
        drop((first, second, third));
        assert_eq!((shares.taken(), shares.held.lock().clients.len()), (0, 0));
    }

    #[test]
    fn greedy_clients_that_take_turns_get_equal_shares_and_leave_their_part() {
        for clients in 1..12_u8 {
            let shares = Shares::new(1000);
            let mut taken: Vec<Vec<Share>> = (0..clients).map(|_| Vec::new()).collect();
            let mut more = true;
            while std::mem::take(&mut more) {
                for (number, of_client) in (0..clients).zip(&mut taken) {
                    let share = shares.take(&client(number), 1).ok();
                    more |= share.is_some();
                    of_client.extend(share);
                }
            }
            let (least, most) = (taken.iter().map(Vec::len).min(), taken.iter().map(Vec::len).max());
            assert!(most.unwrap() - least.unwrap() <= 1, "{clients}: {least:?} {most:?}");
            let free = shares.total() - shares.taken();
            assert!(free >= 1000 / (1 + 4 * usize::from(clients)), "{clients}: {free}");
        }
    }

    #[test]
    fn where_there_is_little_one_client_may_have_all_of_it() {
        for total in 0..5 {
            assert_eq!(all_for(&Shares::new(total), 1).len(), total);
        }
        assert_eq!(Shares::new(4).take(&client(1), 5).unwrap_err(), NoShare::Full);
    }

    #[test]
    fn a_share_that_cannot_grow_stays_as_it_was() {
        let shares = Shares::new(100);
        let mut share = shares.take(&client(1), 50).unwrap();
        assert_eq!(share.grow(60), Err(NoShare::Full));
        assert_eq!(share.grow(40), Err(NoShare::Client));
        assert_eq!(share.grow(20), Ok(()));
        assert_eq!(shares.taken(), 70);
        drop(share);
        assert_eq!(shares.taken(), 0);
    }

    #[test]
    fn an_ipv6_network_is_one_client_and_a_mapped_address_is_its_ipv4_address() {
        let at = |text: &str| Client::at(text.parse().unwrap());
        assert_eq!(at("2001:db8:1:2::1"), at("2001:db8:1:2:3:4:5:6"));
        assert_ne!(at("2001:db8:1:2::1"), at("2001:db8:1:3::1"));
        assert_eq!(at("::ffff:10.0.0.1"), client(1));
        assert_ne!(at("::1"), at("::2"));
        assert_ne!(at("10.0.0.1"), at("10.0.0.2"));
    }
}
