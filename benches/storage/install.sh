#!/bin/sh
# Puts SGLang's file storage and NIXL, which benches/storage compares with, under target/peers-storage: about 350 MB. Python 3.11.
set -eu
cd "$(dirname "$0")/../.."
mkdir -p target/peers-storage
cd target/peers-storage
python3 -m venv venv
venv/bin/pip install --quiet numpy
venv/bin/pip install --quiet --no-deps nixl-cu12==1.5.1
wheel=${SGLANG_WHEEL:-}
if [ -z "$wheel" ]; then
    venv/bin/pip download --quiet --no-deps sglang==0.5.23
    wheel=$(ls sglang-0.5.23-*.whl)
fi
venv/bin/python - "$wheel" <<'PYTHON'
import sys, zipfile
wanted = ("sglang/srt/mem_cache/hicache_storage.py", "sglang/srt/mem_cache/storage/file/")
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall("wheel", [name for name in wheel.namelist() if name.startswith(wanted)])
PYTHON
rm -f sglang-0.5.23-*.whl
