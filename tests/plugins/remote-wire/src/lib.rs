//! A fake for tests: the backend over TCP, which says that it reaches other machines.
//!
//! It runs in network namespaces that tests make. Nothing that it sends is encrypted, so it is for no other network.

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    transfer: host_plugin_wire::open,
}
