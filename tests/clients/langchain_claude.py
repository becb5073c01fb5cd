"""langchain-anthropic as it is, against a server with the demo model."""

import sys
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from pydantic import BaseModel

URL = sys.argv[1]


class Actor(BaseModel):
    """An actor."""

    sex: Literal["f", "m"]


class Play(BaseModel):
    """A play."""

    kind: Literal["drama", "comedy"]
    lead: Actor


chat = ChatAnthropic(model="demo", base_url=URL, api_key="none", max_tokens=300)
whole = chat.invoke([HumanMessage("Hello!")])
assert whole.text and whole.usage_metadata["output_tokens"] > 0
assert isinstance(chat.invoke([HumanMessage("Hello!"), whole, HumanMessage("And?")]), AIMessage)
assert any(c.text for c in chat.stream([HumanMessage("Hello!")]))
for method in ["function_calling", "json_schema"]:
    made = chat.with_structured_output(Play, method=method)
    assert isinstance(made.invoke("A play?"), Play), method
bound = chat.bind_tools([Play], tool_choice="Play")
called = bound.invoke("A play?")
(call,) = called.tool_calls
assert Play.model_validate(call["args"])
gathered = None
for chunk in bound.stream("A play?"):
    gathered = chunk if gathered is None else gathered + chunk
assert Play.model_validate(gathered.tool_calls[0]["args"])
# Both are taken back, with their results.
for message in [called, gathered]:
    result = ToolMessage("It is on.", tool_call_id=message.tool_calls[0]["id"])
    history = [HumanMessage("A play?"), message, result, HumanMessage("And another one?")]
    assert Play.model_validate(bound.invoke(history).tool_calls[0]["args"])
thinking = ChatAnthropic(
    model="demo", base_url=URL, api_key="none", max_tokens=1500, thinking={"type": "enabled", "budget_tokens": 1024}
)
thought = thinking.invoke([HumanMessage("Hello!")])
assert isinstance(thinking.invoke([HumanMessage("Hello!"), thought, HumanMessage("And?")]), AIMessage)
print("ok: langchain-anthropic")
