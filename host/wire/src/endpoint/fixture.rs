//! A server that counts the calls that reach it, and a client.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::{Address, Credentials, Listener, channel, serve};
use crate::proto::registry_client::RegistryClient;
use crate::proto::registry_server::{Registry, RegistryServer};
use crate::proto::{
    HeartbeatReply, HeartbeatRequest, LeaveReply, LeaveRequest, RegisterReply, RegisterRequest,
};

/// A server that counts the calls that reach it.
#[derive(Clone, Default)]
pub(super) struct Counting(Arc<AtomicUsize>);

impl Counting {
    pub fn calls(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    /// Serves on a listener for as long as the test lasts.
    pub fn on(&self, listener: Listener) -> Address {
        let address = listener.address().unwrap();
        tokio::spawn(serve(listener, self.routes(), std::future::pending()));
        address
    }

    pub fn routes(&self) -> Routes {
        Routes::new(RegistryServer::new(self.clone()))
    }
}

#[tonic::async_trait]
impl Registry for Counting {
    async fn register(&self, _: Request<RegisterRequest>) -> Result<Response<RegisterReply>, Status> {
        Err(Status::unimplemented("this server counts heartbeats"))
    }

    async fn heartbeat(&self, _: Request<HeartbeatRequest>) -> Result<Response<HeartbeatReply>, Status> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(Response::new(HeartbeatReply { known: true, warming: false }))
    }

    async fn leave(&self, _: Request<LeaveRequest>) -> Result<Response<LeaveReply>, Status> {
        Err(Status::unimplemented("this server counts heartbeats"))
    }
}

/// A client with a connection of its own.
pub(super) fn client(to: &Address, credentials: &Credentials) -> RegistryClient<tonic::transport::Channel> {
    RegistryClient::new(channel(to, credentials).unwrap())
}

/// Calls once, over a new connection.
pub(super) async fn ask(to: &Address, credentials: &Credentials) -> Result<(), String> {
    beat(&mut client(to, credentials)).await
}

/// Calls once.
pub(super) async fn beat(client: &mut RegistryClient<tonic::transport::Channel>) -> Result<(), String> {
    match client.heartbeat(HeartbeatRequest::default()).await {
        Ok(reply) => {
            assert!(reply.into_inner().known);
            Ok(())
        }
        Err(status) => Err(super::reason(&status)),
    }
}
