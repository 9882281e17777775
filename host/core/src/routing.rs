//! Routing: which worker gets a request, by what each worker has cached and how busy it is.
//!
//! The router keeps one [`PrefixIndex`] over all workers, fed by their KV events, and an account of the work it has
//! given out ([`Placement`]). [`Accounts`] has both. A request goes to the worker that is expected to answer first. The
//! cost of a worker is the tokens that already wait there plus the tokens of this prompt that it would have to compute.
//! [`choose`] is the rule over these costs. When a try fails, [`Tries`] says whether there is another one, and
//! [`Answer`] where it continues.
//!
//! Work that was placed but is not cached yet counts as cached on the worker it was placed on. Without that, two
//! requests with the same new prefix that arrive together would be computed on two workers.

mod accounts;
mod answer;
mod choice;
mod event;
mod index;
mod key;
mod log;
mod placement;
mod policy;
mod sessions;
mod tries;

pub use accounts::{Accounts, CacheCounts, Chain, Sight, WorkerFacts};
pub use answer::Answer;
pub use choice::{Choice, Preference, Reported, choose};
pub use event::{KvEvent, SnapshotPart};
pub use index::{Applied, PrefixIndex, WorkerSlot};
pub use key::BlockKey;
pub use log::{EVENT_KEYS, EventLog, Replay, Snapshot};
pub use placement::{Cost, Placed, Placement, Prompt, Weights};
pub use policy::Policy;
pub use sessions::Sessions;
pub use tries::{Retry, Tries};
