//! The binary `host`.

use std::process::ExitCode;

fn main() -> ExitCode {
    host::cli::main()
}
