//! Reads bytes as the host reads a model file, as far as they are valid. Shared by the fuzz target, the example `mutate` and a
//! test.

use host_gguf::Gguf;

/// Rows of more elements are not read, so that this code takes little memory and the reader's memory shows.
const MOST_ELEMENTS: u64 = 1 << 16;

/// Whether the bytes are a valid file. Panics when the reader accepts a file and then contradicts itself.
pub fn exercise(bytes: &[u8]) -> bool {
    let gguf = match Gguf::read(bytes) {
        Ok(gguf) => gguf,
        Err(error) => {
            let length = error.to_string().len();
            assert!(length < 1000, "a message of {length} bytes");
            return false;
        }
    };
    let metadata = gguf.metadata();
    for (key, value) in metadata.iter() {
        assert!(metadata.get(key).is_some_and(|found| std::ptr::eq(found, value)));
        let answers = [
            metadata.text(key).is_ok(),
            metadata.unsigned(key).is_ok(),
            metadata.flag(key).is_ok(),
            metadata.numbers(key).is_ok(),
            metadata.integers(key).is_ok(),
            metadata.flags(key).is_ok(),
        ];
        assert!(answers.iter().filter(|answer| **answer).count() <= 1, "{key} is of two types");
        if let Ok(Some(texts)) = metadata.texts(key) {
            assert_eq!(texts.iter().count(), texts.len());
        }
        assert!(value.to_string().len() < 500);
    }
    for tensor in gguf.tensors() {
        assert!(gguf.tensor(tensor.name()).is_some_and(|found| std::ptr::eq(found, tensor)));
        assert!(tensor.offset() >= gguf.data_start() && tensor.offset() + tensor.bytes() <= gguf.size());
        assert_eq!(tensor.rows() * tensor.row_bytes(), tensor.bytes());
        if tensor.row_elements() <= MOST_ELEMENTS {
            let mut row = vec![0.0; tensor.row_elements() as usize];
            for index in [0, tensor.rows() - 1] {
                assert!(gguf.read_rows(tensor, index, &mut row).is_ok(), "row {index} of {}", tensor.name());
            }
            assert!(gguf.read_rows(tensor, tensor.rows(), &mut row).is_err());
        }
    }
    true
}
