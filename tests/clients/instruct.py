"""instructor as it is, against a server with the demo model."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
HELLO = [{"role": "user", "content": "A film?"}]


class Actor(BaseModel):
    """An actor."""

    sex: Literal["f", "m"]


class Film(BaseModel):
    """A film."""

    kind: Literal["drama", "comedy"]
    lead: Actor


# Mode.JSON asks for any object, which the demo model makes without end.
for mode in [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]:
    asked = dict(model="demo", messages=HELLO, response_model=Film, max_tokens=300, max_retries=0)
    made = instructor.from_openai(client, mode=mode).create(
        **asked, extra_body={"reasoning_effort": "none"}
    )
    assert isinstance(made, Film), mode
    told = [{"role": "assistant", "content": made.model_dump_json()}, {"role": "user", "content": "And another one?"}]
    again = instructor.from_openai(client, mode=mode).create(**asked | {"messages": HELLO + told})
    assert isinstance(again, Film), mode
several = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
*_, last = several.create_partial(**asked)
assert Film.model_validate(last.model_dump())
print("ok: instructor")
