"""litellm as it is, against a server with the demo model."""

import asyncio
import json
import os
import sys
from typing import Literal

# It would fetch prices from the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from pydantic import BaseModel

litellm.suppress_debug_info = True

URL = sys.argv[1]


class Actor(BaseModel):
    """An actor."""

    sex: Literal["f", "m"]


class Film(BaseModel):
    """A film."""

    kind: Literal["drama", "comedy"]
    lead: Actor


class weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Oslo"]


asked = dict(api_key="none", messages=[{"role": "user", "content": "Hello!"}], temperature=0, max_tokens=200)
openai = dict(model="openai/demo", api_base=f"{URL}/v1", **asked)
whole = litellm.completion(**openai)
text = whole.choices[0].message.content
assert text and whole.usage.prompt_tokens > 0
pieces = litellm.completion(**openai, stream=True, stream_options={"include_usage": True})
assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == text
assert asyncio.run(litellm.acompletion(**openai)).choices[0].message.content == text
schema = litellm.completion(**openai, response_format=Film)
assert Film.model_validate_json(schema.choices[0].message.content)
tool = {"type": "function", "function": {"name": "weather", "parameters": weather.model_json_schema()}}
called = litellm.completion(**openai, tools=[tool], tool_choice="required")
(call, *_) = called.choices[0].message.tool_calls
assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")
claude = dict(model="anthropic/demo", api_base=URL, **asked)
assert litellm.completion(**claude).choices[0].message.content
# Nested arguments in both protocols, and a turn behind their results with the message as it came, thinking included.
nested = {"type": "function", "function": {"name": "film", "parameters": Film.model_json_schema()}}
for use in [openai, claude]:
    first = litellm.completion(**use, tools=[nested], tool_choice="required", parallel_tool_calls=False)
    message = first.choices[0].message
    assert Film.model_validate_json(message.tool_calls[0].function.arguments)
    results = [{"role": "tool", "tool_call_id": c.id, "content": "It is on."} for c in message.tool_calls]
    history = [*asked["messages"], message, *results, {"role": "user", "content": "And another one?"}]
    again = litellm.completion(**use | {"messages": history}, tools=[nested], tool_choice="required")
    assert Film.model_validate_json(again.choices[0].message.tool_calls[0].function.arguments)
assert litellm.text_completion(
    model="text-completion-openai/demo", api_base=f"{URL}/v1", api_key="none", prompt="Hello", max_tokens=5
).choices[0].text
try:
    litellm.completion(**openai | {"model": "openai/other"})
    raise AssertionError("an unknown model was served")
except litellm.NotFoundError as e:
    assert "model_not_found" in str(e) or "no model" in str(e), e
print("ok: litellm")
