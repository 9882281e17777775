// The part that the example of README.md leaves to its author: the trait, as short as possible. It moves no bytes.

const MANIFEST: &str = concat!(
    "manifest_version = 1\n\n[plugin]\nid = \"com.example.wire\"\nname = \"wire\"\nversion = \"",
    env!("CARGO_PKG_VERSION"),
    "\"\ndescription = \"An example\"\n\n[[role]]\nkind = \"transfer\"\nmemory = [\"dram\"]\ncapabilities = []\n"
);

struct Wire;

impl Wire {
    fn listen(_name: &str) -> host_plugin_api::Result<Self> {
        Ok(Self)
    }
}

fn unsupported<T>() -> host_plugin_api::Result<T> {
    Err(host_plugin_api::Error::new(host_plugin_api::ErrorCode::UNSUPPORTED, "an example moves nothing"))
}

impl host_plugin_api::TransferBackend for Wire {
    fn limits(&self) -> host_plugin_api::TransferLimits {
        host_plugin_api::TransferLimits::new(1, 1)
    }
    fn register(
        &self,
        _memory: &host_plugin_api::Memory,
    ) -> host_plugin_api::Result<host_plugin_api::RegionId> {
        unsupported()
    }
    fn deregister(&self, _region: host_plugin_api::RegionId) -> host_plugin_api::Result<()> {
        unsupported()
    }
    fn endpoint(&self) -> host_plugin_api::Result<Vec<u8>> {
        unsupported()
    }
    fn connect(&self, _name: &str, _endpoint: &[u8]) -> host_plugin_api::Result<host_plugin_api::PeerId> {
        unsupported()
    }
    fn disconnect(&self, _peer: host_plugin_api::PeerId) -> host_plugin_api::Result<()> {
        unsupported()
    }
    fn submit(&self, _submission: &host_plugin_api::Submission, _writes: &[host_plugin_api::Write]) -> i32 {
        host_plugin_api::ErrorCode::UNSUPPORTED.0
    }
    fn poll(&self, _completions: &mut [host_plugin_api::Completion]) -> i32 {
        0
    }
    fn notifications(&self, _notifications: &mut [host_plugin_api::Notification]) -> i32 {
        0
    }
    fn cancel(&self, _tag: host_plugin_api::Tag) -> i32 {
        host_plugin_api::ErrorCode::INVALID_ARGUMENT.0
    }
    fn settled(&self, _tag: host_plugin_api::Tag) -> i32 {
        1
    }
    fn event_fd(&self) -> i32 {
        -1
    }
    fn shutdown(&self, _deadline_ms: u64) -> host_plugin_api::Result<()> {
        Ok(())
    }
}
