"""langchain-openai as it is, against a server with the demo model."""

import asyncio
import sys
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

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


chat = ChatOpenAI(model="demo", base_url=f"{URL}/v1", api_key="none", temperature=0, max_tokens=200)
whole = chat.invoke([HumanMessage("Hello!")])
assert whole.content and whole.usage_metadata["output_tokens"] > 0
chunks = list(chat.stream([HumanMessage("Hello!")], stream_usage=True))
assert "".join(c.content for c in chunks) == whole.content
assert sum((c.usage_metadata or {}).get("output_tokens", 0) for c in chunks) > 0
assert asyncio.run(chat.ainvoke("Hello!")).content == whole.content
assert len(chat.batch(["Hello!", "Hi!"])) == 2
film = chat.with_structured_output(Film, method="json_schema")
assert isinstance(film.invoke("A film?"), Film)
film = chat.with_structured_output(Film, method="function_calling")
assert isinstance(film.invoke("A film?"), Film)
bound = chat.bind_tools([weather], tool_choice="weather")
called = bound.invoke("The weather?")
(call,) = called.tool_calls
assert call["name"] == "weather" and call["args"]["city"] in ("Paris", "Oslo")
gathered = None
for chunk in bound.stream("The weather?"):
    gathered = chunk if gathered is None else gathered + chunk
assert gathered.tool_calls[0]["args"]["city"] in ("Paris", "Oslo")
history = [HumanMessage("The weather?"), called, ToolMessage("rain", tool_call_id=call["id"])]
assert isinstance(chat.invoke(history), AIMessage)
# Nested arguments, and a turn behind their result.
bound = chat.bind_tools([Film], tool_choice="Film")
for use in [bound, chat.bind_tools([Film], tool_choice="required", parallel_tool_calls=False)]:
    called = use.invoke("A film?")
    assert Film.model_validate(called.tool_calls[0]["args"])
    results = [ToolMessage("It is on.", tool_call_id=c["id"]) for c in called.tool_calls]
    again = bound.invoke([HumanMessage("A film?"), called, *results, HumanMessage("Another?")])
    assert Film.model_validate(again.tool_calls[0]["args"])
# Responses: with their items, and by their ids.
for more in [{"store": False}, {"use_previous_response_id": True}]:
    answers = ChatOpenAI(
        model="demo", base_url=f"{URL}/v1", api_key="none", use_responses_api=True,
        output_version="responses/v1", max_tokens=200, **more,
    )
    first = answers.invoke("Hello!")
    assert first.text
    assert isinstance(answers.invoke([HumanMessage("Hello!"), first, HumanMessage("And?")]), AIMessage)
    film = answers.with_structured_output(Film, method="json_schema")
    assert isinstance(film.invoke("A film?"), Film)
print("ok: langchain-openai")
