//! SGLang's file storage, in a process of its own: `hicache_file.py`.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child as Process, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use crate::ways::{Bench, Measured, forget, sync};

pub struct Child {
    pipes: RefCell<(ChildStdin, BufReader<ChildStdout>)>,
    process: Process,
}

impl Child {
    /// Starts the process. None unless `STORAGE_PYTHON` and `STORAGE_WHEEL` are set.
    pub fn start() -> Option<Self> {
        let (python, wheel) = (std::env::var_os("STORAGE_PYTHON")?, std::env::var_os("STORAGE_WHEEL")?);
        let mut process = Command::new(python)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/hicache_file.py"))
            .arg(wheel)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let pipes = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        Some(Self { pipes: RefCell::new(pipes), process })
    }

    fn run(&self, what: &str, bench: &Bench) -> Measured {
        let (to, from) = &mut *self.pipes.borrow_mut();
        let start = Instant::now();
        let dir = bench.dir.join("sglang");
        writeln!(to, "{what} {} {} {}", bench.pages, bench.page, dir.display()).unwrap();
        let mut line = String::new();
        from.read_line(&mut line).unwrap();
        if what == "set" {
            sync(&bench.dir);
        }
        let seconds = start.elapsed().as_secs_f64();
        let (processor, good) =
            line.trim().split_once(' ').unwrap_or_else(|| panic!("HiCacheFile says {line:?}"));
        let good: f64 = good.parse().unwrap();
        Measured { seconds, processor: processor.parse().unwrap(), kept: good / bench.pages as f64 }
    }

    pub fn both(&self, bench: &Bench) -> [Measured; 2] {
        let write = self.run("set", bench);
        let dir = bench.dir.join("sglang");
        forget(&dir);
        let read = self.run("get", bench);
        std::fs::remove_dir_all(dir).unwrap();
        [write, read]
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // The process would end with its input. The kill ends it at once.
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}
