//! CPython inside this process, loaded when it is first needed and never unloaded. The plugin does not link to it.
//!
//! [`Interpreter::get`] starts it, once per process. [`Interpreter::with`] runs a closure under its lock, from any
//! thread. Values are [`Object`]s, which may be kept and sent. Arguments are [`Value`]s. A call that raises is an error
//! with the exception's text. Calls into Mooncake that may take long release the lock by themselves.
//!
//! [`Probe::run`] checks an installation in a process of its own, before anything is loaded here: a Python that cannot
//! start ends its process.

mod alone;
mod api;
mod object;
mod probe;

pub use object::{Gil, Object, Value};
pub use probe::Probe;

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use alone::Alone;
use api::Api;

/// How long another copy of this library may take to start Python.
const PATIENCE: Duration = Duration::from_secs(60);

/// Python, running in this process.
pub struct Interpreter {
    api: &'static Api,
    /// Path of the interpreter that Python was started as.
    executable: String,
}

static RUNNING: Mutex<Option<&'static Interpreter>> = Mutex::new(None);

impl Interpreter {
    /// The interpreter of this process. If none runs yet, starts the one that the probe found.
    ///
    /// # Errors
    /// When no library of Python's can be loaded, or another interpreter was started before.
    pub fn get(probe: &Probe) -> Result<&'static Self, String> {
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(interpreter) = *running {
            if interpreter.executable != probe.executable {
                return Err(format!(
                    "this process runs the Python of {} already, and can run no other: {} cannot be used beside it",
                    interpreter.executable, probe.executable
                ));
            }
            return Ok(interpreter);
        }
        let _alone = Alone::within(PATIENCE)?;
        crate::environment::set(probe.preloaded.as_slice())?;
        let candidates = probe.libraries();
        let api = Api::load(&candidates, &probe.executable).map_err(|tried| probe.no_library(&tried))?;
        let interpreter = &*Box::leak(Box::new(Self { api, executable: probe.executable.clone() }));
        *running = Some(interpreter);
        Ok(interpreter)
    }

    /// Imports a module. `path` is where a probe found it.
    ///
    /// # Errors
    /// What Python says. Also when the module has another path: then another part of the process has started a Python already.
    pub fn import(&self, gil: &Gil, name: &str, path: &Path) -> Result<Object, String> {
        let module = gil.import(name)?;
        let file = gil.text(&gil.attribute(&module, "__file__")?)?;
        if Path::new(&file) == path {
            return Ok(module);
        }
        Err(format!(
            "this process runs a Python already, whose {name} is {file}, and can run no other: {} of {} cannot be used beside it",
            path.display(),
            self.executable
        ))
    }

    /// Runs a closure under Python's lock. The closure must not wait for another thread that wants the lock.
    pub fn with<R>(&self, run: impl FnOnce(&Gil) -> R) -> R {
        let gil = Gil::hold(self.api);
        run(&gil)
    }
}
