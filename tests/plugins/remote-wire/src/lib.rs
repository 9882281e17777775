//! A fake for tests: the backend over TCP, with a manifest that says that it reaches other machines.
//!
//! It runs in network namespaces that tests make. It sends bytes unencrypted, so it must not run in other networks.

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    transfer: host_plugin_wire::open,
}
