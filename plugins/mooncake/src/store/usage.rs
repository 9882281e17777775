//! How much the pool holds. Mooncake's clients cannot ask for it, but the master's metrics show it.

use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::{Duration, Instant};

use host_plugin_api::TierUsage;

/// The port at which a master shows its metrics if it is not told otherwise.
pub const PORT: u16 = 9003;
/// Longest answer that is read.
const MOST: usize = 8 << 20;

/// Names of the master's metrics.
const VALUES: &str = "master_key_count";
const BYTES: &str = "master_allocated_bytes";
const CAPACITY: &str = "master_total_capacity_bytes";

/// Asks the master at the address of its metrics, within a time.
///
/// # Errors
/// What went wrong.
pub fn ask(address: &str, timeout: Duration) -> Result<TierUsage, String> {
    let said = fetch(address, timeout).map_err(|error| error.to_string())?;
    if said.split_whitespace().nth(1) != Some("200") {
        return Err(format!("it answers {:?}", said.lines().next().unwrap_or_default()));
    }
    let of = |name: &str| value(&said, name).ok_or_else(|| format!("it says nothing of {name}"));
    Ok(TierUsage { values: of(VALUES)?, bytes: of(BYTES)?, capacity: of(CAPACITY)?, reserved: [0; 5] })
}

fn fetch(address: &str, timeout: Duration) -> std::io::Result<String> {
    let deadline = Instant::now() + timeout;
    let place = address.to_socket_addrs()?.next();
    let place = place.ok_or_else(|| std::io::Error::other("the name has no address"))?;
    let mut stream = TcpStream::connect_timeout(&place, timeout)?;
    stream.set_write_timeout(Some(timeout))?;
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let (mut said, mut piece) = (Vec::new(), vec![0; 1 << 16]);
    while said.len() < MOST {
        let left = deadline.saturating_duration_since(Instant::now());
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(read) => said.extend_from_slice(&piece[..read]),
            // This process was stopped and goes on.
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(String::from_utf8_lossy(&said).into_owned())
}

/// The sum of a metric's samples, or `None` if there are no samples.
fn value(said: &str, name: &str) -> Option<u64> {
    let samples =
        said.lines().filter_map(|line| line.strip_prefix(name)).filter(|rest| rest.starts_with([' ', '{']));
    let numbers = samples.filter_map(|rest| rest.split_whitespace().last()?.parse::<f64>().ok());
    numbers.map(|number| number.max(0.0) as u64).reduce(u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn answered(answer: &str) -> Result<TierUsage, String> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    stream.read_exact(&mut byte).unwrap();
                    request.push(byte[0]);
                }
                assert!(request.starts_with(b"GET /metrics HTTP/1.1\r\n"));
                stream.write_all(answer.as_bytes()).unwrap();
            });
            ask(&address, Duration::from_secs(60))
        })
    }

    #[test]
    fn a_pools_usage_is_what_its_master_counts() {
        let text = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n# HELP master_key_count keys\n# TYPE master_key_count gauge\n\
                    master_key_count 7\nmaster_key_count_of_others 9\nmaster_allocated_bytes 1.5e6\n\
                    master_total_capacity_bytes{segment=\"a b\"} 4000000\nmaster_total_capacity_bytes{segment=\"c\"} 1\n";
        let usage = answered(text).unwrap();
        assert_eq!((usage.values, usage.bytes, usage.capacity), (7, 1_500_000, 4_000_001));
        let without = text.replace("master_allocated_bytes", "another");
        assert!(answered(&without).unwrap_err().contains("nothing of master_allocated_bytes"));
        assert!(answered("HTTP/1.1 404 Not Found\r\n\r\n").unwrap_err().contains("404"));
        assert!(answered("").unwrap_err().contains("it answers \"\""));
    }
}
