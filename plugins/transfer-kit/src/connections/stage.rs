//! The states of a link.

/// The state of a link.
///
/// The transport's side of the link runs until it has ended. The peer's inbound endpoint is there until the peer says
/// that it is closed, or the peer is gone. Either may come first.
///
/// ```text
///   Open ──failed, told to end──► Ending ──────────ended──► Ended
///     │                             │ peer closed             │ peer closed
///     └────────peer closed──────► Ending (closed) ─ended──► Ended (closed)
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Writes go out.
    Open,
    /// Nothing new is taken, and the transport ends what runs.
    Ending {
        /// The peer's end is closed.
        closed: bool,
    },
    /// Nothing of this instance's memory is read any more.
    Ended {
        /// The peer's end is closed.
        closed: bool,
        /// Whether writes have left that may land until the peer's end is closed.
        unsettled: bool,
    },
}

/// What happens to a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// It failed, or is told to end.
    End,
    /// The transport has ended it.
    Ended {
        /// Something of it may still land at the peer.
        unsettled: bool,
    },
    /// The peer says that its end is closed, or is gone.
    PeerClosed,
}

impl Stage {
    /// The stage after an event.
    pub fn after(self, event: Event) -> Self {
        match (self, event) {
            (Self::Open, Event::End) => Self::Ending { closed: false },
            (Self::Open | Self::Ending { .. }, Event::PeerClosed) => Self::Ending { closed: true },
            (Self::Open, Event::Ended { unsettled }) => Self::Ended { closed: false, unsettled },
            (Self::Ending { closed }, Event::Ended { unsettled }) => Self::Ended { closed, unsettled },
            (Self::Ended { unsettled, .. }, Event::PeerClosed) => Self::Ended { closed: true, unsettled },
            (Self::Ending { .. } | Self::Ended { .. }, Event::End)
            | (Self::Ended { .. }, Event::Ended { .. }) => self,
        }
    }

    /// Whether the peer's end is known to be closed.
    pub fn is_closed(self) -> bool {
        matches!(self, Self::Ending { closed: true } | Self::Ended { closed: true, .. })
    }

    /// Whether nothing of the link is in flight any more.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Ended { closed, unsettled } if closed || !unsettled)
    }

    /// Whether it has ended, and only the peer's answer can prove that nothing of it lands any more.
    pub fn is_unproven(self) -> bool {
        self == Self::Ended { closed: false, unsettled: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_over_when_it_has_ended_and_the_peer_has_closed_unless_nothing_had_left() {
        let ended = |unsettled| Event::Ended { unsettled };
        for (events, over, closed, unproven) in [
            (&[Event::End][..], false, false, false),
            (&[Event::End, ended(false)], true, false, false),
            (&[Event::End, ended(true)], false, false, true),
            (&[Event::End, ended(true), Event::End], false, false, true),
            (&[Event::End, ended(true), Event::PeerClosed], true, true, false),
            (&[Event::End, Event::PeerClosed], false, true, false),
            (&[Event::PeerClosed, Event::End], false, true, false),
            (&[Event::PeerClosed, ended(true)], true, true, false),
            (&[ended(true)], false, false, true),
        ] {
            let stage = events.iter().fold(Stage::Open, |stage, event| stage.after(*event));
            let found = (stage.is_over(), stage.is_closed(), stage.is_unproven());
            assert_eq!(found, (over, closed, unproven), "{events:?}: {stage:?}");
        }
    }
}
