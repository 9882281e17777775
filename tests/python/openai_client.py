"""Drives a server with the official `openai` package and checks every answer.

    python tests/python/openai_client.py http://127.0.0.1:8000 [--model NAME] [--no-chat] [--requests N]

Needs `pip install openai`. Exits 0 only when every check held and as many checks ran as were meant to; otherwise it says in
one sentence per check what differed. It assumes nothing about the model but that greedy answers repeat.
"""

import argparse
import concurrent.futures
import enum
import sys

import openai
import pydantic

CHECKS = []


def check(function):
    """Marks a check; its docstring says what must hold."""
    CHECKS.append(function)
    return function


def need(condition, sentence):
    if not condition:
        raise AssertionError(sentence)


def same(got, expected, what):
    need(got == expected, f"{what} is {got!r}, expected {expected!r}")


def complete(run, **more):
    request = {"model": run.model, "prompt": run.prompt, "max_tokens": 12, "temperature": 0} | more
    return run.client.completions.create(**request)


def chat(run, **more):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": run.prompt}]
    request = {"model": run.model, "messages": messages, "max_completion_tokens": 12, "temperature": 0} | more
    return run.client.chat.completions.create(**request)


@check
def models_are_listed(run):
    """the served model is in /v1/models and can be fetched by name"""
    names = [model.id for model in run.client.models.list()]
    need(run.model in names, f"{run.model!r} is not among {names}")
    same(run.client.models.retrieve(run.model).id, run.model, "the fetched model")


@check
def a_completion_counts_its_tokens(run):
    """a whole completion has text, reason and matching usage"""
    answer = complete(run)
    choice = answer.choices[0]
    need(choice.finish_reason in ("stop", "length"), f"finish_reason is {choice.finish_reason!r}")
    if choice.finish_reason == "length":
        same(answer.usage.completion_tokens, 12, "completion_tokens of an answer cut by length")
    need(answer.usage.prompt_tokens > 0, "no prompt tokens were counted")
    total = answer.usage.prompt_tokens + answer.usage.completion_tokens
    same(answer.usage.total_tokens, total, "total_tokens")


@check
def greedy_answers_repeat(run):
    """the same greedy request gives the same text"""
    same(complete(run).choices[0].text, complete(run).choices[0].text, "the second text")


@check
def seeds_repeat(run):
    """sampling with the same seed gives the same text"""
    texts = {complete(run, temperature=1.0, seed=1234).choices[0].text for _ in range(3)}
    same(len(texts), 1, "the number of different texts for one seed")


