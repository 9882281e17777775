//! Mooncake Store through the wheel's module `mooncake.store`, in a Python of this process.
//!
//! The batch calls release Python's lock while they move bytes, so calls of several threads run side by side.

use super::client::{Client, LOCAL_BUFFER_BYTES, Library, Setup, Span};
use crate::engine::idle_connections::listening;
use crate::engine::{VAIN_AMONG_OTHERS, end_quickly};
use crate::python::{Gil, Interpreter, Object, Probe, Value};

/// The imported module.
pub struct PythonLibrary {
    interpreter: &'static Interpreter,
    class: Object,
    what: String,
}

impl PythonLibrary {
    /// Starts Python, if it does not run, and imports the module.
    ///
    /// # Errors
    /// What Python says.
    pub fn load(probe: &Probe) -> Result<Self, String> {
        let path = probe.store()?;
        let interpreter = Interpreter::get(probe)?;
        let class = interpreter.with(|gil| {
            let module = interpreter.import(gil, "mooncake.store", path)?;
            gil.attribute(&module, "MooncakeDistributedStore")
        })?;
        Ok(Self { interpreter, class, what: format!("{} ({})", probe.describe(), path.display()) })
    }
}

impl Library for PythonLibrary {
    fn connect(&self, setup: &Setup) -> Result<Box<dyn Client>, String> {
        let client = self.interpreter.with(|gil| {
            let store = gil.call(&self.class, &[])?;
            let method = |name| gil.attribute(&store, name);
            let arguments = [
                Value::Text(&setup.local_hostname),
                Value::Text(&setup.metadata_server),
                Value::Unsigned(setup.global_segment_size),
                Value::Unsigned(LOCAL_BUFFER_BYTES),
                Value::Text(&setup.protocol),
                Value::Text(&setup.device_name),
                Value::Text(&setup.master_server_address),
            ];
            let mut client = PythonClient {
                interpreter: self.interpreter,
                exist: method("batch_is_exist")?,
                put: method("batch_put_from")?,
                get: method("batch_get_into")?,
                remove: method("remove")?,
                register: method("register_buffer")?,
                unregister: method("unregister_buffer")?,
                close: method("close")?,
                ports: Vec::new(),
            };
            // `setup` holds Python's lock, so that no other engine of this Python's begins to listen meanwhile.
            let before = listening();
            must(gil, "setup", gil.call(&method("setup")?, &arguments))?;
            client.ports = listening().difference(&before).copied().collect();
            Ok::<_, String>(client)
        })?;
        Ok(Box::new(client))
    }

    /// True: `setup` and `close` hold Python's lock. The other calls do not.
    fn holds_others_up(&self) -> bool {
        true
    }

    fn describe(&self) -> String {
        self.what.clone()
    }
}

/// A client, as methods bound to it.
struct PythonClient {
    interpreter: &'static Interpreter,
    exist: Object,
    put: Object,
    get: Object,
    remove: Object,
    register: Object,
    unregister: Object,
    close: Object,
    /// The ports on which it listens.
    ports: Vec<u16>,
}

/// Checks a call that answers 0 on success.
fn must(gil: &Gil, what: &str, call: Result<Object, String>) -> Result<(), String> {
    match gil.int(&call?)? {
        0 => Ok(()),
        code => Err(format!("Mooncake's {what} answered {code}")),
    }
}

impl PythonClient {
    /// Calls with a list of keys, and gives the list of numbers that comes back.
    fn numbers(&self, method: &Object, names: &[String], spans: Option<&[Span]>) -> Result<Vec<i64>, String> {
        let texts: Vec<&str> = names.iter().map(String::as_str).collect();
        let all = spans.unwrap_or_default().iter();
        let (addresses, lengths): (Vec<u64>, Vec<u64>) = all.map(|span| (span.address, span.length)).unzip();
        let arguments = [Value::Texts(&texts), Value::Numbers(&addresses), Value::Numbers(&lengths)];
        let arguments = if spans.is_some() { &arguments[..] } else { &arguments[..1] };
        self.interpreter.with(|gil| {
            let list = gil.call(method, arguments)?;
            gil.items(&list)?.iter().map(|number| gil.int(number)).collect()
        })
    }
}

impl Client for PythonClient {
    fn exist(&self, names: &[String]) -> Result<Vec<i64>, String> {
        self.numbers(&self.exist, names, None)
    }

    fn put(&self, names: &[String], values: &[Span]) -> Result<Vec<i64>, String> {
        self.numbers(&self.put, names, Some(values))
    }

    fn get(&self, names: &[String], places: &[Span]) -> Result<Vec<i64>, String> {
        self.numbers(&self.get, names, Some(places))
    }

    fn remove(&self, names: &[String]) -> Result<Vec<i64>, String> {
        self.interpreter.with(|gil| {
            // The second argument forces the removal of a value that was just read.
            let remove =
                |name: &String| gil.int(&gil.call(&self.remove, &[Value::Text(name), Value::Bool(true)])?);
            names.iter().map(remove).collect()
        })
    }

    fn register(&self, span: Span) -> Result<(), String> {
        let arguments = [Value::Unsigned(span.address), Value::Unsigned(span.length)];
        self.interpreter.with(|gil| must(gil, "register_buffer", gil.call(&self.register, &arguments)))
    }

    fn unregister(&self, span: Span) -> Result<(), String> {
        let arguments = [Value::Unsigned(span.address)];
        self.interpreter.with(|gil| must(gil, "unregister_buffer", gil.call(&self.unregister, &arguments)))
    }

    fn close(&self) {
        let mut closed = Ok(());
        end_quickly(&self.ports, VAIN_AMONG_OTHERS, || {
            closed = self.interpreter.with(|gil| must(gil, "close", gil.call(&self.close, &[])));
        });
        if let Err(why) = closed {
            host_plugin_api::log!(host_plugin_api::Level::WARN, "{why}");
        }
    }
}
