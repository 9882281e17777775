"""Drives a server with a benchmark client or a command-line client, unchanged, and reads what it wrote for failures.

    python tests/python/benchmark_clients.py CLIENT URL --folder FOLDER [--tokenizer FOLDER] [--sources FOLDER] [--requests N]

CLIENT is one of these, run by the python that runs this program:

- `sglang`, `vllm`: the benchmark clients, from files of the package alone (`benchmark_alone.py`), which are in `--sources`
- `aiperf`: NVIDIA's
- `llm`: the command-line program, through its `extra-openai-models.yaml`

Benchmark clients end with 0 even if every request failed, so their JSON decides. Results are left in `--folder`. Exits 0 only if
every check held. Otherwise it says in one sentence per check what differed.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import urllib.request

ALONE = pathlib.Path(__file__).with_name("benchmark_alone.py")
# Longest time for one run of a client, in seconds.
PATIENCE = 900
INPUT, OUTPUT, AT_ONCE = 96, 16, 4
PROMPT = "Tell me about prefill and decode, café and 漢字."


class Differs(Exception):
    """What a client wrote is not what it should be."""


def need(condition, sentence):
    if not condition:
        raise Differs(sentence)


def started(command, **environment):
    """Runs a client. Returns what it prints on its standard output."""
    # aiperf finds no tokenizer in a folder with this variable, and the others look for one on the network without it.
    inherited = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [str(part) for part in command],
        env=inherited | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if done.returncode != 0:
        last = (done.stdout + done.stderr).strip().splitlines()[-12:]
        raise Differs(f"it ended with {done.returncode}: " + "\n    ".join(last))
    return done.stdout


def all_completed(run, result):
    """A result in the form that SGLang's and vLLM's clients share."""
    errors = [error for error in result["errors"] if error]
    need(result["completed"] == run.requests and not errors, f"{result['completed']} of {run.requests} completed: {errors[:1]}")
    tokens = run.requests * OUTPUT
    need(result["total_output_tokens"] == tokens, f"{result['total_output_tokens']} tokens came, {tokens} were asked for")


def sglang(run):
    for backend in ("sglang", "sglang-oai", "sglang-oai-chat"):
        yield f"--backend {backend}, with --cache-report", lambda: sglang_with(run, backend)


def sglang_with(run, backend):
    written = run.folder / f"{backend}.jsonl"
    # The client appends to its file.
    written.unlink(missing_ok=True)
    command = [sys.executable, ALONE, "sglang", run.sources, "--backend", backend, "--base-url", run.url]
    command += ["--model", run.model, "--tokenizer", run.tokenizer, "--dataset-name", "random-ids", "--seed", 1]
    command += ["--num-prompts", run.requests, "--max-concurrency", AT_ONCE, "--disable-tqdm", "--cache-report"]
    command += ["--random-input-len", INPUT, "--random-output-len", OUTPUT, "--random-range-ratio", 1.0]
    started([*command, "--output-details", "--output-file", written], HF_HUB_OFFLINE="1")
    result = json.loads(written.read_text().splitlines()[-1])
    all_completed(run, result)
    cached = result["cache_report"]["total_cached_tokens"]
    # The second backend sends the prompts of the first once more.
    need(cached > 0 or backend != "sglang-oai", f"no token was cached: {result['cache_report']}")


def vllm(run):
    for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        yield f"--backend {backend}", lambda: vllm_with(run, backend, path)


def vllm_with(run, backend, path):
    name = f"vllm-{backend}.json"
    command = [sys.executable, ALONE, "vllm", run.sources, "--backend", backend, "--base-url", run.url, "--endpoint", path]
    command += ["--model", run.model, "--served-model-name", run.model, "--tokenizer", run.tokenizer, "--seed", 1]
    command += ["--dataset-name", "random", "--random-input-len", INPUT, "--random-output-len", OUTPUT, "--temperature", 0]
    command += ["--num-prompts", run.requests, "--max-concurrency", AT_ONCE, "--disable-tqdm", "--save-result", "--save-detailed"]
    started([*command, "--result-dir", run.folder, "--result-filename", name], HF_HUB_OFFLINE="1")
    result = json.loads((run.folder / name).read_text())
    all_completed(run, result)
    need(not result.get("failed"), f"{result.get('failed')} requests failed")


def aiperf(run):
    for kind in ("chat", "completions"):
        yield f"--endpoint-type {kind}", lambda: aiperf_with(run, kind)


def aiperf_with(run, kind):
    folder = run.folder / f"aiperf-{kind}"
    shutil.rmtree(folder, ignore_errors=True)
    command = [pathlib.Path(sys.executable).with_name("aiperf"), "profile", "--url", run.url, "--model", run.model]
    command += ["--endpoint-type", kind, "--streaming", "--tokenizer", run.tokenizer, "--random-seed", 1]
    command += ["--request-count", run.requests, "--concurrency", AT_ONCE, "--synthetic-input-tokens-mean", INPUT]
    command += ["--output-tokens-mean", OUTPUT, "--extra-inputs", "ignore_eos:true", "--no-gpu-telemetry"]
    started([*command, "--no-server-metrics", "--ui", "none", "--artifact-dir", folder])
    (written,) = folder.rglob("profile_export_aiperf.json")
    result = json.loads(written.read_text())

    def count(name):
        return (result.get(name) or {}).get("avg") or 0

    need(count("error_request_count") == 0 and not result.get("error_summary"), f"errors: {result.get('error_summary')}")
    need(count("request_count") == run.requests, f"{count('request_count')} of {run.requests} requests are counted")
    need(not result.get("was_cancelled") and result.get("is_complete") is not False, "the run is not complete")


def llm(run):
    folder = run.folder / "llm"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    model = {"model_name": run.model, "api_base": f"{run.url}/v1"}
    able = {"supports_schema": True, "supports_tools": True}
    models = [
        {"model_id": "host-chat"} | model | able,
        {"model_id": "host-text", "completion": True} | model,
        {"model_id": "host-responses", "responses": True} | model | able,
    ]
    # JSON is YAML, too.
    (folder / "extra-openai-models.yaml").write_text(json.dumps(models))

    def ask(model, *more, tokens=12):
        options = ["-o", "max_tokens", tokens, "-o", "temperature", 0]
        return started([sys.executable, "-m", "llm", "-m", model, *options, *more, PROMPT], LLM_USER_PATH=str(folder))

    def streams(model):
        text, whole = ask(model, "--no-log"), ask(model, "--no-log", "--no-stream")
        need(text == whole and text.strip(), f"streamed it is {text!r}, whole {whole!r}")

    def follows_schema(model):
        place, days = {"enum": ["Oslo", "Rome"]}, {"enum": [1, 7]}
        schema = {"type": "object", "properties": {"place": place, "days": days}, "required": ["place", "days"], "additionalProperties": False}
        said = json.loads(ask(model, "--no-log", "--schema", json.dumps(schema), tokens=400))
        need(said["place"] in place["enum"] and said["days"] in days["enum"], f"it is {said}")

    def is_json():
        # A small model may write an object without end.
        said = ask("host-chat", "--no-log", "-o", "json_object", "1")
        need(said.lstrip().startswith("{"), f"it is {said!r}")

    def takes_tools():
        code = "def weather(place: str) -> str:\n    'The weather of a place'\n    return 'rain'\n"
        ask("host-chat", "--no-log", "--functions", code)

    def goes_on():
        ask("host-chat", "--log")
        need(ask("host-chat", "--log", "-c").strip(), "the second turn is empty")

    for model in ("host-chat", "host-text", "host-responses"):
        yield f"{model} streams what it gets whole", lambda: streams(model)
    for model in ("host-chat", "host-responses"):
        yield f"{model} follows a schema", lambda: follows_schema(model)
    yield "JSON mode gives an object", is_json
    yield "tools are taken", takes_tools
    yield "a conversation goes on", goes_on


CLIENTS = {"sglang": sglang, "vllm": vllm, "aiperf": aiperf, "llm": llm}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("url")
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="for results")
    parser.add_argument("--tokenizer", help="a folder with the model's tokenizer.json")
    parser.add_argument("--sources", help="a folder with the client's files")
    parser.add_argument("--requests", type=int, default=30, help="of each run of a benchmark client")
    run = parser.parse_args()
    run.folder = run.folder.absolute()
    run.folder.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(f"{run.url}/v1/models", timeout=60) as answer:
        run.model = json.load(answer)["data"][0]["id"]
    checks = failed = 0
    # A check runs before the next one is made.
    for name, check in CLIENTS[run.client](run):
        checks += 1
        try:
            check()
            print(f"ok      {run.client}: {name}", flush=True)
        except Exception as error:  # Of the client, of what it wrote, or of the time.
            failed += 1
            print(f"FAILED  {run.client}: {name}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
    print(f"{run.client}: {checks - failed} of {checks} checks held", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
