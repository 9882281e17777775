//! How a route is chosen among those that fit.

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// What the workers hold of the prompt against what they have to do. While no worker lets its cache be followed,
    /// the same as [`Policy::LeastLoaded`].
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
    /// As metrics write it, and `--router-policy`.
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
