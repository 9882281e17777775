//! Simulates a trace: `cargo run --release -p host-simulate --example simulate -- TRACE CLUSTER [REQUESTS] [SPEED]`.

use host_simulate::{Cluster, Options, Trace, simulate};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [trace, cluster, rest @ ..] = &arguments[..] else {
        return Err("give a trace and a cluster file".into());
    };
    let most = rest.first().map(|most| most.parse()).transpose()?;
    let speed = rest.get(1).map_or(Ok(1.0), |speed| speed.parse())?;
    let trace = Trace::parse(trace, &std::fs::read_to_string(trace)?, most)?;
    let cluster = Cluster::parse(cluster, &std::fs::read_to_string(cluster)?)?;
    print!("{}", simulate(&trace.into_workload(speed), &cluster, &Options::default(), &mut |_| {}));
    Ok(())
}
