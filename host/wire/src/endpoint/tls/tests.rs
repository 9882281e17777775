use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use host_tests::wait::answered_until;
use tokio::io::AsyncReadExt as _;

use super::*;
use crate::endpoint::authority::{Authority, Issued, Validity};
use crate::endpoint::fixture::{Counting, ask, beat, client};
use crate::endpoint::{Address, Credentials, HANDSHAKE, ListenAt, Listener};

const ONE: &str = "0123456789abcdef0123456789abcdef";
const OTHER: &str = "fedcba9876543210fedcba9876543210";

/// Replaces a file in one step, as tools that distribute secrets do.
fn replace(path: &Path, text: &str, mode: u32) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::set_permissions(&new, PermissionsExt::from_mode(mode)).unwrap();
    std::fs::rename(new, path).unwrap();
}

/// A process whose secrets are these lines.
fn with_secrets(folder: &Path, file: &str, lines: &[&str]) -> Tls {
    let path = folder.join(file);
    replace(&path, &lines.join("\n"), 0o600);
    Tls::load(TlsSource::Secret(path)).unwrap()
}

fn write_certificates(folder: &Path, trusted: &[&Authority], own: &Issued) {
    std::fs::create_dir_all(folder).unwrap();
    let trusted: Vec<String> = trusted.iter().map(|authority| authority.certificate().pem()).collect();
    replace(&folder.join("ca.pem"), &trusted.concat(), 0o644);
    replace(&folder.join("cert.pem"), &own.certificate.pem(), 0o644);
    replace(&folder.join("key.pem"), &own.key.serialize_pem(), 0o600);
}

fn with_certificates(folder: &Path, trusted: &[&Authority], own: &Issued) -> Tls {
    write_certificates(folder, trusted, own);
    Tls::load(TlsSource::Certificates(folder.to_owned())).unwrap()
}

async fn listener(tls: &Tls) -> Listener {
    Listener::bind(&ListenAt::loopback(), Credentials::Tls(tls.clone())).await.unwrap()
}

async fn ask_as(address: &Address, tls: &Tls) -> Result<(), String> {
    ask(address, &Credentials::Tls(tls.clone())).await
}

#[tokio::test]
async fn a_secret_makes_a_cluster_and_another_secret_makes_another() {
    let folder = tempfile::tempdir().unwrap();
    let [one, same, other] = [("a", ONE), ("b", ONE), ("c", OTHER)]
        .map(|(file, secret)| with_secrets(folder.path(), file, &[secret]));
    let server = Counting::default();
    let address = server.on(listener(&one).await);
    assert!(address.to_string().starts_with("https://127.0.0.1:"), "{address}");
    ask_as(&address, &same).await.unwrap();
    assert_eq!(server.calls(), 1);
    let refused = ask_as(&address, &other).await.unwrap_err();
    assert!(refused.contains("certificate"), "{refused}");
    assert_eq!(server.calls(), 1);
}

#[tokio::test]
async fn certificates_of_one_authority_make_a_cluster() {
    let folder = tempfile::tempdir().unwrap();
    let [one, other] = [(); 2].map(|()| Authority::new(Validity::Days(2)).unwrap());
    let issue = |authority: &Authority| authority.issue(Validity::Days(1)).unwrap();
    let own = with_certificates(&folder.path().join("a"), &[&one], &issue(&one));
    let same = with_certificates(&folder.path().join("b"), &[&one], &issue(&one));
    let stranger = with_certificates(&folder.path().join("c"), &[&other], &issue(&other));
    // This client trusts the server's authority, but its own certificate is from an authority that the server does not trust.
    let liar = with_certificates(&folder.path().join("d"), &[&one], &issue(&other));
    let server = Counting::default();
    let address = server.on(listener(&own).await);
    ask_as(&address, &same).await.unwrap();
    for (refused, says) in [(&stranger, "its certificate is of another cluster"), (&liar, "alert")] {
        let why = ask_as(&address, refused).await.unwrap_err();
        assert!(why.contains(says), "{why}");
    }
    assert_eq!(server.calls(), 1);
}

