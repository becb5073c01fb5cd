"""pydantic-ai as it is, against a server with the demo model: nested models as tools' arguments and as outputs."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL = sys.argv[1]


class Actor(BaseModel):
    """An actor."""

    sex: Literal["f", "m"]


class Play(BaseModel):
    """A play."""

    kind: Literal["drama", "comedy"]
    lead: Actor


openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
MODELS = [
    OpenAIChatModel("demo", provider=openai),
    OpenAIResponsesModel("demo", provider=openai),
    AnthropicModel("demo", provider=AnthropicProvider(base_url=URL, api_key="none")),
]


async def stream(agent, history):
    async with agent.run_stream("And another one?", message_history=history) as result:
        return await result.get_output()


for model in MODELS:
    # It knows by name which of Anthropic's models hold to schemas.
    native = [] if isinstance(model, AnthropicModel) else [NativeOutput(Play)]
    for output in [ToolOutput(Play), *native]:
        agent = Agent(model, output_type=output, model_settings={"max_tokens": 300, "parallel_tool_calls": False})
        first = agent.run_sync("A play?")
        assert isinstance(first.output, Play), (model, output)
        again = agent.run_sync("And another one?", message_history=first.all_messages())
        assert isinstance(again.output, Play), (model, output)
        assert isinstance(asyncio.run(stream(agent, first.all_messages())), Play), (model, output)

    seen = []

    async def until_called(context, definition):
        """Offers the tool until it has been called."""
        return None if seen else definition

    # The model must call one of both: the tool, after which only the output is left, or the output.
    agent = Agent(model, output_type=ToolOutput(Play), retries=3)

    @agent.tool_plain(prepare=until_called)
    def stage(play: Play) -> str:
        """Puts a play on stage."""
        seen.append(play)
        return "It is on."

    for seed in range(40):
        settings = {"max_tokens": 300, "temperature": 1.0, "seed": seed, "parallel_tool_calls": False}
        made = agent.run_sync("A play?", model_settings=settings)
        assert isinstance(made.output, Play), model
        if seen:
            break
    assert seen and all(isinstance(p, Play) for p in seen), model
    again = agent.run_sync("And now?", message_history=made.all_messages(), model_settings=settings)
    assert isinstance(again.output, Play), model
print("ok: pydantic-ai")
