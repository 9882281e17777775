"""The Rust reader against the `gguf` package of PyPI: every element of every tensor has the same bits.

    pip install gguf==0.17.1
    cargo build -p host-gguf --example expand
    python tests/python/gguf_dequantize.py target/debug/examples/expand [FILE.gguf ...]

Without files, it makes one up: random blocks of every type. With --golden FILE that made-up file's tensors are also
written with their expansion, for gguf/tests/dequantize.rs: per type its number (u32), the bytes of the stored blocks and
those of the expanded elements (u32 each), then both.
"""

import pathlib
import struct
import subprocess
import sys
import tempfile

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Kind, GGUFReader, GGUFWriter
from gguf.quants import dequantize

KINDS = [Kind[name] for name in "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K".split()]
# Where the scales of a block lie: these are halves, which must be numbers.
SCALES = {Kind.F16: [0], Kind.Q6_K: [208]} | {kind: [0] for kind in (Kind.Q8_0, Kind.Q4_0, Kind.Q5_0)}
SCALES |= {kind: [0, 2] for kind in (Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K)}


def random_blocks(kind, random, rows, blocks):
    elements, size = GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    if kind == Kind.F32:
        data = random.normal(size=rows * blocks).astype(np.float32).view(np.uint8)
    if kind == Kind.BF16:
        data[:, 1] &= 0xBF
    for place in SCALES.get(kind, []):
        # Numbers of every size, subnormal ones too.
        scale = random.integers(0, 0x7C00, rows * blocks, dtype=np.uint16)
        scale |= random.integers(0, 2, rows * blocks, dtype=np.uint16) << 15
        data[:, place : place + 2] = scale.view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, blocks * size)


def made_up(path, rows, blocks):
    random = np.random.default_rng(20)
    writer = GGUFWriter(path, "llama")
    for kind in KINDS:
        data = random_blocks(kind, random, rows, blocks * 256 // GGML_QUANT_SIZES[kind][0])
        writer.add_tensor(kind.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(arguments):
    golden = None
    if "--golden" in arguments:
        at = arguments.index("--golden")
        golden = arguments[at + 1]
        del arguments[at : at + 2]
    expand, *files = arguments
    with tempfile.TemporaryDirectory() as folder:
        if not files:
            files = [f"{folder}/random.gguf"]
            made_up(files[0], *((1, 1) if golden else (33, 3)))
        for file in files:
            compare(expand, file, golden)


def compare(expand, file, golden):
    process = subprocess.Popen([expand, file], stdout=subprocess.PIPE)
    elements, kinds, cases = 0, set(), []
    for tensor in GGUFReader(file).tensors:
        expected = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        expected = np.ascontiguousarray(expected).tobytes()
        found = process.stdout.read(len(expected))
        if found != expected:
            left, right = (np.frombuffer(bytes, np.uint32) for bytes in (found, expected))
            if len(left) != len(right):
                sys.exit(f"{file}: {tensor.name}: {len(left)} elements, expected {len(right)}")
            at = int(np.flatnonzero(left != right)[0])
            sys.exit(f"{file}: {tensor.name}: element {at} is {left[at]:08x}, expected {right[at]:08x}")
        elements += len(expected) // 4
        kinds.add(tensor.tensor_type.name)
        stored = np.ascontiguousarray(tensor.data).tobytes()
        cases.append(struct.pack("<III", tensor.tensor_type, len(stored), len(expected)) + stored + expected)
    if process.stdout.read(1) or process.wait() != 0:
        sys.exit(f"{file}: more than its tensors, or the reader failed")
    if golden:
        pathlib.Path(golden).write_bytes(b"".join(cases))
    print(f"{file}: {elements} elements of {', '.join(sorted(kinds))}: the same bits")


if __name__ == "__main__":
    main(sys.argv[1:])