#[tokio::test]
async fn a_client_without_a_certificate_is_told_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let tls = with_secrets(folder.path(), "a", &[ONE]);
    let server = Counting::default();
    let address = server.on(listener(&tls).await);
    let Address::Tls(host) = &address else { panic!("{address}") };
    // The client knows the authority's certificate, which is not secret.
    let mut roots = RootCertStore::empty();
    roots.add(Authority::from_secret(ONE.as_bytes()).unwrap().certificate().der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let connection = TcpStream::connect((host.name.as_str(), host.port)).await.unwrap();
    let mut connection =
        TlsConnector::from(Arc::new(config)).connect(name().unwrap(), connection).await.unwrap();
    let mut answer = Vec::new();
    let ended = connection.read_to_end(&mut answer).await;
    assert!(ended.is_err() && answer.is_empty(), "{ended:?} {answer:?}");
    // A client that does not speak TLS is refused, too.
    let plain = Address::Plain(host.clone());
    ask(&plain, &Credentials::None).await.unwrap_err();
    assert_eq!(server.calls(), 0);
}

#[tokio::test]
async fn a_certificate_that_names_something_else_or_has_expired_is_refused_on_both_sides() {
    let folder = tempfile::tempdir().unwrap();
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let mut parameters = rcgen::CertificateParams::new(Vec::new()).unwrap();
    parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let root = parameters.self_signed(&key).unwrap();
    let issuer = rcgen::Issuer::new(parameters, key);
    // A company's authority may sign certificates for other services, too.
    let of = |file: &str, name: &str, last_year: i32| {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
        let mut parameters = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        parameters.not_after = rcgen::date_time_ymd(last_year, 1, 1);
        let certificate = parameters.signed_by(&key, &issuer).unwrap();
        let at = folder.path().join(file);
        write_certificates(&at, &[], &Issued { certificate, key });
        replace(&at.join("ca.pem"), &root.pem(), 0o644);
        Tls::load(TlsSource::Certificates(at)).unwrap()
    };
    let (own, same) = (of("a", NAME, 4000), of("b", NAME, 4000));
    let (other, expired) = (of("c", "mail.example", 4000), of("d", NAME, 2000));
    let server = Counting::default();
    let address = server.on(listener(&own).await);
    ask_as(&address, &same).await.unwrap();
    for refused in [&other, &expired] {
        ask_as(&address, refused).await.unwrap_err();
        let address = server.on(listener(refused).await);
        let why = ask_as(&address, &own).await.unwrap_err();
        assert!(why.contains("certificate"), "{why}");
    }
    assert_eq!(server.calls(), 1);
}

#[tokio::test]
async fn a_secret_is_replaced_without_an_interruption() {
    let folder = tempfile::tempdir().unwrap();
    let files = ["a", "b"];
    let [one, other] = files.map(|file| with_secrets(folder.path(), file, &[ONE]));
    let server = Counting::default();
    let address = server.on(listener(&one).await);
    let mut open = client(&address, &Credentials::Tls(other.clone()));
    beat(&mut open).await.unwrap();
    // The steps of the documentation: the new secret is known everywhere, then used, then the old one is removed. Processes
    // change one by one.
    for lines in [vec![ONE, OTHER], vec![OTHER, ONE], vec![OTHER]] {
        for file in files {
            replace(&folder.path().join(file), &lines.join("\n"), 0o600);
            ask_as(&address, &other).await.unwrap();
        }
    }
    let late = with_secrets(folder.path(), "late", &[ONE]);
    ask_as(&address, &late).await.unwrap_err();
    beat(&mut open).await.unwrap();
    assert_eq!(server.calls(), 1 + 6 + 1);
}

#[tokio::test]
async fn an_authority_is_replaced_and_files_that_do_not_fit_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let [one, other] = [(); 2].map(|()| Authority::new(Validity::Days(1)).unwrap());
    let issue = |authority: &Authority| authority.issue(Validity::Days(1)).unwrap();
    let at = folder.path().join("a");
    let own = with_certificates(&at, &[&one], &issue(&one));
    let old = with_certificates(&folder.path().join("b"), &[&one], &issue(&one));
    let new = with_certificates(&folder.path().join("c"), &[&one, &other], &issue(&other));
    let server = Counting::default();
    let address = server.on(listener(&own).await);
    ask_as(&address, &old).await.unwrap();
    ask_as(&address, &new).await.unwrap_err();
    // A change that is half done: a certificate without its key.
    replace(&at.join("cert.pem"), &issue(&one).certificate.pem(), 0o644);
    ask_as(&address, &old).await.unwrap();
    replace(&at.join("ca.pem"), "nothing", 0o644);
    ask_as(&address, &old).await.unwrap();
    write_certificates(&at, &[&other], &issue(&other));
    ask_as(&address, &new).await.unwrap();
    ask_as(&address, &old).await.unwrap_err();
    assert_eq!(server.calls(), 4);
}

