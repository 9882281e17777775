#!/bin/sh
# All systems on one workload and one core, one after the other; ours first and last, so that drift shows.
#
#   benches/radix/run.sh [GROUPS]        CORE=1 SEQUENCES=100000
#
# Without CORE it is the last core that this shell may use.
# SGLang takes part when `benches/radix/install_sglang.sh` was run before.
set -eu
cd "$(dirname "$0")"
last=$(taskset -cp $$ | sed 's/.*[ ,-]//')
groups=${1:-1000} core=${CORE:-$last} sequences=${SEQUENCES:-100000}
peers=../../target/peers
if ! taskset -c "$core" true; then
    echo "core $core cannot be used here; CORE=$last can" >&2
    exit 2
fi
cargo build --release --quiet
bench=${CARGO_TARGET_DIR:-target}/release/radix-bench
uname -srm
grep -m1 'model name' /proc/cpuinfo
date -u +%FT%TZ
echo "commit $(git describe --always --dirty), load $(cut -d' ' -f1-3 /proc/loadavg), core $core"
on_core() { taskset -c "$core" "$@"; }
on_core "$bench" --groups "$groups" --sequences "$sequences"
if [ -x $peers/venv/bin/python ]; then
    "$bench" --groups "$groups" --sequences "$sequences" --dump $peers/tokens.bin
    for kind in rust python; do
        on_core $peers/venv/bin/python -W ignore sglang_bench.py $kind $peers/wheel $peers/tokens.bin "$sequences" "$groups" 2>$peers/$kind.err ||
            tail -n 3 $peers/$kind.err
    done
    rm $peers/tokens.bin
fi
on_core "$bench" --groups "$groups" --sequences "$sequences" --only ours
