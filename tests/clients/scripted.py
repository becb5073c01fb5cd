"""Makes a checkpoint that writes given texts, so that programs which use models can be run against a server as it is.

Its weights are one-hot: each token of a text has a direction of its own in the residual stream, and the head turns that
direction into the token that follows. The chat template ends a prompt with a token of its own for each turn of the
conversation, which begins the text of that turn.
"""

import json
import struct
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "assets/demo"
HIDDEN = 1536
CONTEXT = 131072
ONE = struct.pack("<H", 0x3F80)  # in BF16

# {turns} is the number of texts. A prompt without tools, such as one for a title, gets the first one.
TEMPLATE = """{{%- for m in messages %}}{{{{- '<|im_start|>' + m.role + '\\n' }}}}
{{%- if m.reasoning_content %}}{{{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}}}{{%- endif %}}
{{{{- m.content or '' }}}}
{{%- for c in m.tool_calls or [] %}}{call}{{%- endfor %}}
{{{{- '<|im_end|>\\n' }}}}{{%- endfor %}}
{{%- if tools %}}{{{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}}}{{%- endif %}}
{{{{- '<|im_start|>assistant\\n' }}}}
{{%- set done = namespace(turns=0) %}}
{{%- if tools %}}{{%- for m in messages %}}
{{%- if m.role == 'assistant' %}}{{%- set done.turns = done.turns + 1 %}}{{%- endif %}}
{{%- endfor %}}{{%- set done.turns = [done.turns + 1, {last}] | min %}}{{%- endif %}}
{{%- if enable_thinking is defined and enable_thinking is false %}}{{{{- '<think>\\n\\n</think>\\n\\n<|plain-' ~ done.turns ~ '|>' }}}}
{{%- else %}}{{{{- '<|turn-' ~ done.turns ~ '|>' }}}}{{%- endif %}}"""
JSON_CALL = """{{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}\\n</tool_call>' }}"""
XML_CALL = """{{- '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}{%- for k, v in c.function.arguments | items %}{{- '<parameter=' + k + '>\\n' ~ (v if v is string else v | tojson) ~ '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}"""


def call(name, arguments, xml=False):
    """A tool call as models write it."""
    if not xml:
        body = json.dumps({"name": name, "arguments": arguments})
    else:
        values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        body = f"<function={name}>\n{body}</function>"
    return f"<tool_call>\n{body}\n</tool_call>"


def cut(text, taken):
    """Cuts a text into pieces that are not in `taken`, which they join."""
    pieces, at = [], 0
    while at < len(text):
        end = min(at + 6, len(text))
        while text[at:end] in taken and end < len(text):
            end += 1
        while text[at:end] in taken:
            # The end of the text is there already: one piece with those before it.
            taken.discard(pieces[-1])
            at -= len(pieces.pop())
        pieces.append(text[at:end])
        taken.add(pieces[-1])
        at = end
    return pieces


def build(folder, texts, xml=False):
    """Writes the checkpoint. `texts[i]` is written in turn i, counted by the assistant's messages so far, and the first
    one where there are no tools; with thinking before it, unless thinking is off. The word MODE in it says which."""
    folder.mkdir(parents=True)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    config = json.loads((DEMO / "config.json").read_text())
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    settings |= {"model_max_length": CONTEXT}
    known = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    taken = set(known) | set(tokenizer["model"]["vocab"])
    end, size = known["<|im_end|>"], config["vocab_size"]
    added = []

    def token(content, special=False):
        added.append({"id": size + len(added), "content": content, "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False, "special": special})
        return added[-1]["id"]

    follows = {}
    for turn, text in enumerate(texts):
        thought = f"<think>\nThis is turn {turn}.\n</think>\n\n"
        with_thought, plain = text.replace("MODE", "after a thought"), text.replace("MODE", "at once")
        for marker, whole in [(f"<|turn-{turn}|>", thought + with_thought), (f"<|plain-{turn}|>", plain)]:
            chain = [token(marker, special=True)]
            chain += [token(piece) for piece in cut(whole, taken)]
            follows |= dict(zip(chain, [*chain[1:], end]))
    assert len(follows) <= HIDDEN, len(follows)
    tokenizer["added_tokens"] += added
    settings["added_tokens_decoder"] |= {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added}
    settings.pop("chat_template", None)
    vocab = -(-(size + len(added)) // 64) * 64
    config |= {
        "vocab_size": vocab, "hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": False,
        "max_position_embeddings": CONTEXT, "max_window_layers": 1,
    }
    rows = {name: bytearray(2 * vocab * HIDDEN) for name in ["model.embed_tokens.weight", "lm_head.weight"]}
    for direction, (a, b) in enumerate(follows.items()):
        for name, id in zip(rows, [a, b]):
            at = 2 * (id * HIDDEN + direction)
            rows[name][at : at + 2] = ONE
    heads = config["head_dim"]
    layer = {
        "self_attn.q_proj": (heads, HIDDEN), "self_attn.k_proj": (heads, HIDDEN), "self_attn.v_proj": (heads, HIDDEN),
        "self_attn.o_proj": (HIDDEN, heads), "mlp.gate_proj": (256, HIDDEN), "mlp.up_proj": (256, HIDDEN),
        "mlp.down_proj": (HIDDEN, 256),
    }
    tensors = {name: ((vocab, HIDDEN), data) for name, data in rows.items()}
    tensors |= {f"model.layers.0.{n}.weight": (shape, bytes(2 * shape[0] * shape[1])) for n, shape in layer.items()}
    norms = {"model.norm": HIDDEN, "model.layers.0.input_layernorm": HIDDEN, "model.layers.0.self_attn.q_norm": heads,
             "model.layers.0.post_attention_layernorm": HIDDEN, "model.layers.0.self_attn.k_norm": heads}
    tensors |= {f"{n}.weight": ((width,), ONE * width) for n, width in norms.items()}
    header, offset = {}, 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.writelines(data for _, data in tensors.values())
    template = TEMPLATE.format(call=XML_CALL if xml else JSON_CALL, last=len(texts) - 1)
    for name, value in [
        ("config.json", config),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", settings),
        ("generation_config.json", {"eos_token_id": [end], "do_sample": False}),
    ]:
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text(template)
