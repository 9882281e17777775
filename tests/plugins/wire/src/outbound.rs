//! Sending: one connection and one thread per peer.

use std::io::{Read, Write as _};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode, Result, Submission, Write};

use crate::Shared;
use crate::inbound::{BUFFER, DATA, Endpoint, GOODBYE, WELCOME};

/// Time for a running submission to finish when its connection ends.
const FINISH: Duration = Duration::from_secs(1);

/// A peer that this instance writes to.
pub struct Peer {
    pub id: u32,
    pub name: String,
    address: IpAddr,
    stream: TcpStream,
    shared: Arc<Shared>,
    /// The host has asked for the end of the connection.
    ending: AtomicBool,
    /// The connection cannot be used any more.
    lost: AtomicBool,
    /// The thread has ended, and nothing is in flight to the peer.
    done: Mutex<bool>,
    ended: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Connects, gives this instance's name, and starts the thread.
pub fn connect(shared: &Arc<Shared>, id: u32, name: &str, endpoint: &Endpoint) -> Result<Arc<Peer>> {
    let failed =
        |error: std::io::Error| Error::new(ErrorCode::PEER_LOST, format!("{name} does not answer: {error}"));
    let address = IpAddr::V4(*endpoint.address.ip());
    let patience = crate::patience(address);
    let mut stream = TcpStream::connect_timeout(&endpoint.address.into(), patience).map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    stream.set_read_timeout(Some(patience)).map_err(failed)?;
    let mut hello = endpoint.to_bytes();
    hello.push(shared.name.len() as u8);
    hello.extend_from_slice(shared.name.as_bytes());
    stream.write_all(&hello).map_err(failed)?;
    let mut answer = [0];
    stream.read_exact(&mut answer).map_err(failed)?;
    if answer[0] != WELCOME {
        return Err(Error::new(ErrorCode::PEER_LOST, format!("{name} does not admit this instance")));
    }
    stream.set_read_timeout(None).map_err(failed)?;
    let peer = Arc::new(Peer {
        id,
        name: name.to_owned(),
        address,
        stream: stream.try_clone().map_err(failed)?,
        shared: Arc::clone(shared),
        ending: AtomicBool::new(false),
        lost: AtomicBool::new(false),
        done: Mutex::new(false),
        ended: Condvar::new(),
        thread: Mutex::default(),
    });
    let running = Arc::clone(&peer);
    let thread = std::thread::Builder::new().name("send".into());
    let thread = thread.spawn(move || running.run(stream)).map_err(failed)?;
    *crate::lock(&peer.thread) = Some(thread);
    Ok(peer)
}

impl Peer {
    pub fn address(&self) -> IpAddr {
        self.address
    }

    pub fn lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Ends the connection. True when it is proven in time that nothing lands at the peer any more. Else the thread keeps waiting
    /// for the proof, because bytes that the network holds back may still land.
    pub fn end(&self, deadline: Instant) -> bool {
        self.ending.store(true, Ordering::Release);
        self.shared.queues.wake();
        // A running submission may finish in a part of the time. Then it gets an error, instead of waiting for a peer that does
        // not read.
        let now = Instant::now();
        let finish = now + FINISH.min(deadline.saturating_duration_since(now) / 2);
        if !self.done_by(finish) {
            let _ended = self.stream.shutdown(Shutdown::Write);
            if !self.done_by(deadline) {
                return false;
            }
        }
        if let Some(thread) = crate::lock(&self.thread).take() {
            let _panicked = thread.join();
        }
        true
    }

    /// Ends the thread without the proof, for an instance that ends.
    pub fn abandon(&self) {
        let _gone = self.stream.shutdown(Shutdown::Both);
    }

    fn done_by(&self, deadline: Instant) -> bool {
        let mut done = crate::lock(&self.done);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if *done || left.is_zero() {
                return *done;
            }
            done = self.ended.wait_timeout(done, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn run(&self, mut stream: TcpStream) {
        let mut writes = Vec::with_capacity(crate::MAX_WRITES);
        let mut buffer = vec![0; BUFFER];
        let ending = || self.ending.load(Ordering::Acquire);
        while let Some((slot, submission)) = self.shared.queues.next(self.id, &mut writes, ending) {
            match self.send(&mut stream, &submission, &writes, &mut buffer) {
                Ok((status, bytes)) => self.shared.queues.complete(slot, status, bytes),
                Err(_lost) => break,
            }
        }
        self.lost.store(true, Ordering::Release);
        // The peer's thread answers the end of this stream with the end of its own, and lands nothing after that. Until then,
        // bytes that were sent may be on their way.
        if ending() || self.shared.queues.closed() {
            let _maybe_lost = stream.write_all(&[GOODBYE]);
        }
        let _maybe_lost = stream.shutdown(Shutdown::Write);
        while stream.read(&mut buffer).is_ok_and(|count| count > 0) {}
        self.shared.queues.fail_all(self.id);
        *crate::lock(&self.done) = true;
        self.ended.notify_all();
    }

    /// Sends one submission and waits for the peer's answer. One at a time, to keep this short: a faster backend sends
    /// the next while the answer is on its way.
    fn send(
        &self,
        stream: &mut TcpStream,
        submission: &Submission,
        writes: &[Write],
        buffer: &mut [u8],
    ) -> std::io::Result<(i32, u64)> {
        // All writes are checked before anything is sent: a submission with a write from outside of registered memory must land
        // nothing.
        let regions = &self.shared.regions;
        if !writes.iter().all(|w| regions.holds(w.source_region.0, None, w.source_offset, w.length)) {
            return Ok((ErrorCode::INVALID_ARGUMENT.0, 0));
        }
        let mut head = vec![DATA];
        head.extend_from_slice(&(writes.len() as u32).to_le_bytes());
        head.extend_from_slice(&submission.notification_length.to_le_bytes());
        head.extend_from_slice(&submission.notification);
        stream.write_all(&head)?;
        let mut bytes = 0;
        for write in writes {
            head.clear();
            for word in [write.target_region.0, write.target_generation, write.length] {
                head.extend_from_slice(&word.to_le_bytes());
            }
            head.extend_from_slice(&write.target_offset.to_le_bytes());
            stream.write_all(&head)?;
            let mut at = 0;
            while at < write.length as usize {
                let piece = (write.length as usize - at).min(BUFFER);
                if !regions.read(write.source_region.0, write.source_offset + at as u64, &mut buffer[..piece])
                {
                    // The region was deregistered meanwhile, which the host does not do to memory in use.
                    return Err(std::io::Error::other("the source is gone"));
                }
                stream.write_all(&buffer[..piece])?;
                at += piece;
            }
            bytes += u64::from(write.length);
        }
        let mut status = [0; 4];
        stream.read_exact(&mut status)?;
        Ok((i32::from_le_bytes(status), bytes))
    }
}
