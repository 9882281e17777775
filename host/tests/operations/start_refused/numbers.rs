//! Numbers out of their bounds.

use super::refused;

#[test]
fn numbers_that_cannot_work_are_refused_with_their_bounds() {
    let cases: [(&[&str], &[&str]); 20] = [
        (&["--layer-groups", "0"], &["--layer-groups", "\"0\"", "auto, off or 2 to 32"]),
        (&["--layer-groups", "some"], &["--layer-groups", "\"some\"", "auto, off or 2 to 32"]),
        (&["--layer-groups", "5"], &["--layer-groups", "5 layer groups of a model of 4 layers"]),
        (&["--staging", "some"], &["--staging", "\"some\"", "auto, always or never"]),
        (&["--staging-bytes", "1KiB"], &["--staging-bytes", "1024 bytes", "64KiB to"]),
        (&["--staging-bytes", "x"], &["--staging-bytes", "is not a size"]),
        (&["--staging", "always", "--staging-bytes", "0"], &["--staging always needs memory"]),
        (&["--staging-knee", "0"], &["--staging-knee", "1 to 1GiB"]),
        (&["--staging-knee", "2GiB"], &["--staging-knee", "1 to 1GiB"]),
        (&["--default-max-tokens", "0"], &["--default-max-tokens", "1 to"]),
        (&["--max-running", "4294967295"], &["--max-running", "4294967295", "1 to 32768"]),
        (&["--max-batch", "0"], &["--max-batch", "1 to 16384"]),
        (&["--max-queued", "4000000000"], &["--max-queued", "1 to 1048576"]),
        (&["--chunk-tokens", "4294967295"], &["--chunk-tokens", "1 to 16777216"]),
        (&["--target-itl-ms", "0"], &["--target-itl-ms", "0.1 to 60000"]),
        (&["--target-itl-ms", "NaN"], &["--target-itl-ms", "0.1 to 60000"]),
        (&["--reserved-decode-tokens", "0"], &["--reserved-decode-tokens", "1 to"]),
        (&["--page-size", "4294967295"], &["--page-size", "1 to 65536"]),
        (&["--kv-memory", "100000GiB"], &["--kv-memory", "214748364800000 bytes", "bytes of memory"]),
        (&["--pool-pages", "4294967295"], &["--pool-pages", "bytes of memory"]),
    ];
    for (flags, says) in cases {
        for role in [&[][..], &["--role", "decode"], &["--role", "aggregated"]] {
            let says = if role.is_empty() { says } else { &says[..1] };
            refused(&[&["--executor", "synthetic"], role, flags].concat(), says);
        }
    }
}

#[test]
fn ranks_that_cannot_work_are_refused_with_their_bounds() {
    let directory = tempfile::tempdir().unwrap();
    host_tests::model::tiny_qwen3(directory.path(), 1).unwrap();
    let model = directory.path().display().to_string();
    let whole = ["--role", "aggregated", "--executor", "synthetic"];
    let cases: [(&[&str], &[&str]); 7] = [
        (&[&whole[..], &["--tp", "0"]].concat(), &["--tp is 0", "1 to 64"]),
        (&[&whole[..], &["--tp", "65"]].concat(), &["--tp is 65", "1 to 64"]),
        (&["--executor", "synthetic", "--decode-tp", "65"], &["--decode-tp is 65", "1 to 64"]),
        (&[&whole[..], &["--prefill-tp", "2"]].concat(), &["--prefill-tp", "use --tp"]),
        (
            &["--role", "aggregated", "--model", &model, "--tp", "5"],
            &["--tp is 5", "4 query heads", "at most 4"],
        ),
        (&["--model", &model, "--decode-tp", "8"], &["--decode-tp is 8", "4 query heads"]),
        // 8 ranks share 2 heads, so each head is held four times. A page has 4 layers x 2 x 16 tokens x 128 bytes x 8.
        (
            &[&whole[..], &["--tp", "8", "--kv-memory", "64KiB"]].concat(),
            &["--kv-memory 64KiB holds 0 tokens", "131072 bytes"],
        ),
    ];
    for (flags, says) in cases {
        refused(flags, says);
    }
}

#[test]
fn staging_memory_that_does_not_suit_the_ranks_and_the_model_is_refused_with_what_would() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("host.toml");
    // A page has 8 MiB, in blocks of 8 KiB.
    std::fs::write(&config, "[synthetic]\nlayers = 64\nkv-heads = 16\nhead-dim = 64\n").unwrap();
    let config = config.display().to_string();
    let cases: [(&[&str], &[&str]); 4] = [
        (
            &["--tp", "8", "--staging-bytes", "64KiB"],
            &["--staging-bytes", "8192 for each of 8 ranks", "at least 524288"],
        ),
        (
            &["--staging", "always", "--page-size", "256", "--staging-bytes", "128KiB"],
            &["--staging always", "65536 bytes", "raise --staging-bytes to 524288"],
        ),
        (
            &["--staging", "always", "--page-size", "65536"],
            &["--staging always", "16777216 bytes", "lower --page-size"],
        ),
        (
            &["--config", &config, "--role", "decode", "--kv-memory", "2GiB", "--staging-bytes", "64KiB"],
            &["65536 bytes", "4096 tokens into 262144 pieces", "raise it to 131072", "--max-model-len"],
        ),
    ];
    for (flags, says) in cases {
        refused(&[&["--executor", "synthetic"], flags].concat(), says);
    }
}

#[test]
fn steps_that_would_be_modelled_for_longer_than_a_minute_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("host.toml");
    for (times, says) in [
        ("step-us = 9000000000000000000", "step-us (9000000000000000000)"),
        ("prefill-token-us = 9000000000000000000", "prefill-token-us (9000000000000000000)"),
        ("prefill-token-us = 200000", "a step of 512 prompt tokens and 64 sequences"),
        ("sequence-us = 1000000", "sequence-us (1000000)"),
    ] {
        std::fs::write(&config, format!("[synthetic]\n{times}\n")).unwrap();
        let config = config.display().to_string();
        refused(&["--executor", "synthetic", "--config", &config], &[says, "more than 60 s"]);
    }
}
