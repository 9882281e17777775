use std::os::unix::fs::PermissionsExt;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;
use crate::endpoint::authority::{Authority, Issued, Validity};

fn write(path: &Path, text: &str, mode: u32) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::set_permissions(&new, PermissionsExt::from_mode(mode)).unwrap();
    std::fs::rename(new, path).unwrap();
}

struct Files {
    folder: tempfile::TempDir,
    authority: Authority,
}

impl Files {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), authority: Authority::new(Validity::Days(2)).unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn issue(&self, name: &str) -> Issued {
        self.authority.issue_server(&[name.to_owned(), "127.0.0.1".to_owned()], Validity::Days(1)).unwrap()
    }

    /// Writes the key first. A reader between the two writes finds files that do not fit.
    fn put(&self, issued: &Issued) {
        write(&self.path("key.pem"), &issued.key.serialize_pem(), 0o600);
        write(&self.path("cert.pem"), &issued.certificate.pem(), 0o644);
    }

    fn load(&self) -> Result<ApiTls, String> {
        ApiTls::load(&self.path("cert.pem"), &self.path("key.pem")).map_err(|error| error.to_string())
    }

    fn trust(&self) -> Authorities {
        write(&self.path("ca.pem"), &self.authority.certificate().pem(), 0o644);
        Authorities::of_file(&self.path("ca.pem")).unwrap()
    }
}

/// Makes one connection to a server. Returns what the server sends, or why the client refuses the server.
async fn exchange(server: &ApiTls, client: &Authorities, name: &str) -> Result<String, io::Error> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = server.clone();
    tokio::spawn(async move {
        let (connection, _) = listener.accept().await.unwrap();
        if let Ok(mut accepted) = server.accept(connection).await {
            drop(accepted.write_all(b"served").await);
            drop(accepted.shutdown().await);
        }
    });
    let mut connection = client.connect(name, TcpStream::connect(address).await.unwrap()).await?;
    let mut said = String::new();
    connection.read_to_string(&mut said).await?;
    Ok(said)
}

#[tokio::test]
async fn a_client_takes_a_server_of_its_authority_and_name_alone() {
    let (files, other) = (Files::new(), Files::new());
    files.put(&files.issue("api.example"));
    let server = files.load().unwrap();
    for name in ["api.example", "127.0.0.1"] {
        assert_eq!(exchange(&server, &files.trust(), name).await.unwrap(), "served", "{name}");
    }
    for (client, name) in
        [(files.trust(), "other.example"), (files.trust(), "::1"), (other.trust(), "127.0.0.1")]
    {
        let refused = exchange(&server, &client, name).await.unwrap_err();
        assert!(is_untrusted(&refused), "{name}: {refused}");
    }
}

#[tokio::test]
async fn a_new_certificate_is_used_at_once_and_files_that_do_not_fit_change_nothing() {
    let files = Files::new();
    files.put(&files.issue("one.example"));
    let server = files.load().unwrap();
    let client = files.trust();
    exchange(&server, &client, "one.example").await.unwrap();
    let next = files.issue("two.example");
    write(&files.path("key.pem"), &next.key.serialize_pem(), 0o600);
    exchange(&server, &client, "one.example").await.unwrap();
    files.put(&next);
    exchange(&server, &client, "two.example").await.unwrap();
    assert!(is_untrusted(&exchange(&server, &client, "one.example").await.unwrap_err()));
    std::fs::remove_file(files.path("key.pem")).unwrap();
    exchange(&server, &client, "two.example").await.unwrap();
}

#[test]
fn files_that_cannot_serve_are_refused_with_the_reason() {
    let files = Files::new();
    let refused = || files.load().unwrap_err();
    assert!(refused().contains("cert.pem cannot be read"), "{}", refused());
    let (own, odd) = (files.issue("a.example"), files.issue("a.example"));
    files.put(&own);
    files.load().unwrap();
    for (file, text, mode, says) in [
        ("cert.pem", "nothing".to_owned(), 0o644, "cert.pem: it holds no certificate"),
        ("cert.pem", odd.certificate.pem(), 0o644, "key.pem: it is not the key of the certificate in"),
        ("key.pem", own.certificate.pem(), 0o600, "key.pem: it holds no private key"),
        ("key.pem", own.key.serialize_pem(), 0o644, "chmod 600"),
    ] {
        write(&files.path(file), &text, mode);
        assert!(refused().contains(says), "{says}: {}", refused());
        files.put(&own);
    }
    std::fs::remove_file(files.path("key.pem")).unwrap();
    assert!(refused().contains("key.pem cannot be read"), "{}", refused());
    let trust = Authorities::of_file(&files.path("none.pem")).unwrap_err().to_string();
    assert!(trust.contains("none.pem cannot be read"), "{trust}");
}

#[test]
fn a_certificates_last_second_is_known_and_one_that_has_expired_is_still_shown() {
    let files = Files::new();
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let mut parameters = rcgen::CertificateParams::new(vec!["a.example".to_owned()]).unwrap();
    parameters.not_after = rcgen::date_time_ymd(2001, 9, 9);
    let certificate = parameters.self_signed(&key).unwrap();
    files.put(&Issued { certificate, key });
    let loaded = files.load().unwrap().0.now();
    // 2001-09-09, midnight.
    assert_eq!(loaded.expires.at, 999_993_600);
    assert!(loaded.expires.told.load(Ordering::Relaxed));
    files.put(&files.issue("a.example"));
    let loaded = files.load().unwrap().0.now();
    let left = loaded.expires.at - clock::unix_seconds();
    assert!((86_000..=86_400).contains(&left), "{left}");
    assert!(!loaded.expires.told.load(Ordering::Relaxed));
}

#[test]
fn no_certificate_of_a_server_has_the_clusters_name() {
    let files = Files::new();
    let refused = files.authority.issue_server(&["Host-Cluster".to_owned()], Validity::Always).err().unwrap();
    assert!(refused.to_string().contains("host-cluster is the name of all processes"), "{refused}");
}
