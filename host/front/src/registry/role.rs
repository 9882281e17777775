//! The role that a worker announces.

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Computes prompts and sends their KV.
    Prefill,
    /// Receives KV and generates.
    Decode,
    /// Both, without a transfer.
    Aggregated,
}

impl From<Role> for host_core::Role {
    fn from(role: Role) -> Self {
        match role {
            Role::Prefill => host_core::Role::Prefill,
            Role::Decode => host_core::Role::Decode,
            Role::Aggregated => host_core::Role::Aggregated,
        }
    }
}

impl Role {
    /// The role's name on the control plane.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Aggregated => "aggregated",
        }
    }

    pub(super) fn parse(name: &str) -> Option<Self> {
        [Role::Prefill, Role::Decode, Role::Aggregated].into_iter().find(|role| role.name() == name)
    }
}
