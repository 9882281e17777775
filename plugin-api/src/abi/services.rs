//! The host's services for plugins, as they cross. Only here the plugin is the caller and the host is called.
//!
//! The host hands its services over once per loaded file, before anything else of the plugin runs. Here the *host* may
//! be the older side, so every method that was added after the first version needs a default body.

use std::panic::PanicHookInfo;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use abi_stable::StableAbi;
use abi_stable::sabi_trait::prelude::TD_Opaque;
use abi_stable::std_types::{RBox, RStr};

use super::AbiResult;
use super::guard::text_in;
use crate::services::Level;

/// Kind of [`HostRole::word`]: a number that only grows.
pub const COUNTER: u32 = 0;
/// Kind of [`HostRole::word`]: a number that goes up and down.
pub const GAUGE: u32 = 1;

/// A number that belongs to the host and lives as long as the process.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct HostWord {
    /// Read and written with relaxed ordering.
    pub value: &'static AtomicU64,
}

/// The services as they cross. [`Host`](crate::Host) describes each method. Implemented by the host.
#[abi_stable::sabi_trait]
pub trait HostRole: Send + Sync + 'static {
    /// The word that holds the least important [`Level`](crate::Level) that is logged. 0 logs nothing.
    fn level(&self) -> HostWord;
    /// See [`Host::log`](crate::Host::log).
    fn log(&self, level: u32, target: RStr<'_>, message: RStr<'_>);
    /// See [`Host::counter`](crate::Host::counter) and [`Host::gauge`](crate::Host::gauge). `kind` is [`COUNTER`] or
    /// [`GAUGE`].
    fn word(&self, kind: u32, name: RStr<'_>) -> AbiResult<HostWord>;
    /// See [`Host::wake`](crate::Host::wake).
    #[sabi(last_prefix_field)]
    fn wake(&self);
}

/// The host's services on the other side of the boundary.
pub type HostObject = HostRole_TO<RBox<()>>;

/// Services of the host's making, ready to be handed over.
pub fn object_of(services: impl HostRole) -> HostObject {
    HostRole_TO::from_value(services, TD_Opaque)
}

/// Hands the host's services to a plugin. See [`OpenTransfer`](super::OpenTransfer) for why it is a struct.
#[repr(transparent)]
#[derive(Clone, Copy, StableAbi)]
pub struct Attach {
    /// Only the first call takes effect. The services of later calls are dropped.
    pub call: extern "C" fn(host: HostObject),
}

/// The host's services, and the word that holds its log level.
pub(crate) struct Attached {
    pub(crate) object: HostObject,
    pub(crate) level: &'static AtomicU64,
}

static ATTACHED: OnceLock<Attached> = OnceLock::new();

pub(crate) fn attached() -> Option<&'static Attached> {
    ATTACHED.get()
}

/// The plugin's side of [`Attach`]. Each loaded file has its own copy of the statics of this crate and of `std`.
pub(super) extern "C" fn attach(host: HostObject) {
    let mut first = false;
    ATTACHED.get_or_init(|| {
        first = true;
        let HostWord { value: level } = host.level();
        Attached { object: host, level }
    });
    if first {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            log_panic(info);
            // Where the host does not log errors, as under `host plugins test`, the usual hook prints the panic, as if there
            // were no host. It also prints the backtrace that RUST_BACKTRACE turns on.
            let traced = std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0");
            if traced || !crate::host().logs(Level::ERROR) {
                usual(info);
            }
        }));
    }
}

/// Logs a panic with its place, which the guard that catches the panic does not learn.
fn log_panic(info: &PanicHookInfo<'_>) {
    let text = text_in(info.payload());
    let place = info.location().map(ToString::to_string).unwrap_or_default();
    crate::host().log(Level::ERROR, "panic", &format!("panicked at {place}: {text}"));
}
