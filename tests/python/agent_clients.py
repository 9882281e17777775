"""Drives a server with litellm and langchain-openai, as agents do, and checks every answer.

    python tests/python/agent_clients.py http://127.0.0.1:8000 [--model NAME]

Needs `pip install litellm langchain-openai`. Exits 0 only when every check held; otherwise it says in one sentence per check what
differed. It assumes nothing about the model but that greedy answers repeat.
"""

import argparse
import asyncio
import os
import threading
import typing

# litellm would fetch a table of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import langchain_core.messages as messages
import langchain_openai
import litellm
import pydantic

CHECKS = []
# Longest time for a check, in seconds.
PATIENCE = 120
PROMPT = "Tell me about prefill and decode, café and 漢字."


def check(function):
    """Marks a check; its docstring says what must hold."""
    CHECKS.append(function)
    return function


def need(condition, sentence):
    if not condition:
        raise AssertionError(sentence)


def same(got, expected, what):
    need(got == expected, f"{what} is {got!r}, expected {expected!r}")


class Weather(pydantic.BaseModel):
    """The weather of a place."""

    # A small model would write texts and more properties without end, and langchain leaves out lengths and ranges.
    model_config = pydantic.ConfigDict(extra="forbid")
    place: typing.Literal["Oslo", "Rome"]
    days: typing.Literal[1, 7]


TOOL = {
    "type": "function",
    "function": {"name": "Weather", "description": Weather.__doc__, "parameters": Weather.model_json_schema()},
}
ASK = [{"role": "user", "content": PROMPT}]


def lite(run, **more):
    request = {"messages": ASK, "max_tokens": 400, "temperature": 0} | more
    return litellm.completion(model=f"openai/{run.model}", api_base=run.api, api_key="none", **request)


def chain(run, **more):
    return langchain_openai.ChatOpenAI(
        base_url=run.api, api_key="none", model=run.model, temperature=0, max_tokens=400, **more
    )


@check
def litellm_streams_what_it_gets_whole(run):
    """a streamed chat of litellm has the text of a whole one"""
    whole = lite(run, max_tokens=12)
    need(whole.usage.completion_tokens > 0, "no completion tokens were counted")
    chunks = lite(run, max_tokens=12, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    same(text, whole.choices[0].message.content, "the streamed text")


@check
def litellm_gets_json_of_a_schema(run):
    """response_format with a class gives JSON of it"""
    Weather.model_validate_json(lite(run, response_format=Weather).choices[0].message.content)


@check
def litellm_calls_tools(run):
    """required and named calls parse, and go back into the conversation"""
    for choice in ("required", {"type": "function", "function": {"name": "Weather"}}):
        message = lite(run, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False).choices[0].message
        (call,) = message.tool_calls
        Weather.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "5 degrees"}
    turns = [*ASK, message.model_dump(), result]
    after = lite(run, messages=turns, tools=[TOOL], max_tokens=8)
    need(after.usage.completion_tokens > 0, "nothing follows a tool's result")


@check
def litellm_responds(run):
    """responses of litellm: text, and a tool that must be called"""
    request = {"model": f"openai/{run.model}", "api_base": run.api, "api_key": "none", "input": PROMPT, "temperature": 0}
    answer = litellm.responses(max_output_tokens=12, **request)
    need(answer.usage.output_tokens > 0, "no output tokens were counted")
    tool = {"type": "function"} | TOOL["function"]
    answer = litellm.responses(max_output_tokens=400, tools=[tool], tool_choice="required", **request)
    calls = [item for item in answer.output if item.type == "function_call"]
    need(calls, f"no call is among {answer.output}")
    Weather.model_validate_json(calls[0].arguments)


@check
def litellm_translates_messages_of_anthropic(run):
    """a message as Anthropic's clients send it is answered"""
    answer = asyncio.run(
        litellm.anthropic.messages.acreate(
            model=f"openai/{run.model}", api_base=run.api, api_key="none", messages=ASK, max_tokens=12
        )
    )
    need(answer["content"], f"the answer is empty: {answer}")


@check
def langchain_streams_what_it_gets_whole(run):
    """invoke, stream and batch of a chat model give one text"""
    model = chain(run)
    model.max_tokens = 12
    whole = model.invoke(PROMPT)
    same("".join(chunk.content for chunk in model.stream(PROMPT)), whole.content, "the streamed text")
    same([answer.content for answer in model.batch([PROMPT, PROMPT])], [whole.content] * 2, "the batch")


@check
def langchain_gets_structured_output(run):
    """with_structured_output gives an object of the class, by schema and by a call"""
    for method in ("json_schema", "function_calling"):
        answer = chain(run).with_structured_output(Weather, method=method).invoke(PROMPT)
        need(isinstance(answer, Weather), f"{method} gives {answer!r}")


@check
def langchain_calls_tools(run):
    """bind_tools with a choice gives calls, whole and streamed, and takes their results"""
    model = chain(run).bind_tools([Weather], tool_choice="any")
    said = model.invoke(PROMPT)
    need(said.tool_calls, f"no call is in {said!r}")
    streamed = None
    for chunk in model.stream(PROMPT):
        streamed = chunk if streamed is None else streamed + chunk
    same([call["args"] for call in streamed.tool_calls], [call["args"] for call in said.tool_calls], "streamed arguments")
    for call in said.tool_calls:
        Weather.model_validate(call["args"])
    results = [messages.ToolMessage("5 degrees", tool_call_id=call["id"]) for call in said.tool_calls]
    free = chain(run).bind_tools([Weather])
    after = free.invoke([messages.HumanMessage(PROMPT), said, *results])
    need(after.usage_metadata["output_tokens"] > 0, "nothing follows a tool's result")


@check
def langchain_responds(run):
    """a chat model over /v1/responses answers, and parses a schema"""
    model = chain(run, use_responses_api=True)
    need(model.invoke(PROMPT).usage_metadata["output_tokens"] > 0, "no output tokens were counted")
    answer = model.with_structured_output(Weather).invoke(PROMPT)
    need(isinstance(answer, Weather), f"the answer is {answer!r}")


@check
def langchain_completes_batches(run):
    """the completions model answers a batch of prompts in order"""
    model = langchain_openai.OpenAI(base_url=run.api, api_key="none", model=run.model, temperature=0, max_tokens=8)
    prompts = ["one two", "three four"]
    same(model.batch(prompts), [model.invoke(prompt) for prompt in prompts], "the batch")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("url", help="for example http://127.0.0.1:8000")
    arguments.add_argument("--model", help="default: the first one listed")
    run = arguments.parse_args()
    run.api = f"{run.url}/v1"
    if run.model is None:
        models = litellm.module_level_client.get(f"{run.api}/models").json()
        run.model = models["data"][0]["id"]
    failed = []
    for function in CHECKS:
        why = []
        # A client that waits for ever must not hold up the other checks.
        thread = threading.Thread(target=held, args=(function, run, why), daemon=True)
        thread.start()
        thread.join(PATIENCE)
        if thread.is_alive():
            why.append(f"it has not ended after {PATIENCE} s")
        failed += [function.__name__] if why else []
        print(f"FAILED  {function.__doc__}: {why[0]}" if why else f"ok      {function.__doc__}", flush=True)
    print(f"{len(CHECKS) - len(failed)} of {len(CHECKS)} checks held", flush=True)
    os._exit(1 if failed else 0)


def held(function, run, why):
    """Runs a check, and appends to `why` when it does not hold."""
    try:
        function(run)
    except Exception as error:  # Each client has classes of its own.
        why.append(f"{type(error).__name__}: {str(error)[:600]}")


if __name__ == "__main__":
    main()
