//! Writes all tensors of a GGUF file to standard output as little-endian `f32`, in the order of the file's table.
//!
//! `tests/python/gguf_dequantize.py` compares the output with the values that the `gguf` package of PyPI reads.

use std::io::Write;
use std::path::Path;

use host_gguf::Gguf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: expand FILE.gguf")?;
    let gguf = Gguf::open(Path::new(&path))?;
    let mut out = std::io::stdout().lock();
    for tensor in gguf.tensors() {
        let mut row = vec![0.0; usize::try_from(tensor.row_elements())?];
        for index in 0..tensor.rows() {
            gguf.read_rows(tensor, index, &mut row)?;
            let bytes: Vec<u8> = row.iter().flat_map(|value| value.to_le_bytes()).collect();
            out.write_all(&bytes)?;
        }
    }
    Ok(())
}
