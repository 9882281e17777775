//! One connection of the control plane, over TCP, TLS or a Unix socket.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::oneshot;
use tokio_rustls::TlsStream;
use tonic::transport::server::Connected;

use super::unread::Unread;
use crate::shares::Share;

/// The bytes of a connection.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// An accepted connection, whose other end was checked.
#[derive(Debug)]
pub(super) struct Connection {
    pub stream: Stream,
    /// Its place among a listener's connections.
    pub place: ConnectionPlace,
    /// The limit of answers that the client leaves unread.
    pub unread: Unread,
}

/// A place among a listener's connections, until dropped.
#[derive(Debug)]
pub(super) enum ConnectionPlace {
    /// For as long as the connection lasts.
    Lasting { _share: Share },
    /// Until a newer connection takes it: then this receiver gets a message.
    Passing(oneshot::Receiver<()>),
    /// Until the connection ends by itself: the listener is gone, and no newer one comes.
    Last,
    /// A newer connection has it.
    Taken,
}

impl ConnectionPlace {
    /// Fails once a newer connection has the place. Otherwise the task is woken when that happens.
    fn keep(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if let ConnectionPlace::Passing(taken) = self
            && let Poll::Ready(said) = Pin::new(taken).poll(context)
        {
            *self = if said.is_ok() { ConnectionPlace::Taken } else { ConnectionPlace::Last };
        }
        match self {
            ConnectionPlace::Taken => Err(io::ErrorKind::ConnectionAborted.into()),
            ConnectionPlace::Lasting { .. } | ConnectionPlace::Passing(_) | ConnectionPlace::Last => Ok(()),
        }
    }
}

/// Calls a method of the stream, of whichever kind it is.
macro_rules! each {
    ($self:ident, $method:ident($($argument:expr),*)) => {
        match $self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).$method($($argument),*),
            Stream::Unix(stream) => Pin::new(stream).$method($($argument),*),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).$method($($argument),*),
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        each!(self, poll_read(context, into))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        each!(self, poll_write(context, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, poll_shutdown(context))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        each!(self, poll_write_vectored(context, pieces))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Stream::Tcp(stream) => stream.is_write_vectored(),
            Stream::Unix(stream) => stream.is_write_vectored(),
            Stream::Tls(stream) => stream.is_write_vectored(),
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let connection = self.get_mut();
        connection.place.keep(context)?;
        Pin::new(&mut connection.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let connection = self.get_mut();
        connection.place.keep(context)?;
        Pin::new(&mut connection.stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let connection = self.get_mut();
        connection.place.keep(context)?;
        Pin::new(&mut connection.stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let connection = self.get_mut();
        connection.place.keep(context)?;
        Pin::new(&mut connection.stream).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

impl Connected for Connection {
    type ConnectInfo = Unread;

    fn connect_info(&self) -> Unread {
        self.unread.clone()
    }
}
