"""SGLang 0.5.23's trees on the same workload: `python sglang_bench.py python|rust WHEEL TOKENS SEQUENCES GROUPS`.

WHEEL is the unpacked wheel, TOKENS what `radix-bench --dump` wrote. Token arrays (int64, as SGLang keeps them) and
keys are made outside of the clock. LRU is on; events are off, which favours SGLang; the match includes locking and unlocking only in the lines that say so.
"""

import gc
import sys
import time
from array import array

kind, wheel, path, sequences, groups = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
sys.path.insert(0, wheel)

import numpy
import torch

torch.set_num_threads(1)

PAGE, TOKENS, SHARED = 16, 2048, 102 * 16
tokens = numpy.memmap(path, dtype="<u4", mode="r").reshape(-1, TOKENS)


def report(what, times):
    times = numpy.array(times) / 1e3
    p50, p99 = numpy.percentile(times, [50, 99])
    print(f"{what:<58} mean {times.mean():>8.3f} us   p50 {p50:>8.3f}   p99 {p99:>8.3f}   max {times.max():>9.1f}", flush=True)


def resident():
    with open("/proc/self/statm") as file:
        fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * 4096  # without the mapped tokens


class Allocator:
    """Takes freed pages and forgets them."""

    device = "cpu"

    def free(self, _):
        pass

    def free_segment(self, _, start_pos=0):
        pass


from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey


def key(row):
    ids = array("q")
    ids.frombytes(row.astype("<i8").tobytes())
    return RadixKey(token_ids=ids, extra_key=None)


if kind == "python":
    name = "sglang RadixCache (Python)"
    tree = RadixCache.create_simulated(mock_allocator=Allocator(), page_size=PAGE)
    insert = tree.insert
    match = tree.match_prefix
    lock, unlock = tree.inc_lock_ref, tree.dec_lock_ref
else:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    name = "sglang Rust core, through its adapter"
    parameters = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        page_size=PAGE,
        tree_components=(ComponentType.FULL,),
    )
    tree = RustUnifiedTreeCore(parameters)

    def insert(params):
        step = tree.begin_insert(params)
        while tree.has_ongoing_insert() and step.result is None:
            step = tree.resume_insert()
        tree.end_insert()

    match = tree.match_prefix

gc.disable()
values = torch.arange(TOKENS, dtype=torch.int64)
before = resident()
times = []
for index in range(sequences):
    params = InsertParams(key=key(tokens[index]), value=values + index * TOKENS)
    start = time.perf_counter_ns()
    insert(params)
    times.append(time.perf_counter_ns() - start)
report(f"{name}: insert", times)
unique = min(groups, sequences) * 102 + sequences * 26
print(f"{name + ': resident memory':<58} {(resident() - before) / unique:.0f} B per page", flush=True)


def matched(what, rows, expected, locking=False):
    times = []
    for row in rows:
        params = MatchPrefixParams(key=key(row))
        start = time.perf_counter_ns()
        found = match(params)
        if locking:
            lock(found.last_device_node)
            unlock(found.last_device_node)
        times.append(time.perf_counter_ns() - start)
        assert found.device_prefix_len == expected, found.device_prefix_len
    report(f"{name}: {what}", times)


matched("match, full hit", (tokens[index] for index in range(sequences)), TOKENS)
if kind == "python":
    matched("match + lock + unlock, full hit", (tokens[index] for index in range(20000)), TOKENS, locking=True)


def cold():
    random = numpy.random.default_rng(7)
    for index in range(min(20000, sequences)):
        yield numpy.concatenate([tokens[index][:SHARED], random.integers(0, 128000, TOKENS - SHARED, dtype="u4")])


for _ in range(2):
    matched("match, 102 pages cached + 26 new", cold(), SHARED)

if kind == "python":
    tree.reset()

    def evict(count):
        tree.evict(EvictParams(num_tokens=count))

else:
    tree = RustUnifiedTreeCore(parameters)

    def evict(count):
        """The loop of its controller, without what that does with the freed pages."""
        freed = {ComponentType.FULL: 0}
        tree.evict_device_start(ComponentType.FULL, count)
        while freed[ComponentType.FULL] < count:
            step = tree.evict_device_next_node(ComponentType.FULL, freed)
            if step.node_id is not None:
                step = tree.evict_device_leaf(step.node_id, tree.is_write_back)
            elif not step.made_progress:
                break
            freed[ComponentType.FULL] += step.tracker[ComponentType.FULL]
            step.device_frees.clear()
            step.cache_actions.clear()
        tree.evict_device_end(ComponentType.FULL)


for index in range(min(41000, sequences)):
    insert(InsertParams(key=key(tokens[index]), value=values + index * TOKENS))
times, left = [], tree.evictable_size
left = left() if callable(left) else left
for _ in range(20):
    start = time.perf_counter_ns()
    evict(1000 * PAGE)
    times.append(time.perf_counter_ns() - start)
after = tree.evictable_size
after = after() if callable(after) else after
report(f"{name}: evict 1,000 pages at 41,000 leaves", times)
print(f"{'':<58} {(left - after) / PAGE / 20:.0f} pages a call")
