"""llama-index as it is, against a server with the demo model."""

import sys
from typing import Literal

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL = sys.argv[1]


class Actor(BaseModel):
    """An actor."""

    sex: Literal["f", "m"]


class Play(BaseModel):
    """A play."""

    kind: Literal["drama", "comedy"]
    lead: Actor


def stage(play: Play) -> str:
    """Puts a play on stage."""
    return "It is on."


asked = dict(
    model="demo", api_base=f"{URL}/v1", api_key="none", context_window=1024, temperature=0, max_tokens=200,
    is_chat_model=True, is_function_calling_model=True,
)
llm = OpenAILike(**asked)
hello = [ChatMessage(role="user", content="Hello!")]
whole = llm.chat(hello)
assert whole.message.content
*_, last = llm.stream_chat(hello)
assert last.message.content == whole.message.content
assert llm.chat([*hello, whole.message, ChatMessage(role="user", content="And?")]).message.content is not None
assert llm.complete("Hello!").text

tool = FunctionTool.from_defaults(stage)
called = llm.chat_with_tools([tool], chat_history=hello, tool_required=True)
(call, *_) = llm.get_tool_calls_from_response(called)
assert Play.model_validate(call.tool_kwargs["play"])
result = ChatMessage(role=MessageRole.TOOL, content="It is on.", additional_kwargs={"tool_call_id": call.tool_id})
history = [*hello, called.message, result]
assert llm.chat_with_tools([tool], chat_history=history).message.role == MessageRole.ASSISTANT
assert isinstance(llm.as_structured_llm(Play).chat(hello).raw, Play)
strict = OpenAILike(**asked, should_use_structured_outputs=True)
assert isinstance(strict.as_structured_llm(Play).chat(history[:1]).raw, Play)
print("ok: llama-index")
