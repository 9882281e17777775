"""SGLang's HiCacheFile on request: `set|get PAGES BYTES DIRECTORY` a line, answered by processor seconds and pages.

The class is the one of the wheel, unmodified, with metadata cache and size limit off, as by default. In place of torch
stands what it uses of a tensor, over numpy: the calls that write and read files are its own (`numpy.tofile`, `os.replace`,
`readinto`).
"""

import importlib.util
import sys
import time
import types

import numpy


class Tensor:
    def __init__(self, array):
        self.array = array

    def numel(self):
        return self.array.size

    def element_size(self):
        return self.array.itemsize

    def contiguous(self):
        return self

    def view(self, dtype=None):
        return self

    def numpy(self):
        return self.array


class Unset:
    """A setting of the environment that is not set."""

    def get(self):
        return None


class Environment:
    def __getattr__(self, name):
        return Unset()


def module(name, **contents):
    made = types.ModuleType(name)
    made.__dict__.update(contents)
    made.__path__ = []
    sys.modules[name] = made


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def main():
    cache = sys.argv[1] + "/sglang/srt/mem_cache/"
    module("torch", uint8=numpy.uint8, Tensor=Tensor)
    for name in ["sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage", "sglang.srt.utils"]:
        module(name)
    module("sglang.srt.environ", envs=Environment())
    module("sglang.srt.utils.common", human_readable_int=int)
    module("sglang.srt.mem_cache.storage.file")
    load("sglang.srt.mem_cache.storage.file.lru_file_evictor", cache + "storage/file/lru_file_evictor.py")
    storage = load("sglang.srt.mem_cache.hicache_storage", cache + "hicache_storage.py")
    memory = numpy.random.default_rng(7).integers(0, 256, 256 << 20, dtype=numpy.uint8)
    for line in sys.stdin:
        what, pages, size, directory = line.rstrip("\n").split(" ", 3)
        pages, size = int(pages), int(size)
        config = storage.HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
            enable_storage_metrics=False, is_page_first_layout=True, model_name="bench",
        )
        store = storage.HiCacheFile(config, directory)
        slots = len(memory) // size
        at = lambda page: Tensor(memory[page % slots * size :][:size])
        before, good = time.process_time(), 0
        for first in range(0, pages, storage.STORAGE_BATCH_SIZE):
            some = range(first, min(first + storage.STORAGE_BATCH_SIZE, pages))
            keys, places = [f"{page:064x}" for page in some], [at(page) for page in some]
            if what == "set":
                good += len(keys) * store.batch_set(keys, places)
            else:
                good += sum(found is not None for found in store.batch_get(keys, places))
        print(time.process_time() - before, good, flush=True)


main()