@check
def a_streamed_completion_is_the_same(run):
    """streamed pieces join to the unstreamed text; one end; usage last"""
    whole = complete(run)
    chunks = list(complete(run, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    same(text, whole.choices[0].text, "the streamed text")
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    same(ends, [whole.choices[0].finish_reason], "the finish reasons in the stream")
    same(chunks[-1].choices, [], "the choices of the last chunk")
    same(chunks[-1].usage.completion_tokens, whole.usage.completion_tokens, "streamed completion_tokens")


@check
def completion_logprobs_line_up(run):
    """logprobs=3 gives a logprob, offsets and the likeliest for each token"""
    choice = complete(run, logprobs=3).choices[0]
    logprobs = choice.logprobs
    count = len(logprobs.tokens)
    need(count > 0, "there are no tokens")
    for name in ("token_logprobs", "top_logprobs", "text_offset"):
        same(len(getattr(logprobs, name)), count, f"the length of {name}")
    need(all(value <= 0 for value in logprobs.token_logprobs), "a log probability is above 0")
    need(all(3 <= len(top) <= 4 for top in logprobs.top_logprobs), "a position has not 3 or 4 likeliest tokens")
    same(logprobs.text_offset, sorted(logprobs.text_offset), "text_offset")


@check
def a_stop_string_cuts(run):
    """text before a stop string is kept, the string is not"""
    whole = complete(run).choices[0].text
    need(len(whole) >= 3, f"the answer {whole!r} is too short to cut")
    stop = whole[1:3]
    choice = complete(run, stop=[stop]).choices[0]
    same(choice.text, whole[: whole.index(stop)], f"the text stopped at {stop!r}")
    same(choice.finish_reason, "stop", "finish_reason")


@check
def token_prompts_are_taken(run):
    """a prompt may be token ids"""
    answer = complete(run, prompt=[5, 6, 7])
    same(answer.usage.prompt_tokens, 3, "prompt_tokens of three ids")


@check
def a_chat_answers_as_assistant(run):
    """a whole chat answer has a role, content, reason and usage"""
    answer = chat(run)
    same(answer.choices[0].message.role, "assistant", "the role")
    need(answer.choices[0].finish_reason in ("stop", "length"), "finish_reason is missing")
    need(answer.usage.completion_tokens > 0, "no completion tokens were counted")


@check
def a_streamed_chat_is_the_same(run):
    """streamed deltas join to the unstreamed content"""
    whole = chat(run).choices[0].message.content
    chunks = list(chat(run, stream=True))
    same(chunks[0].choices[0].delta.role, "assistant", "the first delta's role")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    same(text, whole, "the streamed content")


@check
def chat_logprobs_line_up(run):
    """logprobs with top_logprobs=2 gives two alternatives per token"""
    content = chat(run, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    need(len(content) > 0, "there are no tokens")
    for entry in content:
        same(len(entry.top_logprobs), 2, f"the alternatives of {entry.token!r}")
        need(entry.logprob <= 0, f"the log probability of {entry.token!r} is above 0")
        need(entry.bytes is not None, f"{entry.token!r} has no bytes")


def refused(call, kind, words):
    try:
        call()
    except kind as error:
        need(words in str(error), f"the error {error} does not say {words!r}")
    else:
        raise AssertionError(f"nothing was refused, expected {kind.__name__}")


@check
def wrong_requests_are_refused(run):
    """errors have OpenAI's statuses, so that the client raises its own classes"""
    refused(lambda: complete(run, model="no-such-model"), openai.NotFoundError, "no-such-model")
    refused(lambda: complete(run, max_tokens=0), openai.BadRequestError, "max_tokens")
    refused(lambda: complete(run, max_tokens=100_000_000), openai.BadRequestError, "100000000")
    refused(lambda: complete(run, n=200), openai.BadRequestError, "from 1 to 128")
    refused(lambda: complete(run, temperature=9), openai.BadRequestError, "temperature")
    refused(lambda: complete(run, prompt=""), openai.BadRequestError, "prompt is empty")
    try:
        complete(run, max_tokens=100_000_000)
    except openai.BadRequestError as error:
        same(error.code, "context_length_exceeded", "the error code")


@check
def n_answers_are_those_of_the_following_seeds(run):
    """answer i of n is the answer with the seed and i more, whole and streamed"""
    alone = [complete(run, temperature=1.0, seed=70 + i).choices[0].text for i in range(3)]
    answer = complete(run, temperature=1.0, seed=70, n=3)
    same([choice.text for choice in answer.choices], alone, "the answers to n=3")
    same(answer.usage.prompt_tokens, complete(run).usage.prompt_tokens, "prompt_tokens of n answers")
    texts = {}
    for chunk in complete(run, temperature=1.0, seed=70, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    same([texts.get(i) for i in range(3)], alone, "the streamed answers to n=3")


@check
def chat_streams_of_several_answers_can_be_followed(run):
    """the client's own helper puts n streamed chat answers together"""
    request = {"messages": [{"role": "user", "content": run.prompt}], "max_completion_tokens": 6, "temperature": 0}
    try:
        with run.client.chat.completions.stream(model=run.model, n=3, **request) as stream:
            for _ in stream:
                pass
            answer = stream.get_final_completion()
    except openai.LengthFinishReasonError as error:
        answer = error.completion
    contents = {choice.message.content for choice in answer.choices}
    same(len(contents), 1, "the number of different greedy answers")


@check
def lists_of_prompts_are_answered_in_order(run):
    """the answers to a list of prompts are those to each"""
    prompts = [run.prompt, "one two three", "a"]
    alone = [complete(run, prompt=prompt).choices[0].text for prompt in prompts]
    same([choice.text for choice in complete(run, prompt=prompts).choices], alone, "the answers to a list")
    same(complete(run, echo=True).choices[0].text, run.prompt + alone[0], "the echoed text")


@check
def settings_of_sampling_change_what_is_drawn(run):
    """a forbidden token is not drawn, the only allowed one is, and a penalised token does not come twice"""
    allowed = complete(run, max_tokens=5, extra_body={"allowed_token_ids": [70]}, logprobs=0).choices[0]
    same(len(set(allowed.logprobs.tokens)), 1, "the number of different tokens where one is allowed")
    biased = complete(run, max_tokens=5, logit_bias={"70": 100}, logprobs=0).choices[0]
    same(biased.logprobs.tokens, allowed.logprobs.tokens, "the tokens with a bias for the same one")
    distinct = complete(run, max_tokens=8, presence_penalty=2.0, logit_bias={"70": 1.0}).choices[0].text
    same(complete(run, max_tokens=8, presence_penalty=2.0, logit_bias={"70": 1.0}).choices[0].text, distinct, "the text")


@check
def a_deadline_is_told_once(run):
    """a request whose time is up raises the client's own class"""
    late = {"timeout": 0.001, "ignore_eos": True}
    refused(lambda: complete(run, max_tokens=200, extra_body=late), openai.APIStatusError, "timeout allows")


@check
def many_at_once_all_finish(run):
    """concurrent streams all complete, and all alike"""

    def one(_):
        return "".join(chunk.choices[0].text for chunk in complete(run, stream=True))

    with concurrent.futures.ThreadPoolExecutor(run.requests) as pool:
        texts = list(pool.map(one, range(run.requests)))
    same(len(texts), run.requests, "the number of answers")
    same(len(set(texts)), 1, "the number of different greedy answers")


@check
def salts_travel_in_extra_body(run):
    """cache_salt, extra_key and no_cache change no answer, on completions and chats; a salt that is too long is refused"""
    text, said = complete(run).choices[0].text, None if run.no_chat else chat(run).choices[0].message.content
    for fields in ({"cache_salt": "tenant"}, {"extra_key": "a", "cache_salt": "b"}, {"no_cache": True}):
        same(complete(run, extra_body=fields).choices[0].text, text, f"the text with {fields}")
        if said is not None:
            same(chat(run, extra_body=fields).choices[0].message.content, said, f"the chat with {fields}")
    too_long = {"cache_salt": "x" * 257}
    refused(lambda: complete(run, extra_body=too_long), openai.BadRequestError, "256 bytes")


class Unit(enum.Enum):
    """Of a temperature."""

    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


class Weather(pydantic.BaseModel):
    """The weather of a place."""

    place: str = pydantic.Field(max_length=6)
    days: int = pydantic.Field(ge=1, le=14)
    unit: Unit


# Enough for any answer under these schemas.
LONG = {"max_completion_tokens": 400}


@check
def chat_parses_a_json_schema(run):
    """an answer under a schema is an object of its class, whole and streamed"""
    request = {"model": run.model, "messages": [{"role": "user", "content": run.prompt}], "temperature": 0} | LONG
    answer = run.client.chat.completions.parse(response_format=Weather, **request)
    parsed = answer.choices[0].message.parsed
    need(isinstance(parsed, Weather), f"the parsed answer is {parsed!r}")
    with run.client.chat.completions.stream(response_format=Weather, **request) as stream:
        for _ in stream:
            pass
        same(stream.get_final_completion().choices[0].message.parsed, parsed, "the streamed answer")


@check
def chat_calls_the_tools_that_it_must(run):
    """required and named calls parse, whole and streamed, and go back into the conversation"""
    tools = [openai.pydantic_function_tool(Weather)]
    messages = [{"role": "user", "content": run.prompt}]
    request = {"model": run.model, "messages": messages, "tools": tools, "temperature": 0} | LONG
    required = request | {"tool_choice": "required", "parallel_tool_calls": False}
    choice = run.client.chat.completions.parse(**required).choices[0]
    same(choice.finish_reason, "tool_calls", "the reason of a required call")
    call = choice.message.tool_calls[0]
    need(isinstance(call.function.parsed_arguments, Weather), f"the arguments are {call.function.arguments!r}")
    with run.client.chat.completions.stream(**required) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    same(streamed.finish_reason, "tool_calls", "the reason of a streamed call")
    same(streamed.message.tool_calls[0].function.arguments, call.function.arguments, "the streamed arguments")
    named = {"type": "function", "function": {"name": "Weather"}}
    choice = run.client.chat.completions.create(**(request | {"tool_choice": named})).choices[0]
    same([call.function.name for call in choice.message.tool_calls], ["Weather"], "the names of named calls")
    turn = {"role": "assistant", "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "5 degrees"}
    after = run.client.chat.completions.create(**(request | {"messages": [*messages, turn, result], "max_completion_tokens": 8}))
    need(after.usage.completion_tokens > 0, "nothing follows a tool's result")


@check
def chat_takes_tools_that_it_need_not_call(run):
    """tool_choice auto and none are served"""
    tools = [openai.pydantic_function_tool(Weather)]
    for choice in ("auto", "none"):
        answer = chat(run, tools=tools, tool_choice=choice)
        need(answer.choices[0].finish_reason in ("stop", "length", "tool_calls"), f"{choice}: {answer.choices[0]}")


def respond(run, **more):
    request = {"model": run.model, "input": run.prompt, "max_output_tokens": 12, "temperature": 0} | more
    return run.client.responses.create(**request)


def streamed_response(run, **request):
    """The response that the package builds from a stream, and the events."""
    with run.client.responses.stream(model=run.model, temperature=0, **request) as stream:
        events = list(stream)
        return stream.get_final_response(), events


@check
def a_response_to_a_chat_counts_its_tokens(run):
    """a response has text, status and usage, and a chat of the same tokens says the same"""
    answer = respond(run)
    text = chat(run, messages=[{"role": "user", "content": run.prompt}]).choices[0].message.content
    same(answer.output_text.strip(), text.strip(), "the text of a response")
    need(answer.status in ("completed", "incomplete"), f"the status is {answer.status!r}")
    if answer.status == "incomplete":
        same(answer.incomplete_details.reason, "max_output_tokens", "why it is incomplete")
        same(answer.usage.output_tokens, 12, "output_tokens of a response cut by length")
    total = answer.usage.input_tokens + answer.usage.output_tokens
    same(answer.usage.total_tokens, total, "total_tokens")


@check
def a_streamed_response_to_a_chat_is_the_same(run):
    """events build the response that a whole answer is"""
    whole = respond(run)
    events = list(respond(run, stream=True))
    same([event.sequence_number for event in events], list(range(len(events))), "the numbers of the events")
    last = events[-1]
    same(last.type, f"response.{whole.status}", "the last event")
    same(last.response.output_text, whole.output_text, "the streamed text")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    same(text, whole.output_text, "the joined deltas")


@check
def a_response_to_a_chat_parses_a_json_schema(run):
    """a response under a schema is an object of its class, whole and streamed"""
    request = {"input": run.prompt, "text_format": Weather, "max_output_tokens": 400}
    answer = run.client.responses.parse(model=run.model, temperature=0, **request)
    need(isinstance(answer.output_parsed, Weather), f"the parsed response is {answer.output_parsed!r}")
    streamed, _ = streamed_response(run, **request)
    same(streamed.output_parsed, answer.output_parsed, "the streamed response")


@check
def a_response_to_a_chat_calls_the_tools_that_it_must(run):
    """required calls parse, whole and streamed, and go back into the conversation"""
    tools = [openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}]
    request = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 400}
    answer = respond(run, **request)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    Weather.model_validate_json(call.arguments)
    need(call.call_id != call.id, "a call and its item have one id")
    streamed, events = streamed_response(run, input=run.prompt, **request)
    (again,) = [item for item in streamed.output if item.type == "function_call"]
    same(again.arguments, call.arguments, "the streamed arguments")
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    same("".join(deltas), call.arguments, "the joined deltas of the arguments")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5 degrees"}
    after = respond(run, input=[{"role": "user", "content": run.prompt}, *answer.output, result], tools=tools)
    need(after.usage.input_tokens > answer.usage.input_tokens, "the turn is not part of the next prompt")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("url", help="for example http://127.0.0.1:8000")
    arguments.add_argument("--model", help="default: the first one listed")
    arguments.add_argument("--prompt", default="Tell me about prefill and decode, café and 漢字.")
    arguments.add_argument("--no-chat", action="store_true", help="the model has no chat template")
    arguments.add_argument("--requests", type=int, default=16, help="concurrent streams")
    run = arguments.parse_args()
    run.client = openai.OpenAI(base_url=run.url.rstrip("/") + "/v1", api_key="none", max_retries=0, timeout=60)
    try:
        run.model = run.model or next(iter(run.client.models.list())).id
    except openai.OpenAIError as error:
        print(f"FAILED: {run.url} does not list its models: {error}")
        return 1
    checks = [function for function in CHECKS if not (run.no_chat and "chat" in function.__name__)]
    passed = 0
    for function in checks:
        try:
            function(run)
        except Exception as error:  # whatever it was, the other checks still tell something
            print(f"FAILED {function.__name__} ({function.__doc__}): {type(error).__name__}: {error}")
        else:
            passed += 1
            print(f"ok {function.__name__}")
    print(f"{passed} of {len(checks)} checks passed")
    return 0 if passed == len(checks) and passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
