//! How the two ends of a connection check each other.

use tokio::net::UnixStream;

use super::Tls;
use super::address::Address;

/// The credentials by which both ends of a connection check each other.
#[derive(Clone, Debug)]
pub enum Credentials {
    /// None: every process that reaches an address is trusted.
    None,
    /// The user of the process at the other end of a Unix socket: it must be this process's user, or root.
    SameUser,
    /// Certificates of the cluster's authority.
    Tls(Tls),
}

/// The address is of a kind that this process's credentials do not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{address} is {of}, and this process speaks {own} on its control plane: all processes of a cluster do alike"
)]
pub struct Mismatch {
    address: Address,
    of: &'static str,
    own: &'static str,
}

impl Credentials {
    /// Checks that these credentials fit an address.
    ///
    /// # Errors
    /// When peers at the address are checked by other credentials, or by none: connecting would bypass the check.
    pub fn fit(&self, address: &Address) -> Result<(), Mismatch> {
        let (plain, tls, unix) = ("plain text over TCP", "TLS", "over Unix sockets");
        let of = match address {
            Address::Plain(_) => plain,
            Address::Tls(_) => tls,
            Address::Unix(_) => unix,
        };
        let own = match self {
            Credentials::None => plain,
            Credentials::Tls(_) => tls,
            Credentials::SameUser => unix,
        };
        if of == own { Ok(()) } else { Err(Mismatch { address: address.clone(), of, own }) }
    }
}

/// The other process belongs to another user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is a process of user {theirs}, and this one belongs to user {ours}")]
pub(super) struct OtherUser {
    theirs: u32,
    ours: u32,
}

/// Checks that the process at the other end belongs to this user, or to root.
///
/// # Errors
/// When it belongs to another user, or when the system does not tell the user.
pub fn check_user(connection: &UnixStream) -> std::io::Result<()> {
    let theirs = connection.peer_cred()?.uid();
    same_user(theirs, rustix::process::geteuid().as_raw())
        .map_err(|other| std::io::Error::new(std::io::ErrorKind::PermissionDenied, other))
}

fn same_user(theirs: u32, ours: u32) -> Result<(), OtherUser> {
    if theirs == ours || theirs == 0 { Ok(()) } else { Err(OtherUser { theirs, ours }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_user_and_root_are_accepted() {
        assert_eq!(same_user(1000, 1000), Ok(()));
        assert_eq!(same_user(0, 1000), Ok(()));
        assert_eq!(same_user(1000, 0), Err(OtherUser { theirs: 1000, ours: 0 }));
        let other = same_user(1001, 1000).unwrap_err().to_string();
        assert!(other.contains("1001") && other.contains("1000"), "{other}");
    }

    #[test]
    fn an_address_of_another_kind_is_not_connected_to() {
        for (credentials, fits) in [(Credentials::None, "http://a:1"), (Credentials::SameUser, "unix:/a")] {
            for text in ["http://a:1", "https://a:1", "unix:/a"] {
                assert_eq!(
                    credentials.fit(&text.parse().unwrap()).is_ok(),
                    text == fits,
                    "{credentials:?} {text}"
                );
            }
        }
        let error = Credentials::SameUser.fit(&"http://a:1".parse().unwrap()).unwrap_err().to_string();
        assert!(error.contains("http://a:1 is plain text") && error.contains("Unix sockets"), "{error}");
    }
}
