//! The receiving end of a connection: a thread that accepts, and one thread per connection.

use std::io::{Error, Read, Result, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;

use host_plugin_api::{ErrorCode, NOTIFICATION_BYTES, RegionId, Write};
use host_transfer_kit::Random;
use host_transfer_kit::threaded::{Inbound, MAX_PEERS, Station};

use crate::endpoint::{BUFFER, DATA, GOODBYE, WELCOME, patience};

pub fn accept(station: &Arc<Station>, listener: &TcpListener, token: Random) {
    let mut threads: Vec<std::thread::JoinHandle<()>> = Vec::new();
    for stream in listener.incoming() {
        if station.instance.is_stopping() {
            break;
        }
        threads.retain(|thread| !thread.is_finished());
        let Ok(stream) = stream else { continue };
        if threads.len() < MAX_PEERS {
            // When no thread can be started, the connection ends, which tells the peer.
            threads.extend(station.thread("receive", move |station| serve(station, stream, token)));
        }
    }
    // Cuts peers that said hello during the shutdown: the earlier cut did not cover them.
    station.memory.cut(|_| true);
    threads.into_iter().for_each(|thread| drop(thread.join()));
}

fn serve(station: &Arc<Station>, mut stream: TcpStream, token: Random) {
    let Ok(Some(name)) = hello(&mut stream, token) else { return };
    let Ok(ends) = stream.try_clone() else { return };
    let inbound = station.admit(&name, move || drop(ends.shutdown(Shutdown::Both)));
    let welcomed = !station.instance.is_stopping() && stream.write_all(&[WELCOME]).is_ok();
    let on_purpose = welcomed && receive(&inbound, &mut stream).is_ok();
    inbound.ended(on_purpose);
}

/// The peer's name, if it has the endpoint's token.
fn hello(stream: &mut TcpStream, token: Random) -> Result<Option<String>> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(patience(stream.peer_addr()?)))?;
    let mut start = [0; 17];
    stream.read_exact(&mut start)?;
    let mut name = vec![0; start[16].into()];
    stream.read_exact(&mut name)?;
    stream.set_read_timeout(None)?;
    let known = start[..16] == token && name.len() <= 64;
    Ok(String::from_utf8(name).ok().filter(|_| known))
}

/// Lands submissions until the peer says goodbye (`Ok`) or is lost.
fn receive(inbound: &Inbound, stream: &mut TcpStream) -> Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let mut kind = [0];
        stream.read_exact(&mut kind)?;
        match kind[0] {
            DATA => {}
            GOODBYE => return Ok(()),
            _ => return Err(Error::other("the peer speaks another protocol")),
        }
        let (writes, length) = (word(stream)?, word(stream)? as usize);
        let mut notification = [0; NOTIFICATION_BYTES];
        let notification =
            notification.get_mut(..length).ok_or_else(|| Error::other("a long notification"))?;
        stream.read_exact(notification)?;
        let mut status = 0;
        for _ in 0..writes {
            if !land(inbound, stream, &mut buffer)? {
                status = ErrorCode::INVALID_ARGUMENT.0;
            }
        }
        // All data of the submission is in memory: only now may the host learn of it.
        if status == 0 {
            inbound.arrived(notification);
        }
        stream.write_all(&status.to_le_bytes())?;
    }
}

/// Reads one write and lands it. Says whether it landed. Its bytes are read in any case, to get to the next write.
fn land(inbound: &Inbound, stream: &mut TcpStream, buffer: &mut [u8]) -> Result<bool> {
    let (region, target_generation, length) = (word(stream)?, word(stream)?, word(stream)?);
    let mut offset = [0; 8];
    stream.read_exact(&mut offset)?;
    let (target_region, target_offset) = (RegionId(region), u64::from_le_bytes(offset));
    let write = Write { target_region, target_offset, length, target_generation, ..Write::default() };
    let mut landed = true;
    for at in (0..length as usize).step_by(BUFFER) {
        let piece = &mut buffer[..(length as usize - at).min(BUFFER)];
        stream.read_exact(piece)?;
        landed &= inbound.land(&write, at, piece);
    }
    Ok(landed)
}

fn word(stream: &mut TcpStream) -> Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}
