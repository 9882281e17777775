//! Repository commands: `cargo xtask demo` and `cargo xtask test`.

fn main() -> anyhow::Result<()> {
    anyhow::bail!("no command yet")
}
