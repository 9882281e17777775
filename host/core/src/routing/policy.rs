//! How the router chooses among the workers that fit a request.

/// The rule by which the router chooses among the workers that fit a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Weighs the tokens of the prompt that each worker holds against the work that it has to do. The same as
    /// [`Policy::LeastLoaded`] while no worker's cache can be followed.
    #[default]
    Prefix,
    /// The workers with the fewest requests, in turn among equals.
    LeastLoaded,
    /// In turn.
    RoundRobin,
    /// At random.
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
