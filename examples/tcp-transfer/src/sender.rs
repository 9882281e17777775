//! The sending end of a connection.

use std::io::{Error, Read, Result, Write as _};
use std::net::{Shutdown, TcpStream};

use host_transfer_kit::threaded::{Connection, Interrupt, Line, ThreadedPeer};
use host_transfer_kit::{Content, GuardedMemory};

use crate::endpoint::{BUFFER, DATA, Endpoint, GOODBYE, WELCOME, patience};

struct Sender {
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// Connects, and gives this instance's name.
pub fn connect(own_name: &str, endpoint: &Endpoint) -> Result<Connection> {
    let mut stream = TcpStream::connect_timeout(&endpoint.address, patience(endpoint.address))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(patience(endpoint.address)))?;
    stream.write_all(&[&endpoint.token[..], &[own_name.len() as u8], own_name.as_bytes()].concat())?;
    let mut answer = [0];
    stream.read_exact(&mut answer)?;
    if answer[0] != WELCOME {
        return Err(Error::other("it does not admit this instance"));
    }
    stream.set_read_timeout(None)?;
    let ends = stream.try_clone()?;
    let interrupt = Box::new(move |what| {
        let how = if what == Interrupt::Sending { Shutdown::Write } else { Shutdown::Both };
        let _ended = ends.shutdown(how);
    });
    Ok(Connection { line: Box::new(Sender { stream, buffer: vec![0; BUFFER] }), interrupt })
}

impl Line for Sender {
    /// Sends one submission and waits for its end, as a `Line` must. A backend that sends the next submission meanwhile
    /// implements `Backend` instead of `Network`, and keeps `GuardedMemory`.
    fn send(&mut self, submission: &Content<ThreadedPeer, ()>, memory: &GuardedMemory) -> Result<(i32, u64)> {
        let notification = submission.notification();
        let mut head = vec![DATA];
        head.extend_from_slice(&(submission.len() as u32).to_le_bytes());
        head.extend_from_slice(&(notification.len() as u32).to_le_bytes());
        head.extend_from_slice(notification);
        self.stream.write_all(&head)?;
        let mut bytes = 0;
        for write in submission.writes(0) {
            head.clear();
            for word in [write.target_region.0, write.target_generation, write.length] {
                head.extend_from_slice(&word.to_le_bytes());
            }
            head.extend_from_slice(&write.target_offset.to_le_bytes());
            self.stream.write_all(&head)?;
            for at in (0..write.length as usize).step_by(BUFFER) {
                let piece = &mut self.buffer[..(write.length as usize - at).min(BUFFER)];
                if !memory.read(&write, at, piece) {
                    // Unexpected: the host does not deregister memory that is in use.
                    return Err(Error::other("the source is gone"));
                }
                self.stream.write_all(piece)?;
            }
            bytes += u64::from(write.length);
        }
        let mut status = [0; 4];
        self.stream.read_exact(&mut status)?;
        Ok((i32::from_le_bytes(status), bytes))
    }

    fn end(&mut self, lost: bool) {
        if !lost {
            let _maybe_lost = self.stream.write_all(&[GOODBYE]);
        }
        // The peer answers the end of the data with the end of its own data, and lands nothing after that. Until then,
        // sent bytes may still be on their way.
        let _maybe_lost = self.stream.shutdown(Shutdown::Write);
        while self.stream.read(&mut self.buffer).is_ok_and(|count| count > 0) {}
    }
}
