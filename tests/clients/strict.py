"""400 requests of many kinds, each answer and each event of which must be what the official packages' types say, in
pydantic's strict mode: against a server with the demo model.
"""

import json
import random
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import anthropic.types
import openai.types.chat
import openai.types.responses
from pydantic import TypeAdapter

URL, REQUESTS = sys.argv[1], 400
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
# The types of whole answers and of events.
TYPES = {
    CHAT: (openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletionChunk),
    COMPLETIONS: (openai.types.Completion, openai.types.Completion),
    RESPONSES: (openai.types.responses.Response, openai.types.responses.ResponseStreamEvent),
    MESSAGES: (anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
}
ADAPTERS = {path: tuple(TypeAdapter(t) for t in types) for path, types in TYPES.items()}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]}
TEXTS = ["Hello!", "I would like to find a restaurant.", "Tell me about a film.", "Ärger & 日本 🎉"]


def chat(choose):
    body = {"messages": [{"role": "user", "content": choose(TEXTS)}], "max_completion_tokens": choose([1, 8, 40])}
    tool = {"type": "function", "function": {"name": "weather", "description": "w", "parameters": CITY}}
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    return body | choose([
        {}, {}, {"n": 2}, {"logprobs": True, "top_logprobs": 3}, {"stop": ["e", "a"]},
        {"tools": [tool]}, {"tools": [tool], "tool_choice": "required"}, {"response_format": schema},
        {"tools": [tool], "response_format": schema}, {"functions": [tool["function"]]},
        {"functions": [tool["function"]], "function_call": {"name": "weather"}},
    ]) | choose([{}, {"reasoning_effort": "none"}, {"thinking_budget": 4}])


def completions(choose):
    body = {"prompt": choose([*TEXTS, TEXTS[:2]]), "max_tokens": choose([1, 8, 40])}
    return body | choose([{}, {"n": 2}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 2}, {"stop": "e"}])


def responses(choose):
    tool = {"type": "function", "name": "weather", "description": "w", "parameters": CITY, "strict": False}
    format = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    custom = {"type": "custom", "name": "note", "description": "Takes a note."}
    group = {"type": "namespace", "name": "mcp", "description": "Tools.", "tools": [tool]}
    return {"input": choose(TEXTS), "max_output_tokens": choose([1, 8, 40])} | choose([
        {}, {}, {"instructions": "Be brief."}, {"tools": [tool]}, {"tools": [tool], "tool_choice": "required"},
        {"text": {"format": format}}, {"metadata": {"a": "b"}, "user": "me"}, {"tools": [custom]},
        {"tools": [custom], "tool_choice": "required"}, {"tools": [group], "tool_choice": "required"},
    ]) | choose([{}, {"reasoning": {"effort": "none"}}, {"reasoning": {"effort": "low", "summary": "auto"}}])


def messages(choose):
    tool = {"name": "weather", "description": "w", "input_schema": CITY}
    body = {"messages": [{"role": "user", "content": choose(TEXTS)}], "max_tokens": choose([1, 8, 40])}
    return body | choose([
        {}, {}, {"system": "Be brief."}, {"stop_sequences": ["e"]}, {"tools": [tool]},
        {"tools": [tool], "tool_choice": {"type": "any"}},
        {"output_config": {"format": {"type": "json_schema", "schema": CITY}}},
        {"messages": [*body["messages"], {"role": "assistant", "content": "I"}]},
    ]) | choose([{}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking": {"type": "adaptive"}}])


KINDS = {CHAT: chat, COMPLETIONS: completions, RESPONSES: responses, MESSAGES: messages}


def post(path, body):
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=300).read().decode()
    except urllib.error.HTTPError as e:
        raise AssertionError(f"{path} {json.dumps(body)}: {e.code} {e.read().decode()}") from None


def one(number):
    """Sends a request; returns how many values were checked."""
    choose = random.Random(number).choice
    path = list(KINDS)[number % 4]
    streams = number // 4 % 2 == 1
    body = {"model": "demo", "stream": streams, "temperature": choose([0, 1]), "seed": number} | KINDS[path](choose)
    if streams and path in (CHAT, COMPLETIONS):
        body["stream_options"] = {"include_usage": True}
    answer = post(path, body)
    texts = [answer]
    if streams:
        texts = [line[6:] for line in answer.split("\n") if line.startswith("data: ") and line != "data: [DONE]"]
        assert len(texts) > 1, answer
    for text in texts:
        if path == COMPLETIONS:
            # The type forbids the null that OpenAI, as nq, gives for a prompt's first token, which follows nothing.
            text = text.replace('"token_logprobs":[null', '"token_logprobs":[0.0')
            text = text.replace('"top_logprobs":[null', '"top_logprobs":[{}')
        if streams and path == COMPLETIONS:
            # OpenAI's type is that of a whole answer; its streams say null until the end, as nq's do.
            text = text.replace('"finish_reason":null', '"finish_reason":"stop"')
        try:
            ADAPTERS[path][streams].validate_json(text, strict=True)
        except Exception as e:
            raise AssertionError(f"{path} {json.dumps(body)}: {text}: {e}") from None
    return len(texts)


with ThreadPoolExecutor(4) as pool:
    checked = sum(pool.map(one, range(REQUESTS)))
for card in json.loads(urllib.request.urlopen(f"{URL}/v1/models").read())["data"]:
    openai.types.Model.model_validate_json(json.dumps(card), strict=True)
print(f"ok: {REQUESTS} requests, {checked} answers and events as the types of openai and anthropic say")