#[test]
fn files_that_are_open_to_others_or_hold_something_else_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("secret");
    let load = || Tls::load(TlsSource::Secret(path.clone())).map(drop).map_err(|error| error.to_string());
    assert!(load().unwrap_err().contains("cannot be read"));
    for (text, mode, says) in [
        (ONE, 0o644, "mode 644"),
        (ONE, 0o620, "chmod 600"),
        ("", 0o600, "host certs secret"),
        ("short", 0o600, "at least 32"),
        (&format!("{ONE}\nshort\n"), 0o600, "at least 32"),
        (&"0123012".repeat(8), 0o600, "can be guessed"),
    ] {
        replace(&path, text, mode);
        let refused = load().unwrap_err();
        assert!(refused.contains(says) && !refused.contains("0123"), "{refused}");
    }
    std::fs::write(&path, [0xff; 64]).unwrap();
    assert!(load().unwrap_err().contains("random characters"));
    replace(&path, &format!("{ONE}\n\n"), 0o440);
    load().unwrap();

    let at = folder.path().join("certs");
    let authority = Authority::new(Validity::Days(1)).unwrap();
    let (own, odd) =
        (authority.issue(Validity::Days(1)).unwrap(), authority.issue(Validity::Days(1)).unwrap());
    write_certificates(&at, &[&authority], &own);
    let load = || Tls::load(TlsSource::Certificates(at.clone())).map(drop).map_err(|error| error.to_string());
    load().unwrap();
    for (file, text, mode, says) in [
        ("key.pem", own.key.serialize_pem(), 0o644, "mode 644"),
        ("key.pem", authority.certificate().pem(), 0o600, "no private key"),
        ("key.pem", odd.key.serialize_pem(), 0o600, ""),
        ("ca.pem", own.key.serialize_pem(), 0o644, "no certificate"),
        ("cert.pem", String::new(), 0o644, "no certificate"),
        ("ca.pem", authority.certificate().pem(), 0o646, "chmod o-w"),
    ] {
        replace(&at.join(file), &text, mode);
        let refused = load().unwrap_err();
        assert!(refused.contains(says) && refused.contains("certs"), "{file}: {refused}");
        write_certificates(&at, &[&authority], &own);
    }
}

#[test]
fn what_is_shown_for_debugging_has_no_secret() {
    let folder = tempfile::tempdir().unwrap();
    let tls = with_secrets(folder.path(), "a", &[ONE]);
    let shown = format!("{:?}", Credentials::Tls(tls));
    assert!(shown.contains("Secret") && !shown.contains(ONE), "{shown}");
}

/// A TCP connection to an address that has sent nothing.
async fn silent(address: &Address) -> TcpStream {
    let (Address::Tls(host) | Address::Plain(host)) = address else { panic!("{address}") };
    TcpStream::connect((host.name.as_str(), host.port)).await.unwrap()
}

/// Credentials with certificates, and none.
fn both(folder: &Path) -> [Credentials; 2] {
    [Credentials::Tls(with_secrets(folder, "a", &[ONE])), Credentials::None]
}

#[tokio::test]
async fn a_connection_that_shows_nothing_is_closed_in_time() {
    let folder = tempfile::tempdir().unwrap();
    for credentials in both(folder.path()) {
        let listener = Listener::bind(&ListenAt::loopback(), credentials.clone()).await.unwrap();
        let address = Counting::default().on(listener);
        let before = crate::clock::now();
        let mut silent = silent(&address).await;
        // A later connection is answered, so this one was accepted, which takes real time. From here on, time passes as soon as
        // nothing else can happen.
        ask(&address, &credentials).await.unwrap();
        tokio::time::pause();
        let mut answer = Vec::new();
        crate::clock::timeout(10 * HANDSHAKE, silent.read_to_end(&mut answer)).await.unwrap().unwrap();
        assert!(answer.is_empty() && before.elapsed() >= HANDSHAKE, "{answer:?}");
        tokio::time::resume();
    }
}

#[tokio::test]
async fn connections_that_show_nothing_keep_no_process_out() {
    let folder = tempfile::tempdir().unwrap();
    for credentials in both(folder.path()) {
        let listener = Listener::bind(&ListenAt::loopback(), credentials.clone()).await.unwrap();
        let address = Counting::default().on(listener.at_most(1));
        let mut waiting = Vec::new();
        for _ in 0..40 {
            waiting.push(silent(&address).await);
            // The place of the previous client may become free a little later.
            answered_until("an answer", async || ask(&address, &credentials).await).await;
        }
        let mut answer = Vec::new();
        // Ends before its own time limit is over.
        crate::clock::timeout(HANDSHAKE / 2, waiting[0].read_to_end(&mut answer)).await.unwrap().unwrap();
        assert!(answer.is_empty());
    }
}
