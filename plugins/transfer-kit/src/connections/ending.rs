//! How connections end.

use std::time::Instant;

use host_plugin_api::{Error, ErrorCode, Level, PeerId, log};

use super::stage::{Event, Stage};
use super::{Connection, Connections, Inbound, Link, Opening, Transport};
use crate::system::Random;
use crate::wire::Message;

impl<T: Transport> Connections<T> {
    /// Applies an event to a link. Only this function changes a link's stage.
    fn advance(&mut self, id: u32, event: Event) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.stage = link.stage.after(event);
        if link.stage.is_over() {
            let replaced = link.replaced;
            self.shared.instance.queue.settle(PeerId(id));
            if replaced {
                self.forget_link(id);
            }
        }
    }

    /// Ends this side of a link because of an event, unless it has ended.
    pub(super) fn end_link(&mut self, id: u32, event: Event) {
        let Some(link) = self.links.get(&id) else { return };
        let first = link.stage == Stage::Open;
        link.peer.set_gone();
        self.advance(id, event);
        let ended = if first { self.transport.end_link(id) } else { None };
        if let Some(unsettled) = ended {
            self.link_ended(id, unsettled);
        }
    }

    /// To be called when the transport has ended a link. `unsettled` says that something of it may still land at the peer.
    pub fn link_ended(&mut self, id: u32, unsettled: bool) {
        self.advance(id, Event::Ended { unsettled });
    }

    /// To be called when a link failed. Closes its connection at both ends.
    pub fn link_failed(&mut self, id: u32, why: &str) {
        self.end_link(id, Event::End);
        let Some(link) = self.links.get(&id).filter(|link| !link.told) else { return };
        self.transport.note_link_failed();
        log!(Level::WARN, "the connection to {} failed, asking it to close its end: {why}", link.peer.name);
        self.ask_to_close(id);
    }

    /// Asks a peer to close its end of a link, unless it has.
    pub(super) fn ask_to_close(&mut self, id: u32) {
        let Some(link) = self.links.get_mut(&id).filter(|link| !link.stage.is_closed()) else { return };
        link.close_sent = Some(Instant::now());
        self.transport.say(link.peer.instance, id.into(), Message::Cut);
    }

    /// Repeats requests to close an end whose answer is still needed.
    pub(super) fn ask_again(&mut self, now: Instant) {
        let due = |link: &Link<_>| {
            let late = link.close_sent.is_some_and(|at| now.duration_since(at) >= self.settings.ask_again);
            late && link.stage.is_unproven() && self.transport.may_ask_again(link.peer.instance)
        };
        let again: Vec<u32> = self.links.iter().filter(|(_, link)| due(link)).map(|(id, _)| *id).collect();
        again.into_iter().for_each(|id| self.ask_to_close(id));
    }

    /// Handles the message that a peer has closed its end of a link of this instance.
    pub(super) fn peer_closed(&mut self, instance: Random, number: u64) {
        let Some(id) = u32::try_from(number).ok() else { return };
        // Its link is being opened, and leads nowhere.
        for connecting in self.take_connecting(|c| c.instance == instance && c.id == id && c.is_welcome()) {
            let text = format!("{} has closed the connection again", connecting.name());
            connecting.fail(Error::new(ErrorCode::PEER_LOST, text));
        }
        let Some(link) = self.links.get_mut(&id).filter(|link| link.peer.instance == instance) else {
            return;
        };
        let news = !std::mem::replace(&mut link.told, true);
        let name = link.peer.own_name.clone();
        self.end_link(id, Event::PeerClosed);
        if news {
            self.report_if_alone(instance, &name);
        }
    }

    /// Handles the request of a connection's sender to close the inbound endpoint.
    pub(super) fn cut(&mut self, connection: Connection) {
        match self.inbound.iter_mut().find(|inbound| inbound.connection == connection) {
            Some(inbound) => {
                (inbound.cut, inbound.report) = (true, true);
                self.close_inbound(|inbound| inbound.connection == connection);
            }
            // Closed already: the answer may be the second.
            None => self.transport.say(connection.instance, connection.number, Message::CutDone),
        }
    }

    /// Starts to close the selected inbound endpoints, and returns which.
    ///
    /// Their senders are told once they are closed.
    pub(super) fn close_inbound(&mut self, is_selected: impl Fn(&Inbound) -> bool) -> Vec<Connection> {
        let mut closing = Vec::new();
        for inbound in self.inbound.iter_mut().filter(|inbound| is_selected(inbound)) {
            let was = std::mem::replace(&mut inbound.opening, Opening::Closing);
            closing.push((inbound.connection, was));
        }
        for (connection, was) in &closing {
            // An endpoint that is being opened is closed once it is open.
            if *was == Opening::Open && self.transport.close_inbound(*connection) {
                self.inbound_closed(*connection);
            }
        }
        closing.into_iter().map(|(connection, _)| connection).collect()
    }

    /// To be called when the transport has closed an inbound endpoint: nothing lands through it any more.
    pub fn inbound_closed(&mut self, connection: Connection) {
        let Some(at) = self.inbound.iter().position(|inbound| inbound.connection == connection) else {
            return;
        };
        let inbound = self.inbound.swap_remove(at);
        let said = if inbound.cut { Message::CutDone } else { Message::Closed };
        self.transport.say(connection.instance, connection.number, said);
        if inbound.report {
            self.report_if_alone(connection.instance, &inbound.peer_name);
        }
    }

    /// Reports that a peer is lost if no connection in either direction is left. None of its writes can land then.
    fn report_if_alone(&self, instance: Random, name: &str) {
        let open = |link: &Link<_>| !link.told && link.peer.instance == instance;
        if !self.has_inbound_of(instance) && !self.links.values().any(open) {
            self.transport.note_peer_lost();
            self.shared.instance.notifications.peer_lost(name);
        }
    }

    /// Ends all connections of an instance that is gone: none of this instance's writes lands there any more. The host hears
    /// of the loss when the instance's inbound endpoints are closed.
    pub fn lose(&mut self, instance: Random, why: &str) {
        if self.transport.forget(instance) {
            self.end_all(instance, Event::PeerClosed, why);
        }
    }

    /// Ends all connections of an instance that cannot be reached, and may live. The host hears of the loss as after
    /// [`lose`](Self::lose). Its own writes cannot land any more. Whether this instance's may is unproven until it is
    /// lost, or says that its ends are closed. It is [asked](Self::keep_time) as soon as the transport allows that.
    /// Returns the host's name for the instance if something is unproven.
    pub fn lose_contact(&mut self, instance: Random, why: &str) -> Option<String> {
        let mut unproven = None;
        for id in self.end_all(instance, Event::End, why) {
            self.ask_to_close(id);
            if let Some(link) = self.links.get(&id).filter(|link| link.stage.is_unproven()) {
                unproven = Some(link.peer.name.clone());
            }
        }
        unproven
    }

    /// Ends all connections of an instance, its links by an event. Returns these links.
    fn end_all(&mut self, instance: Random, event: Event, why: &str) -> Vec<u32> {
        for connecting in self.take_connecting(|connecting| connecting.instance == instance) {
            let text = format!("no peer answers for {}: {why}", connecting.name());
            connecting.fail(Error::new(ErrorCode::PEER_LOST, text));
        }
        let of_it = |inbound: &Inbound| inbound.connection.instance == instance;
        let mut sender = None;
        for inbound in self.inbound.iter_mut().filter(|inbound| of_it(inbound)) {
            inbound.report = true;
            sender = Some(inbound.peer_name.clone());
        }
        self.close_inbound(of_it);
        let mut news = None;
        let mut over = Vec::new();
        for (id, link) in self.links.iter_mut().filter(|(_, link)| link.peer.instance == instance) {
            if !std::mem::replace(&mut link.told, true) {
                news = Some(link.peer.own_name.clone());
            }
            over.push(*id);
        }
        over.iter().for_each(|id| self.end_link(*id, event));
        if let Some(name) = news.as_ref().or(sender.as_ref()) {
            log!(Level::INFO, "{name} is lost: {why}");
        }
        if let Some(name) = news {
            self.report_if_alone(instance, &name);
        }
        over
    }

    /// Begins to end everything: calls that wait fail with `CLOSED`, links end, inbound endpoints close.
    pub fn close(&mut self) {
        let links: Vec<u32> = self.links.keys().copied().collect();
        links.into_iter().for_each(|id| self.end_link(id, Event::End));
        for connecting in std::mem::take(&mut self.connecting) {
            connecting.fail(Error::new(ErrorCode::CLOSED, "the instance was shut down"));
        }
        self.close_inbound(|_| true);
    }
}
