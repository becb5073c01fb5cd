"""Renders chat templates with nq and with transformers, and compares the texts.

    python benches/compare/templates.py NQ FOLDER...

NQ is the program; each FOLDER is searched for .jinja files, and for tokenizer_config.json files with templates.
Needs transformers (5.24 was compared) and Jinja2. A rendering counts as the same if both give one text or both an
error, as refused if nq alone gives an error, and as lenient if transformers alone does. Prints every difference, and exits with 1 if two texts differ.
"""

import json
import subprocess
import sys
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city, <b>now</b> & 'later' é",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A \"city\""},
                "days": {"type": "integer", "minimum": 1, "default": 3, "enum": [1, 3]},
                "limit": {"type": ["number", "null"], "maximum": 1e-7},
            },
            "required": ["city"],
        },
        "return": {"type": "string", "description": "text"},
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 3, "exact": True, "limit": None, "x": 1.5}}}
TEXT_CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
USER = {"role": "user", "content": "  Hello,\n  world. "}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi. "}
CHATS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "And?"}],
    "reasoning": [USER, {"role": "assistant", "content": "Hi.", "reasoning_content": "hm\n"}, USER],
    "thinking": [USER, {"role": "assistant", "content": "Hi.", "thinking": "hm"}],
    "empty": [USER, {"role": "assistant", "content": ""}],
    "call": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": '{"t": 3}'}],
    "call and text": [SYSTEM, USER, {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]}, {"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}, ANSWER, USER],
    "text call": [USER, {"role": "assistant", "content": None, "tool_calls": [TEXT_CALL]}, {"role": "tool", "content": "3"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "text", "text": "here"}]}],
    "developer": [{"role": "developer", "content": "Be kind."}, USER],
    "other role": [{"role": "narrator", "content": "It rains."}],
    "nothing": [],
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def templates(folders):
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.jinja")):
            yield str(path), path.read_text()
        for path in sorted(Path(folder).rglob("tokenizer_config.json")):
            found = json.loads(path.read_text()).get("chat_template")
            for item in found if isinstance(found, list) else [{"name": "", "template": found}] if found else []:
                yield f"{path} {item['name']}", item["template"]


def theirs(source, context):
    context = dict(context)
    try:
        texts, _ = render_jinja_template([context.pop("messages")], chat_template=source, **context)
        return texts[0], None
    except Exception as error:  # any error of a template
        return None, f"{type(error).__name__}: {error}"


class Ours:
    """A template in nq's process for templates."""

    def __init__(self, program, source):
        self.process = subprocess.Popen([program, "template-process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.compiled = self.ask([["default", source]])

    def ask(self, request):
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"Err": "the process ended"}')
        return answer.get("Ok"), answer.get("Err")

    def render(self, context):
        if self.compiled[1] is not None:
            return self.compiled
        return self.ask({"tools": context["tools"] is not None, "context": context})

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def aliased(message):
    """Reasoning under each of its names, as nq and transformers put it before they render."""
    given = [message[k] for k in ("reasoning_content", "thinking", "reasoning") if message.get(k) is not None]
    return {"thinking": given[0], **message, "reasoning_content": given[0]} if given else message


def main():
    program, *folders = sys.argv[1:]
    count = {"same": 0, "refused": 0, "lenient": 0, "different": 0}
    refused, lenient = {}, {}
    seen = 0
    for name, source in templates(folders):
        seen += 1
        ours = Ours(program, source)
        for chat, messages in CHATS.items():
            for tools in (None, [TOOL]):
                for more in ({}, {"enable_thinking": False}):
                    context = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": not chat.startswith("th"), **SPECIAL, **more}
                    (a, why), (b, error) = ours.render({**context, "messages": [aliased(m) for m in messages]}), theirs(source, context)
                    if a == b or (a is None and b is None):
                        count["same"] += 1
                    elif a is None:
                        count["refused"] += 1
                        refused.setdefault(name, why)
                    elif b is None:
                        count["lenient"] += 1
                        lenient.setdefault(name, error)
                    else:
                        count["different"] += 1
                        print(f"DIFFERENT {name}, {chat}, tools {tools is not None}, {more}\n  nq: {a!r}\n  transformers: {b!r}")
        ours.close()
    for name, why in refused.items():
        print(f"REFUSED {name}: {why}")
    for name, error in lenient.items():
        print(f"LENIENT {name}: {error}")
    print(f"{seen} templates:", ", ".join(f"{n} {kind}" for kind, n in count.items()))
    return 1 if count["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
