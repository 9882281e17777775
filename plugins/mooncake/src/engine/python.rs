//! The engine of the wheel, through its Python API.

use super::{Driver, Engine, MESSAGE_NAME, Range, Run, State, Target, Ticket, Undelivered};
use crate::config::{Config, P2P, Protocol};
use crate::python::{Gil, Interpreter, Object, Probe, Value};

/// Answer of `send_probe` when no process listens, and for any other error of a socket.
const REFUSED: i64 = -102;

/// The wheel's module, imported.
pub struct PythonDriver {
    interpreter: &'static Interpreter,
    engine_class: Object,
    notify_class: Object,
    write: Object,
    host: String,
    protocol: &'static str,
    devices: String,
    what: String,
}

impl PythonDriver {
    /// Starts Python, if it does not run, and imports the module.
    ///
    /// # Errors
    /// What Python says.
    pub fn load(probe: &Probe, config: &Config) -> Result<Self, String> {
        let path = probe.engine()?;
        if config.protocol == Protocol::Tcp {
            crate::environment::force_tcp();
        }
        let interpreter = Interpreter::get(probe)?;
        let [engine_class, notify_class, write] = interpreter.with(|gil| {
            let module = interpreter.import(gil, "mooncake.engine", path)?;
            let opcode = gil.attribute(&module, "TransferOpcode")?;
            let find = |of, name| gil.attribute(of, name);
            Ok::<_, String>([
                find(&module, "TransferEngine")?,
                find(&module, "TransferNotify")?,
                find(&opcode, "Write")?,
            ])
        })?;
        Ok(Self {
            interpreter,
            engine_class,
            notify_class,
            write,
            host: config.local_hostname.clone(),
            protocol: if config.protocol == Protocol::Tcp { "tcp" } else { "rdma" },
            devices: config.device_name.clone(),
            what: format!("{} ({})", probe.describe(), path.display()),
        })
    }
}

/// How many engines are tried until one gets the ports that it chose.
const TRIES: usize = 5;

/// Whether another process took a port. Mooncake looks for a free port and listens on it a moment later.
fn is_taken(why: &str) -> bool {
    why.contains("Address already in use")
}

/// Calls `make`, and calls it again when the ports that it chose were taken meanwhile.
fn until_ports_are_free<T>(mut make: impl FnMut() -> Result<T, String>) -> Result<T, String> {
    let mut tries = 1;
    loop {
        match make() {
            Err(why) if is_taken(&why) && tries < TRIES => tries += 1,
            made => return made,
        }
    }
}

impl PythonDriver {
    fn make(&self) -> Result<PythonEngine, String> {
        self.interpreter.with(|gil| {
            let object = gil.call(&self.engine_class, &[])?;
            let texts = [self.host.as_str(), P2P, self.protocol, self.devices.as_str()].map(Value::Text);
            let answer = gil.int(&gil.call(&gil.attribute(&object, "initialize")?, &texts)?)?;
            if answer != 0 {
                return Err(format!("Mooncake's initialize answered {answer} (MC_LOG_LEVEL=INFO says more)"));
            }
            let port = gil.int(&gil.call(&gil.attribute(&object, "get_rpc_port")?, &[])?)?;
            let method = |name| gil.attribute(&object, name);
            Ok(PythonEngine {
                interpreter: self.interpreter,
                session: format!("{}:{port}", self.host),
                methods: Some(Methods {
                    register: method("batch_register_memory")?,
                    unregister: method("batch_unregister_memory")?,
                    write: method("batch_transfer_async_write")?,
                    status: method("transfer_check_status")?,
                    probe: method("send_probe")?,
                    transfer: method("transfer_sync")?,
                    notifies: method("get_notifies")?,
                }),
                notify_class: self.notify_class.clone(),
                opcode: self.write.clone(),
            })
        })
    }
}

impl Driver for PythonDriver {
    fn engine(&self) -> Result<Box<dyn Engine>, String> {
        Ok(Box::new(until_ports_are_free(|| self.make())?))
    }

    fn describe(&self) -> String {
        self.what.clone()
    }
}

struct PythonEngine {
    interpreter: &'static Interpreter,
    session: String,
    /// Taken at the end. Each method holds on to the engine.
    methods: Option<Methods>,
    notify_class: Object,
    opcode: Object,
}

struct Methods {
    register: Object,
    unregister: Object,
    write: Object,
    status: Object,
    probe: Object,
    transfer: Object,
    notifies: Object,
}

impl PythonEngine {
    /// Calls a method.
    fn call(
        &self,
        gil: &Gil,
        which: impl Fn(&Methods) -> &Object,
        arguments: &[Value],
    ) -> Result<Object, String> {
        match &self.methods {
            Some(methods) => gil.call(which(methods), arguments),
            None => Err("the engine has ended".to_owned()),
        }
    }
}

/// Checks a call that answers 0 on success.
fn must(gil: &Gil, what: &str, call: Result<Object, String>) -> Result<(), String> {
    match gil.int(&call?)? {
        0 => Ok(()),
        code => Err(format!("Mooncake's {what} answered {code}")),
    }
}

impl Engine for PythonEngine {
    fn session(&self) -> &str {
        &self.session
    }

    fn register(&self, ranges: &[Range]) -> Result<(), String> {
        if ranges.is_empty() {
            return Ok(());
        }
        let addresses: Vec<u64> = ranges.iter().map(|range| range.address).collect();
        let lengths: Vec<u64> = ranges.iter().map(|range| range.length).collect();
        self.interpreter.with(|gil| {
            let arguments = [Value::Numbers(&addresses), Value::Numbers(&lengths)];
            must(gil, "batch_register_memory", self.call(gil, |m| &m.register, &arguments))
        })
    }

