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
    const ALL: [Policy; 4] = [Policy::Prefix, Policy::LeastLoaded, Policy::RoundRobin, Policy::Random];

    /// As flags and metrics write it.
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

impl std::str::FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|policy| policy.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Policy::name).join(", ");
            format!("unknown routing policy {text:?}: use one of {names}")
        })
    }
}
