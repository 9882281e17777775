//! The binary `host`.

fn main() -> anyhow::Result<()> {
    anyhow::bail!("no command yet")
}
