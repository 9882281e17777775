//! Rows expand to the bits that the `gguf` package of PyPI gives.

#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

use host_gguf::{Gguf, Kind};
use host_tests::gguf::GgufFile;

/// Random blocks of every type, and their elements as the package expands them. Made by
/// `python tests/python/gguf_dequantize.py target/debug/examples/expand --golden gguf/tests/dequantized.bin`.
const GOLDEN: &[u8] = include_bytes!("dequantized.bin");

/// Type, stored blocks and expanded elements as bytes.
fn golden() -> Vec<(Kind, Vec<u8>, Vec<u8>)> {
    let mut rest = GOLDEN;
    let mut cases = Vec::new();
    while let Some((head, after)) = rest.split_first_chunk::<12>() {
        let number = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap());
        let (stored, after) = after.split_at(number(4) as usize);
        let (expanded, after) = after.split_at(number(8) as usize);
        let kind = Kind::ALL.into_iter().find(|kind| kind.number() == number(0)).unwrap();
        cases.push((kind, stored.to_vec(), expanded.to_vec()));
        rest = after;
    }
    cases
}

/// A file with one tensor, which has the case's blocks `rows` times.
fn file(kind: Kind, stored: &[u8], elements: usize, rows: usize) -> Vec<u8> {
    let mut file = GgufFile::default();
    file.tensor("x", &[elements as u64, rows as u64], kind.number(), stored.repeat(rows));
    file.bytes()
}

#[test]
fn rows_of_every_type_expand_to_the_bits_of_the_python_package() {
    let cases = golden();
    assert_eq!(cases.iter().map(|case| case.0).collect::<Vec<_>>(), Kind::ALL);
    for (kind, stored, expanded) in cases {
        let elements = expanded.len() / 4;
        let file = file(kind, &stored, elements, 3);
        let gguf = Gguf::read(&file[..]).unwrap();
        let tensor = gguf.tensor("x").unwrap();
        let mut rows = vec![0.0f32; elements * 2];
        gguf.read_rows(tensor, 1, &mut rows).unwrap();
        let bytes: Vec<u8> = rows.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(bytes == expanded.repeat(2), "{kind:?}");
        let mut raw = vec![0; stored.len()];
        gguf.read_raw_rows(tensor, 2, &mut raw).unwrap();
        assert_eq!(raw, stored, "{kind:?}");
    }
}

#[test]
fn rows_longer_than_a_read_expand_to_the_same_bits() {
    for (kind, stored, expanded) in golden() {
        let repeats = (600 << 10) / stored.len();
        let elements = expanded.len() / 4 * repeats;
        let file = file(kind, &stored.repeat(repeats), elements, 1);
        let gguf = Gguf::read(&file[..]).unwrap();
        let mut row = vec![0.0f32; elements];
        gguf.read_rows(gguf.tensor("x").unwrap(), 0, &mut row).unwrap();
        let bytes: Vec<u8> = row.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(bytes.chunks_exact(expanded.len()).all(|chunk| chunk == expanded), "{kind:?}");
    }
}

#[test]
fn rows_that_are_not_there_are_refused() {
    let file = file(Kind::Q8_0, &[0; 68], 64, 3);
    let gguf = Gguf::read(&file[..]).unwrap();
    let tensor = gguf.tensor("x").unwrap();
    for (first, length, says) in [
        (3, 64, "tensor x has 3 rows; 1 from row 3 on cannot be read"),
        (0, 256, "4 from row 0 on"),
        (u64::MAX, 64, "1 from row 18446744073709551615 on"),
        (0, 63, "63 of 64 per row"),
    ] {
        let error = gguf.read_rows(tensor, first, &mut vec![0.0; length]).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    assert!(gguf.read_raw_rows(tensor, 0, &mut [0; 67]).is_err());
}
