"""The openai and anthropic packages as they are, against a server with the demo model."""

import asyncio
import json
import sys
from typing import Literal

import anthropic
import openai
from pydantic import BaseModel

URL = sys.argv[1]
HELLO = [{"role": "user", "content": "Hello!"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
create = client.chat.completions.create


def chat():
    whole = create(model="demo", messages=HELLO, temperature=0, max_tokens=300)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens > 0
    stream = create(
        model="demo", messages=HELLO, temperature=0, max_tokens=300, stream=True,
        stream_options={"include_usage": True}, logprobs=True, top_logprobs=2,
    )
    pieces, usage = [], None
    for chunk in stream:
        usage = chunk.usage or usage
        pieces += [c.delta.content or "" for c in chunk.choices]
    assert "".join(pieces) == text
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    with client.chat.completions.stream(
        model="demo", messages=HELLO, temperature=0, max_tokens=300
    ) as helper:
        assert helper.get_final_completion().choices[0].message.content == text


def tools():
    asked = dict(model="demo", messages=HELLO, tools=[TOOL], max_tokens=200, seed=3)
    whole = create(**asked, tool_choice="required", parallel_tool_calls=False)
    assert whole.choices[0].finish_reason == "tool_calls"
    message = whole.choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Paris", "Oslo")
    named = {"type": "function", "function": {"name": "weather"}}
    arguments = ""
    for chunk in create(**asked, tool_choice=named, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            arguments += call.function.arguments or ""
    assert json.loads(arguments)["city"] in ("Paris", "Oslo")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    asked["messages"] = [*HELLO, message, result]
    assert create(**asked, tool_choice="none").choices[0].message.tool_calls is None


class Film(BaseModel):
    kind: Literal["drama", "comedy"]
    good: bool


def structured():
    parsed = client.chat.completions.parse(
        model="demo", messages=HELLO, response_format=Film, max_tokens=300,
        reasoning_effort="none",
    )
    assert isinstance(parsed.choices[0].message.parsed, Film)
    parsed = client.responses.parse(
        model="demo", input="A film?", text_format=Film, max_output_tokens=300,
        reasoning={"effort": "none"},
    )
    assert isinstance(parsed.output_parsed, Film)


def responses():
    whole = client.responses.create(model="demo", input="Hello!", temperature=0)
    assert whole.status == "completed" and whole.output_text
    text, last = "", None
    for event in client.responses.create(model="demo", input=HELLO, temperature=0, stream=True):
        text += event.delta if event.type == "response.output_text.delta" else ""
        last = event.type
    assert (text, last) == (whole.output_text, "response.completed")


def errors():
    for call, kind, code in [
        (dict(model="other", messages=HELLO), openai.NotFoundError, "model_not_found"),
        (
            dict(model="demo", messages=[{"role": "user", "content": "x " * 3000}]),
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        (
            dict(model="demo", messages=HELLO, extra_body={"audio": {"voice": "alloy", "format": "wav"}}),
            openai.BadRequestError,
            "unsupported_parameter",
        ),
    ]:
        try:
            create(**call)
            raise AssertionError(f"{call} was served")
        except kind as e:
            assert e.code == code, e


async def together():
    others = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    ask = lambda i: others.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": f"Hello {i}"}], max_tokens=20
    )
    answers = await asyncio.gather(*[ask(i) for i in range(12)])
    assert all(a.usage.completion_tokens > 0 for a in answers)
    seen = {}
    async for chunk in await others.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=20, stream=True, n=2
    ):
        for choice in chunk.choices:
            seen[choice.index] = choice.finish_reason
    assert set(seen) == {0, 1} and all(seen.values())


def claude():
    other = anthropic.Anthropic(base_url=URL, api_key="none")
    asked = dict(model="demo", max_tokens=300, messages=HELLO)
    greedy = {"extra_body": {"temperature": 0}}
    whole = other.messages.create(**asked, **greedy)
    with other.messages.stream(**asked, **greedy) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().stop_reason == "end_turn"
    tool = {"name": "weather", "description": "w", "input_schema": SCHEMA}
    asked |= dict(tools=[tool], thinking={"type": "disabled"})
    one = {"type": "any", "disable_parallel_tool_use": True}
    with other.messages.stream(**asked, tool_choice=one) as stream:
        message = stream.get_final_message()
    calls = [b for b in message.content if b.type == "tool_use"]
    assert message.stop_reason == "tool_use" and calls[0].input["city"] in ("Paris", "Oslo")
    results = [{"type": "tool_result", "tool_use_id": c.id, "content": "rain"} for c in calls]
    asked["messages"] = [
        *HELLO,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    assert other.messages.create(**asked).role == "assistant"
    # Without thinking, the template opens the answer with an empty block of it.
    for thinking, tokens in [({"type": "enabled", "budget_tokens": 1024}, 15), ({"type": "disabled"}, 19)]:
        counted = other.messages.count_tokens(model="demo", messages=HELLO, thinking=thinking)
        assert counted.input_tokens == tokens
    assert other.messages.count_tokens(model="demo", messages=HELLO).input_tokens == 19


for check in [chat, tools, structured, responses, errors, claude]:
    check()
    print("ok:", check.__name__)
asyncio.run(together())
print("ok: together")