    fn unregister(&self, ranges: &[Range]) -> Result<(), String> {
        if ranges.is_empty() {
            return Ok(());
        }
        let addresses: Vec<u64> = ranges.iter().map(|range| range.address).collect();
        self.interpreter.with(|gil| {
            let call = self.call(gil, |m| &m.unregister, &[Value::Numbers(&addresses)]);
            must(gil, "batch_unregister_memory", call)
        })
    }

    fn open(&self, session: &str) -> Result<Target, String> {
        self.interpreter.with(|gil| {
            must(gil, "send_probe", self.call(gil, |m| &m.probe, &[Value::Text(session)]))?;
            // The first write asks the peer for its addresses, and waits for the answer without a limit. So the first
            // write is one of no bytes, while no other write waits.
            let [nothing, write] = [Value::Unsigned(0), Value::Object(&self.opcode)];
            let arguments = [Value::Text(session), nothing, nothing, nothing, write];
            must(gil, "transfer_sync", self.call(gil, |m| &m.transfer, &arguments))
        })?;
        Ok(Target { session: session.to_owned(), segment: 0 })
    }

    fn submit(&self, to: &Target, runs: &[Run], tickets: &mut Vec<Ticket>) -> Result<(), String> {
        self.interpreter.with(|gil| {
            // One batch per run: for a batch of several runs, Python only tells the state of the first.
            for run in runs {
                let arguments = [
                    Value::Text(&to.session),
                    Value::Numbers(&[run.from]),
                    Value::Numbers(&[run.to]),
                    Value::Numbers(&[run.length]),
                ];
                let batch = gil.unsigned(&self.call(gil, |m| &m.write, &arguments)?)?;
                // 0 says that Mooncake refused. -1 is what a failed opening leaves.
                if batch == 0 || batch as i64 == -1 {
                    return Err("Mooncake's batch_transfer_async_write refused".to_owned());
                }
                tickets.push(Ticket { batch, runs: 1, ended: 0 });
            }
            Ok(())
        })
    }

    fn poll(&self, ticket: &mut Ticket) -> State {
        let answer = self.interpreter.with(|gil| {
            self.call(gil, |m| &m.status, &[Value::Unsigned(ticket.batch)])
                .and_then(|answer| gil.int(&answer))
        });
        match answer {
            Ok(1) => State::Done,
            Ok(-1) => State::Failed,
            // -2 is a deadline that Mooncake's user may set. The write goes on. An exception says nothing about the write.
            _ => State::Running,
        }
    }

    fn notify(&self, session: &str, text: &str, look: bool) -> Result<(), Undelivered> {
        let other = Undelivered::Other;
        let said = self.interpreter.with(|gil| {
            if look {
                // The write below would not report a peer that is gone.
                let probed = self.call(gil, |m| &m.probe, &[Value::Text(session)]);
                match probed.and_then(|answer| gil.int(&answer)).map_err(other)? {
                    0 => {}
                    REFUSED => return Err(Undelivered::Refused),
                    code => return Err(other(format!("Mooncake's send_probe answered {code}"))),
                }
            }
            let words = [Value::Text(MESSAGE_NAME), Value::Text(text)];
            let message = gil.call(&self.notify_class, &words).map_err(other)?;
            // A write of no bytes, which is done at once, carries the message.
            let arguments = [
                Value::Text(session),
                Value::Unsigned(0),
                Value::Unsigned(0),
                Value::Unsigned(0),
                Value::Object(&self.opcode),
                Value::Object(&message),
            ];
            must(gil, "transfer_sync", self.call(gil, |m| &m.transfer, &arguments)).map_err(other)
        });
        match said {
            // Mooncake gives this answer for every error of a socket, also for errors of this process.
            Err(Undelivered::Refused) => super::look_for(session)
                .and_then(|()| Err(other("Mooncake's send_probe answered -102".to_owned()))),
            said => said,
        }
    }

    fn messages(&self) -> Vec<String> {
        self.interpreter.with(|gil| {
            let taken = self.call(gil, |m| &m.notifies, &[]).and_then(|list| gil.items(&list));
            let read = |message: &Object| {
                let part = |name| gil.text(&gil.attribute(message, name)?);
                (part("name")? == MESSAGE_NAME).then(|| part("msg")).transpose()
            };
            // A message that is no text is not from this plugin.
            taken.unwrap_or_default().iter().filter_map(|message| read(message).ok().flatten()).collect()
        })
    }
}

impl Drop for PythonEngine {
    fn drop(&mut self) {
        let methods = self.methods.take();
        super::end_quickly(super::idle_connections::port(&self.session).as_slice(), super::VAIN, || {
            drop(methods)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_whose_port_was_taken_is_made_again_and_no_other_failure_is() {
        let after = |failures: usize, why: &'static str| {
            let mut made = 0;
            let result = until_ports_are_free(|| {
                made += 1;
                if made > failures { Ok(()) } else { Err(why.to_owned()) }
            });
            (result.is_ok(), made)
        };
        let taken = "RuntimeError: bind: Address already in use";
        assert_eq!(after(0, taken), (true, 1));
        assert_eq!(after(TRIES - 1, taken), (true, TRIES));
        assert_eq!(after(TRIES, taken), (false, TRIES));
        assert_eq!(after(1, "Mooncake's initialize answered -1"), (false, 1));
    }
}
