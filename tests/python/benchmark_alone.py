"""Runs the benchmark client of SGLang or vLLM, unchanged, from a folder that has nothing else of its package.

    python tests/python/benchmark_alone.py sglang|vllm FOLDER [ARGUMENTS OF THE CLIENT]

The whole packages bring gigabytes of libraries for GPUs. Their clients use little of them. A module of the package that is not in
FOLDER is made up: its names are classes that do nothing, but for those that a run calls, which are below.
"""

import argparse
import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import types


def tokenizer(name, **_more):
    import transformers

    return transformers.AutoTokenizer.from_pretrained(name)


class Placeholder:
    """Stands for a package that is not installed, and for all in it."""

    def __init__(self, *_given):
        pass

    def placeholder_attr(self, _name):
        return self


# What is called, or is the base of a class, in a run without pictures and downloads.
CALLED = {
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.tokenizers": {"get_tokenizer": tokenizer},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
    "vllm.utils.gc_utils": {"freeze_gc_heap": lambda: None},
    "vllm.utils.import_utils": {"PlaceholderModule": Placeholder},
    "vllm.utils.mistral": {"is_mistral_tokenizer": lambda _tokenizer: False},
}


class MadeUpModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class MadeUp(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of a package that no other finder found."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self.package:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return MadeUpModule(spec.name)

    def exec_module(self, module):
        module.__dict__.update(CALLED.get(module.__name__, {}))


def main():
    package, folder, *arguments = sys.argv[1:]
    sys.path.insert(0, folder)
    sys.meta_path.append(MadeUp(package))
    sys.argv = [package, *arguments]
    if package == "sglang":
        importlib.import_module("sglang.benchmark.serving").cli_main()
    else:
        serve = importlib.import_module("vllm.benchmarks.serve")
        parser = argparse.ArgumentParser()
        serve.add_cli_args(parser)
        serve.main(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
