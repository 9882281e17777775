#!/bin/sh
# The file tier, raw I/O and the others, in turns, on the same pages.
#
#   benches/storage/run.sh [DIRECTORY]        TIER_BENCH_MIB=512 TIER_BENCH_ROUNDS=5 STORAGE_WAYS=hicache,SGLang
#
# SGLang and NIXL take part when `benches/storage/install.sh` was run before. DIRECTORY is on the disk that is measured.
set -eu
cd "$(dirname "$0")"
peers=$(cd ../.. && pwd)/target/peers-storage
export TIER_BENCH_DIR=${1:-${TIER_BENCH_DIR:-/tmp}} TIER_BENCH_MIB=${TIER_BENCH_MIB:-512}
cargo build --release --quiet
bench=${CARGO_TARGET_DIR:-target}/release/storage-bench
uname -srm
grep -m1 'model name' /proc/cpuinfo
date -u +%FT%TZ
echo "commit $(git describe --always --dirty), load $(cut -d' ' -f1-3 /proc/loadavg), $TIER_BENCH_MIB MiB"
if [ -x "$peers/venv/bin/python" ]; then
    export STORAGE_PYTHON="$peers/venv/bin/python" STORAGE_WHEEL="$peers/wheel"
    NIXL_LIBRARY=${NIXL_LIBRARY:-$(ls "$peers"/venv/lib/python3*/site-packages/.nixl_cu12*/libnixl_capi.so 2>/dev/null || true)}
    export NIXL_LIBRARY
fi
exec "$bench"
