"""Images through the openai and anthropic packages, langchain-openai and langchain-anthropic as they are, against a
server with a model that says how many images it sees (`scripted.py`)."""

import base64
import sys
from pathlib import Path

import anthropic
import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

URL = sys.argv[1]
FILES = Path(__file__).resolve().parents[2] / "pictures/tests/fixtures"
PNG, JPEG = [base64.b64encode((FILES / name).read_bytes()).decode() for name in ["gray.png", "halved.jpg"]]
URLS = [f"data:image/png;base64,{PNG}", f"data:image/jpeg;base64,{JPEG}"]
WORDS = ["I see no image: ", "I see one image: ", "I see two images: "]
SCHEMA = {"type": "object", "properties": {}}
TEXT = "How many images?"


def check(words, text, tokens, fewer):
    """An answer begins with what is expected, and its prompt has more tokens than one with fewer images."""
    assert text.startswith(words), (words, text)
    assert tokens > fewer, (words, tokens, fewer)
    return tokens


def chat():
    client, tokens = openai.OpenAI(base_url=f"{URL}/v1", api_key="none"), 0
    for n, words in enumerate(WORDS):
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in URLS[:n]]
        asked = dict(model="sees", messages=[{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}])
        answer = client.chat.completions.create(**asked, temperature=0)
        text = answer.choices[0].message.content
        tokens = check(words, text, answer.usage.prompt_tokens, tokens)
        stream = client.chat.completions.create(**asked, temperature=0, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == text
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(b"no image").decode()}}
    try:
        client.chat.completions.create(model="sees", messages=[{"role": "user", "content": [image]}])
        raise AssertionError("bytes that are no image were served")
    except openai.BadRequestError as e:
        assert "messages[0].content[0]" in str(e), e


def responses():
    client, tokens = openai.OpenAI(base_url=f"{URL}/v1", api_key="none"), 0
    for n, words in enumerate(WORDS):
        parts = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in URLS[:n]]
        message = {"role": "user", "content": [*parts, {"type": "input_text", "text": TEXT}]}
        answer = client.responses.create(model="sees", input=[message], temperature=0)
        tokens = check(words, answer.output_text, answer.usage.input_tokens, tokens)
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    shot = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": URLS[0]}]}
    tools = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}]
    history = [{"role": "user", "content": "Look."}, call, shot]
    answer = client.responses.create(model="sees", input=history, tools=tools, temperature=0)
    check(WORDS[1], answer.output_text, answer.usage.input_tokens, 0)


def claude():
    client, tokens = anthropic.Anthropic(base_url=URL, api_key="none"), 0
    sources = [("image/png", PNG), ("image/jpeg", JPEG)]
    images = [
        {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}} for kind, data in sources
    ]
    asked = dict(model="sees", max_tokens=100)
    for n, words in enumerate(WORDS):
        messages = [{"role": "user", "content": [*images[:n], {"type": "text", "text": TEXT}]}]
        answer = client.messages.create(**asked, messages=messages)
        tokens = check(words, answer.content[-1].text, answer.usage.input_tokens, tokens)
        assert client.messages.count_tokens(model="sees", messages=messages).input_tokens == tokens
    tool = {"name": "look", "description": "Takes a screenshot", "input_schema": SCHEMA}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [images[0]]}]},
    ]
    with client.messages.stream(**asked, messages=messages, tools=[tool]) as stream:
        assert "".join(stream.text_stream).startswith(WORDS[1])


def langchain():
    for model in [
        ChatOpenAI(model="sees", base_url=f"{URL}/v1", api_key="none", temperature=0),
        ChatOpenAI(model="sees", base_url=f"{URL}/v1", api_key="none", temperature=0, use_responses_api=True),
        ChatAnthropic(model="sees", base_url=URL, api_key="none", temperature=0, max_tokens=100),
    ]:
        # Its own form of an image, which it brings to that of each server.
        image = {"type": "image", "source_type": "base64", "mime_type": "image/png", "data": PNG}
        text = {"type": "text", "text": TEXT}
        answer = model.invoke([HumanMessage([image, text])])
        assert answer.text.startswith(WORDS[1]), answer
        two = [HumanMessage([image, text]), answer, HumanMessage([image, text])]
        assert model.invoke(two).text.startswith(WORDS[2])


for use in [chat, responses, claude, langchain]:
    use()
    print(f"ok: images, {use.__name__}")
