"""What a grammar costs: time between tokens with a JSON schema and without, in one run.

    python tests/python/grammar_cost.py URL [--requests N] [--tokens N] [--at-once N] [--pid PID]

Sends the same prompt with and without `response_format`, in turns. Prints the mean time between two tokens of both, and the ratio.
With the process id of `host` on this machine, it also prints the processor time of `host` and its workers for each token. Other
programs on the machine change that less than the time between tokens.

An answer ends where the model ends it. Answers of one token have no time between tokens and are left out of it.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import statistics
import time
import urllib.request

PROMPT = "Describe three towns by the sea, with their people, their harbours and their festivals, as JSON."
TOWN = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "people": {"type": "integer", "minimum": 0, "maximum": 5000000},
        "harbour": {"type": "boolean"},
        "festivals": {"type": "array", "items": {"type": "string", "maxLength": 60}, "minItems": 1, "maxItems": 4},
        "about": {"type": "string", "maxLength": 300},
    },
    "required": ["name", "people", "harbour", "festivals", "about"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"towns": {"type": "array", "items": TOWN, "minItems": 3, "maxItems": 3}},
    "required": ["towns"],
    "additionalProperties": False,
}
GRAMMAR = {"response_format": {"type": "json_schema", "json_schema": {"name": "towns", "strict": True, "schema": SCHEMA}}}


def ask(url, seed, tokens, more):
    """Seconds from the first text to the last, the tokens of the text behind the first, and why the answer ended."""
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": tokens,
        "temperature": 0.8,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body | more).encode(), {"Content-Type": "application/json"}
    )
    first = last = count = reason = None
    with urllib.request.urlopen(request, timeout=600) as events:
        for line in events:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"the answer broke off: {event['error']}")
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                reason = choice["finish_reason"] or reason
                if choice["delta"].get("content"):
                    last = time.perf_counter()
                    first = first or last
    # The token that ends an answer has no text.
    behind = (count or 1) - 1 - (reason == "stop")
    return ((last or 0) - (first or 0), max(behind, 0), reason)


def processor_seconds(pid):
    """User and system time of a process and of all below it, from /proc (proc(5): fields 4, 14 and 15)."""
    parents, times = {}, {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(") ", 1)[1].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
        times[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def below(process):
        while process and process != pid:
            process = parents.get(process)
        return process == pid

    return sum(seconds for process, seconds in times.items() if below(process))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=32, help="of each kind")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer at most")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--pid", type=int, help="the process of `host`")
    run = parser.parse_args()
    kinds = {"without": {}, "with a schema": GRAMMAR}
    for more in kinds.values():
        # The grammar compiles before the first measured answer.
        ask(run.url, 0, 8, more)
    answers = {name: [] for name in kinds}
    processor = dict.fromkeys(kinds, 0.0)
    turns = [range(first, min(first + run.at_once, run.requests)) for first in range(0, run.requests, run.at_once)]
    with concurrent.futures.ThreadPoolExecutor(run.at_once) as pool:
        for number, seeds in enumerate(turns):
            order = list(kinds) if number % 2 == 0 else list(kinds)[::-1]
            for name in order:
                before = processor_seconds(run.pid) if run.pid else 0.0
                more = kinds[name]
                answers[name] += pool.map(lambda seed: ask(run.url, seed + 1, run.tokens, more), seeds)
                processor[name] += (processor_seconds(run.pid) if run.pid else 0.0) - before
    print(f"{run.requests} answers of each kind, {run.at_once} at once, at most {run.tokens} tokens\n")
    print("| Grammar | Tokens | Ended with `stop` | ITL, mean | of without | ITL, median of answers | Processor time a token | of without |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    plain = None
    for name, all_of_kind in answers.items():
        timed = [(seconds, tokens) for seconds, tokens, _ in all_of_kind if tokens > 0]
        if not timed:
            raise SystemExit(f"no answer {name} has two tokens")
        mean = sum(seconds for seconds, _ in timed) / sum(tokens for _, tokens in timed)
        median = statistics.median(seconds / tokens for seconds, tokens in timed)
        count = sum(tokens + 1 for _, tokens, _ in all_of_kind)
        used = processor[name] / count
        plain = plain or (mean, used)
        stopped = sum(reason == "stop" for _, _, reason in all_of_kind)
        told = f"{1e3 * used:.2f} ms | {used / plain[1]:.3f}" if used and plain[1] else "not measured | "
        print(
            f"| {name} | {count} | {stopped} of {len(all_of_kind)} | {1e3 * mean:.2f} ms | {mean / plain[0]:.3f} "
            f"| {1e3 * median:.2f} ms | {told} |"
        )


main()
