#!/bin/sh
# Unpacks SGLang 0.5.23 and puts what its trees import into a virtual environment, both under target/peers (about 4 GB,
# mostly torch with the CUDA libraries it wants to find; no GPU is needed). Python 3.11.
set -eu
cd "$(dirname "$0")/../.."
mkdir -p target/peers
cd target/peers
python3 -m venv venv
venv/bin/pip download --quiet --no-deps sglang==0.5.23
venv/bin/python -m zipfile -e sglang-0.5.23-*.whl wheel
venv/bin/pip install --quiet torch==2.14.1 numpy msgspec pyzmq orjson requests pydantic psutil setproctitle fastapi \
    uvicorn uvloop ipython pillow tqdm partial_json_parser prometheus-client pybase64 xxhash openai==2.8.0 zstandard \
    einops regex sentencepiece tiktoken python-multipart aiohttp scipy dill cloudpickle 'huggingface_hub<2' pyyaml
# As SGLang declares them, without what they would bring along.
venv/bin/pip install --quiet --no-deps torchvision transformers==5.19.0 tokenizers==0.23.2 safetensors \
    compressed-tensors==0.18.0 gguf llguidance interegular torch_memory_saver apache-tvm-ffi==0.1.11 loguru
