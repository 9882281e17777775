//! A valid header is read. A header with one fault is refused, with an error that names the fault.

#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

use std::io::Write;

use host_gguf::{Array, Error, Gguf, Value};
use host_tests::gguf::{GgufFile, text, value};

const F32: u32 = 0;
const Q8_0: u32 = 8;

/// A file with keys of all types and two tensors.
fn file() -> GgufFile {
    let mut file = GgufFile::default();
    file.text("general.architecture", "llama")
        .u32("a.u32", 7)
        .f32("a.f32", 1.5)
        .flag("a.flag", true)
        .raw("a.i8", value::I8, &[0xff])
        .raw("a.u64", value::U64, &u64::MAX.to_le_bytes())
        .raw("a.f64", value::F64, &2.5f64.to_le_bytes())
        .texts("tokens", ["a", "", "é", "word"])
        .numbers("scores", &[0.5, -1.0])
        .integers("types", &[1, -3])
        .array("flags", value::BOOL, [[0], [1]])
        .array("empty", value::TEXT, [[0u8; 0]; 0])
        .tensor("one", &[4, 2], F32, vec![1; 32])
        .tensor("two", &[32, 3], Q8_0, vec![2; 102]);
    file
}

fn error(file: &GgufFile) -> String {
    Gguf::read(&file.bytes()[..]).unwrap_err().to_string()
}

#[test]
fn keys_and_tensors_are_read() {
    for version in [2, 3] {
        let bytes = GgufFile { version, ..file() }.bytes();
        let gguf = Gguf::read(&bytes[..]).unwrap();
        let metadata = gguf.metadata();
        assert_eq!(metadata.text("general.architecture").unwrap(), Some("llama"));
        assert_eq!(metadata.unsigned("a.u32").unwrap(), Some(7));
        assert_eq!(metadata.unsigned("a.u64").unwrap(), Some(u64::MAX));
        assert_eq!(metadata.number("a.f32").unwrap(), Some(1.5));
        assert_eq!(metadata.number("a.f64").unwrap(), Some(2.5));
        assert_eq!(metadata.number("a.u32").unwrap(), Some(7.0));
        assert_eq!(metadata.number("a.i8").unwrap(), Some(-1.0));
        assert_eq!(metadata.flag("a.flag").unwrap(), Some(true));
        let tokens = metadata.texts("tokens").unwrap().unwrap();
        assert_eq!(tokens.iter().collect::<Vec<_>>(), ["a", "", "é", "word"]);
        assert_eq!((tokens.len(), tokens.get(2), tokens.get(4)), (4, Some("é"), None));
        assert_eq!(metadata.numbers("scores").unwrap().unwrap(), [0.5, -1.0]);
        assert_eq!(metadata.integers("types").unwrap().unwrap(), [1, -3]);
        assert_eq!(metadata.flags("flags").unwrap().unwrap(), [false, true]);
        assert!(metadata.texts("empty").unwrap().unwrap().is_empty());
        assert_eq!(metadata.get("types"), Some(&Value::Array(Array::I32(vec![1, -3]))));
        assert_eq!((metadata.text("none").unwrap(), metadata.get("none")), (None, None));
        assert_eq!(metadata.iter().count(), 12);
        let tensors = gguf.tensors();
        assert_eq!(tensors.iter().map(|tensor| tensor.name()).collect::<Vec<_>>(), ["one", "two"]);
        let two = gguf.tensor("two").unwrap();
        assert_eq!((two.dimensions(), two.rows(), two.row_elements()), (&[32, 3][..], 3, 32));
        assert_eq!((two.row_bytes(), two.bytes(), two.kind().name()), (34, 102, "Q8_0"));
        assert_eq!(two.offset(), gguf.data_start() + 32);
        assert_eq!(gguf.size(), bytes.len() as u64);
        assert_eq!(gguf.data_start() + 32 + 102, gguf.size());
    }
}

