//! How a route is chosen among those that fit.

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Compares what workers hold of the prompt with what they have to do. The same as [`Policy::LeastLoaded`] while no
    /// worker's cache can be followed.
    #[default]
    Prefix,
    /// The workers with the fewest requests, in turn among equals.
    LeastLoaded,
    /// In turn.
    RoundRobin,
    /// By lot.
    Random,
}

impl Policy {
    /// The policy's name in metrics and in `--router-policy`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Policy::Prefix => "prefix",
            Policy::LeastLoaded => "least-loaded",
            Policy::RoundRobin => "round-robin",
            Policy::Random => "random",
        }
    }
}
