"""Makes a checkpoint that writes given texts, so that programs which use models can be run against a server as it is.

Its weights are one-hot: each token of a text has a direction of its own in the residual stream, and the head turns that
direction into the token that follows. The chat template ends a prompt with a token of its own for each turn of the
conversation, which begins the text of that turn. One that sees has a tower of random weights, and its turn is the number
of images that the template was given.
"""

import json
import random
import struct
import sys
from math import prod
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "assets/demo"
MOST = 1536  # directions, and so tokens of all texts
CONTEXT = 131072
ONE = struct.pack("<H", 0x3F80)  # in BF16

# {turns} is the number of texts. A prompt without tools, such as one for a title, gets the first one.
TEMPLATE = """{{%- for m in messages %}}{{{{- '<|im_start|>' + m.role + '\\n' }}}}
{{%- if m.reasoning_content %}}{{{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}}}{{%- endif %}}
{content}
{{%- for c in m.tool_calls or [] %}}{call}{{%- endfor %}}
{{{{- '<|im_end|>\\n' }}}}{{%- endfor %}}
{{%- if tools %}}{{{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}}}{{%- endif %}}
{{{{- '<|im_start|>assistant\\n' }}}}
{{%- set done = namespace(turns=0) %}}
{{%- if tools %}}{{%- for m in messages %}}
{{%- if m.role == 'assistant' %}}{{%- set done.turns = done.turns + 1 %}}{{%- endif %}}
{{%- endfor %}}{{%- set done.turns = [done.turns + 1, {last}] | min %}}{{%- endif %}}
{turn}{{%- if enable_thinking is defined and enable_thinking is false %}}{{{{- '<think>\\n\\n</think>\\n\\n<|plain-' ~ done.turns ~ '|>' }}}}
{{%- else %}}{{{{- '<|turn-' ~ done.turns ~ '|>' }}}}{{%- endif %}}"""
TEXT = "{{- m.content or '' }}"
# The macro that published models have for contents.
PARTS = """{%- if m.content is string %}{{- m.content }}{%- else %}{%- for part in m.content or [] %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- set seen.images = seen.images + 1 %}
{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}"""
SEEN = """{%- if tools or seen.images %}{%- set done.turns = [seen.images + 1, LAST] | min %}{%- endif %}
"""
# A tower of two blocks, for which a token stands for 8 by 8 pixels.
TOWER = {
    "model_type": "qwen3_5", "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 4,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "deepstack_visual_indexes": [],
}
PIXELS = {
    "size": {"shortest_edge": 256, "longest_edge": 65536}, "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}
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


def tower(hidden):
    """Its tensors: names, shapes and values."""
    h, mlp, merged = TOWER["hidden_size"], TOWER["intermediate_size"], 4 * TOWER["hidden_size"]
    block = {"norm1": (h,), "norm2": (h,), "attn.qkv": (3 * h, h), "attn.proj": (h, h), "mlp.linear_fc1": (mlp, h),
             "mlp.linear_fc2": (h, mlp)}
    shapes = {f"blocks.{i}.{name}": shape for i in range(TOWER["depth"]) for name, shape in block.items()}
    shapes |= {"patch_embed.proj": (h, 3, 2, 4, 4), "merger.norm": (h,), "merger.linear_fc1": (merged, merged),
               "merger.linear_fc2": (hidden, merged)}
    shapes = {f"{n}.weight": s for n, s in shapes.items()} | {f"{n}.bias": s[:1] for n, s in shapes.items()}
    shapes["pos_embed.weight"] = (TOWER["num_position_embeddings"], h)
    draw = random.Random(3)
    for name, shape in shapes.items():
        n = prod(shape)
        values = (draw.uniform(-0.3, 0.3) for _ in range(n))
        yield f"model.visual.{name}", shape, b"".join(struct.pack("<f", v)[2:] for v in values)


def seeing(config, known):
    """The configuration of a model that sees, whose text model is as `config` says, in a layer of attention."""
    text = {k: v for k, v in config.items() if k not in ("architectures", "model_type", "layer_types", "max_window_layers")}
    text |= {
        "model_type": "qwen3_5_text", "full_attention_interval": 1, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 1, "partial_rotary_factor": 0.25,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
        "vision_config": TOWER | {"out_hidden_size": config["hidden_size"]}, "image_token_id": known["<|image_pad|>"], "tie_word_embeddings": False,
        "vision_start_token_id": known["<|vision_start|>"], "vision_end_token_id": known["<|vision_end|>"],
    }


def build(folder, texts, xml=False, sees=False):
    """Writes the checkpoint. `texts[i]` is written in turn i, counted by the assistant's messages so far, and the first
    one where there are no tools; with thinking before it, unless thinking is off. The word MODE in it says which.
    A model that sees writes texts[0] where there are neither tools nor images, and otherwise counts images, from
    texts[1] on."""
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
    assert len(follows) <= MOST, len(follows)
    hidden = -(-len(follows) // 64) * 64
    tokenizer["added_tokens"] += added
    settings["added_tokens_decoder"] |= {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added}
    settings.pop("chat_template", None)
    vocab = -(-(size + len(added)) // 64) * 64
    config |= {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 256, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": False,
        "max_position_embeddings": CONTEXT, "max_window_layers": 1,
    }
    rows = {name: bytearray(2 * vocab * hidden) for name in ["model.embed_tokens.weight", "lm_head.weight"]}
    for direction, (a, b) in enumerate(follows.items()):
        for name, id in zip(rows, [a, b]):
            at = 2 * (id * hidden + direction)
            rows[name][at : at + 2] = ONE
    heads = config["head_dim"]
    queries = 2 * heads if sees else heads # with a gate
    layer = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (heads, hidden), "self_attn.v_proj": (heads, hidden),
        "self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (256, hidden), "mlp.up_proj": (256, hidden),
        "mlp.down_proj": (hidden, 256),
    }
    tensors = {name: ((vocab, hidden), data) for name, data in rows.items()}
    tensors |= {f"model.layers.0.{n}.weight": (shape, bytes(2 * shape[0] * shape[1])) for n, shape in layer.items()}
    norms = {"model.norm": hidden, "model.layers.0.input_layernorm": hidden, "model.layers.0.self_attn.q_norm": heads,
             "model.layers.0.post_attention_layernorm": hidden, "model.layers.0.self_attn.k_norm": heads}
    gain = bytes(2) if sees else ONE  # those of hybrids are less 1
    tensors |= {f"{n}.weight": ((width,), gain * width) for n, width in norms.items()}
    if sees:
        tensors = {n.replace("model.", "model.language_model.", 1): tensor for n, tensor in tensors.items()}
        tensors |= {name: (shape, data) for name, shape, data in tower(hidden)}
        config = seeing(config, known)
        (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    header, offset = {}, 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.writelines(data for _, data in tensors.values())
    turn = SEEN.replace("LAST", str(len(texts) - 1)) if sees else ""
    content = PARTS if sees else TEXT
    template = TEMPLATE.format(content=content, turn=turn, call=XML_CALL if xml else JSON_CALL, last=len(texts) - 1)
    if sees:
        template = "{%- set seen = namespace(images=0) %}" + template
    for name, value in [
        ("config.json", config),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", settings),
        ("generation_config.json", {"eos_token_id": [end], "do_sample": False}),
    ]:
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text(template)


# What a model says that counts images: the last text is for as many as there may be.
COUNTING = ["I see no image: MODE.", "I see nothing: MODE.", "I see one image: MODE.", "I see two images: MODE."]

if __name__ == "__main__":
    build(Path(sys.argv[1]), COUNTING, sees=True)
