//! The gRPC service that workers call.

use host_core::Instance;
use host_wire::audit::AUDIT;
use host_wire::{proto, protocol};
use tonic::{Request, Response, Status};

use super::Registry;

#[tonic::async_trait]
impl proto::registry_server::Registry for Registry {
    async fn register(
        &self,
        request: Request<proto::RegisterRequest>,
    ) -> Result<Response<proto::RegisterReply>, Status> {
        let proto::RegisterRequest { worker, load } = request.into_inner();
        let Some(worker) = worker else {
            return Err(Status::invalid_argument("the registration names no worker"));
        };
        let (name, role, instance) = (worker.name.clone(), worker.role.clone(), Instance(worker.instance));
        let ours = proto::RegisterReply {
            protocol_newest: protocol::NEWEST,
            protocol_oldest: protocol::OLDEST,
            ..proto::RegisterReply::default()
        };
        let reply = match Registry::register(self, worker).await {
            Ok(accepted) => {
                if let Some(load) = load {
                    self.heartbeat(instance, load);
                }
                tracing::info!(name, role, %instance, protocol = %accepted.protocol, "worker registered");
                let message = accepted.refused_pairs;
                if !message.is_empty() {
                    tracing::warn!(name, message, "pairs refused");
                }
                proto::RegisterReply { accepted: true, message, protocol: accepted.protocol.0, ..ours }
            }
            Err(message) => {
                tracing::warn!(target: AUDIT, name, role, %instance, message, "worker refused");
                proto::RegisterReply { accepted: false, message, ..ours }
            }
        };
        Ok(Response::new(reply))
    }

    async fn heartbeat(
        &self,
        request: Request<proto::HeartbeatRequest>,
    ) -> Result<Response<proto::HeartbeatReply>, Status> {
        let beat = request.into_inner();
        let reply = Registry::heartbeat(self, Instance(beat.instance), beat.load.unwrap_or_default());
        Ok(Response::new(reply))
    }

    async fn leave(
        &self,
        request: Request<proto::LeaveRequest>,
    ) -> Result<Response<proto::LeaveReply>, Status> {
        Registry::leave(self, Instance(request.into_inner().instance));
        Ok(Response::new(proto::LeaveReply {}))
    }
}