#[test]
fn a_value_of_another_type_names_its_key_and_what_was_found() {
    let long = "x".repeat(100);
    let bytes = file().text("long", &long).bytes();
    let gguf = Gguf::read(&bytes[..]).unwrap();
    let metadata = gguf.metadata();
    let cases = [
        (metadata.text("a.u32").map(drop), "a.u32 is 7, expected a text"),
        (metadata.unsigned("a.i8").map(drop), "a.i8 is -1, expected a whole number that is not negative"),
        (metadata.unsigned("a.f32").map(drop), "a.f32 is 1.5, expected a whole number"),
        (metadata.number("long").map(drop), "xxx\" and 40 bytes more, expected a number"),
        (metadata.flag("a.u32").map(drop), "expected true or false"),
        (metadata.texts("types").map(drop), "types is an array of 2 i32, expected an array of texts"),
        (metadata.numbers("tokens").map(drop), "tokens is an array of 4 text, expected an array of floats"),
        (metadata.integers("scores").map(drop), "expected an array of whole numbers"),
        (metadata.flags("types").map(drop), "expected an array of true and false"),
    ];
    for (result, says) in cases {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn alignment_is_that_of_the_file() {
    for alignment in [8u32, 64, 4096] {
        let mut file = GgufFile { alignment: alignment as usize, ..file() };
        let bytes = file.u32("general.alignment", alignment).bytes();
        let gguf = Gguf::read(&bytes[..]).unwrap();
        assert!(gguf.data_start().is_multiple_of(u64::from(alignment)));
        let mut raw = [0; 102];
        gguf.read_raw_rows(gguf.tensor("two").unwrap(), 0, &mut raw).unwrap();
        assert_eq!(raw, [2; 102]);
    }
}

#[test]
fn damage_is_refused_by_the_name_of_what_is_damaged() {
    type Change = fn(&mut GgufFile);
    let cases: &[(Change, &str)] = &[
        (|file| file.version = 1, "GGUF version 1; versions 2 and 3 are read"),
        (|file| file.version = 4, "GGUF version 4"),
        (|file| file.version = 3u32.swap_bytes(), "a big-endian GGUF file"),
        (|file| file.claimed_keys = Some(u64::MAX), "metadata keys: 18446744073709551615, at most 65536"),
        (|file| file.claimed_keys = Some(60_000), "truncated: metadata of 60000 keys ends at byte"),
        (|file| file.claimed_tensors = Some(u64::MAX), "tensors: 18446744073709551615, at most 65536"),
        (|file| file.claimed_tensors = Some(60_000), "truncated: a table of 60000 tensors ends at byte"),
        (
            |file| {
                file.append("a.u32", value::U32, &[0; 4]);
            },
            "key a.u32: it stands there twice",
        ),
        (
            |file| {
                file.raw("", value::U8, &[0]);
            },
            "the name of key 12: it is empty",
        ),
        (
            |file| {
                file.raw(&"k".repeat(65_536), value::U8, &[0]);
            },
            "bytes of the name of key 12: 65536, at most 65535",
        ),
        (
            |file| {
                file.raw("k", 13, &[0]);
            },
            "key k: its type is 13, which is none",
        ),
        (
            |file| {
                file.raw("k", value::BOOL, &[2]);
            },
            "key k: a bool of value 2",
        ),
        (
            |file| {
                file.raw("k", value::TEXT, &u64::MAX.to_le_bytes());
            },
            "truncated: key k ends at byte 18446744073709551615",
        ),
        (
            |file| {
                file.raw("k", value::TEXT, &text(&[0xff]));
            },
            "key k: it is not UTF-8: invalid utf-8",
        ),
        (
            |file| {
                file.array("k", value::TEXT, [text("é".as_bytes()), text(&[0xc3])]);
            },
            "key k: it is not UTF-8",
        ),
        (
            |file| {
                file.array("k", value::TEXT, [text(&[0xc3]), text(&[0xa9])]);
            },
            "key k, text 0: it is not UTF-8",
        ),
        (
            |file| {
                file.array("k", value::ARRAY, [[0u8; 12]]);
            },
            "key k: an array of arrays, which is not read",
        ),
        (
            |file| {
                file.array("k", 99, [[0]]);
            },
            "key k: an array of type 99",
        ),
        (
            |file| {
                file.raw("k", value::ARRAY, &[4, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255]);
            },
            "truncated: key k, an array of 18446744073709551615 ends at",
        ),
        (
            |file| {
                file.raw("k", value::ARRAY, &[8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
            },
            "truncated: key k, an array of 281474976710656",
        ),
        (
            |file| {
                file.array("k", value::BOOL, [[1], [3]]);
            },
            "key k: a bool of value 3",
        ),
        (
            |file| {
                file.u32("general.alignment", 0);
            },
            "general.alignment: it is 0, expected a power of two",
        ),
        (
            |file| {
                file.u32("general.alignment", 48);
            },
            "general.alignment: it is 48",
        ),
        (
            |file| {
                file.text("general.alignment", "8");
            },
            "general.alignment is \"8\", expected a whole",
        ),
        (
            |file| {
                file.u32("split.count", 3);
            },
            "split.count is 3: the model lies in several files",
        ),
        (|file| file.tensors[0].name = String::new(), "the name of tensor 0: it is empty"),
        (|file| file.tensors[1].name = "n".repeat(65), "bytes of the name of tensor 1: 65, at most 64"),
        (|file| file.tensors[1].name = "one".to_owned(), "tensor one: it stands there twice"),
        (|file| file.tensors[0].dimensions = vec![], "tensor one: it has 0 dimensions"),
        (|file| file.tensors[0].dimensions = vec![1; 5], "tensor one: it has 5 dimensions"),
        (|file| file.tensors[0].dimensions = vec![4, 0], "tensor one: its dimensions are [4, 0]"),
        (|file| file.tensors[0].dimensions = vec![1 << 32, 1 << 32], "tensor one: its dimensions are [4294"),
        (|file| file.tensors[0].dimensions = vec![1 << 62], "tensor one: its dimensions are [4611"),
        (|file| file.tensors[0].dimensions = vec![1 << 60], "tensor one ends at byte"),
        (
            |file| file.tensors[1].dimensions = vec![48, 2],
            "a row of 48 elements is no multiple of 32, a block",
        ),
        (|file| file.tensors[0].kind = 20, "tensor one has type IQ4_NL; types that are read are F32, F16,"),
        (|file| file.tensors[0].kind = 4, "tensor one has type number 4; types"),
        (
            |file| file.tensors[1].offset = Some(33),
            "tensor two: its offset 33 is no multiple of the alignment",
        ),
        (|file| file.tensors[1].offset = Some(0), "tensor two: it overlaps tensor one"),
        (|file| file.tensors[0].offset = Some(96), "tensor one: it overlaps tensor two"),
        (|file| file.tensors[1].offset = Some(64), "truncated: tensor two ends at byte"),
        (|file| file.tensors[1].offset = Some(u64::MAX - 31), "tensor two: its offset 18446744073709551584"),
        (
            |file| {
                _ = file.tensors[1].data.pop();
            },
            "truncated: tensor two ends at byte",
        ),
    ];
    for (change, says) in cases {
        let mut file = file();
        change(&mut file);
        let error = error(&file);
        assert!(error.contains(says), "expected {says:?} in: {error}");
    }
}

#[test]
fn names_of_any_kind_make_short_messages_without_control_characters() {
    let mut file = file();
    file.raw(&format!("\x1b[31m{}", "k".repeat(10_000)), 13, &[0]);
    let error = error(&file);
    assert!(
        error.len() < 200 && error.contains("key \\u{1b}[31mkkk") && error.contains("kkk…: its type is 13")
    );
}

#[test]
fn a_file_that_ends_anywhere_is_refused() {
    let whole = file().bytes();
    for length in 0..whole.len() {
        let error = Gguf::read(&whole[..length]).unwrap_err();
        assert!(matches!(error, Error::Truncated { .. }), "{length} of {}: {error}", whole.len());
    }
}

#[test]
fn what_is_no_gguf_file_says_what_was_found() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let open = |bytes: &[u8]| {
        std::fs::File::create(&path).unwrap().write_all(bytes).unwrap();
        Gguf::open(&path).unwrap_err().to_string()
    };
    assert!(open(b"PK\x03\x04 and more").contains("it begins with bytes [50, 4b, 03, 04]"));
    assert!(open(b"version https://git-lfs.github.com/spec/v1").contains("Git LFS"));
    assert!(open(b"").contains("truncated: the start of the header ends at byte 4, the file has 0 bytes"));
    assert!(Gguf::open(directory.path()).unwrap_err().to_string().contains("not a regular file"));
    let missing = Gguf::open(&directory.path().join("none")).unwrap_err();
    assert!(matches!(missing, Error::Read(_)), "{missing}");
}

#[test]
fn a_file_that_shrinks_after_it_was_opened_gives_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    std::fs::write(&path, file().bytes()).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    std::fs::write(&path, b"GGUF").unwrap();
    let read = gguf.read_rows(gguf.tensor("one").unwrap(), 0, &mut [0.0; 8]);
    assert!(matches!(read, Err(Error::Read(_))), "{read:?}");
}
