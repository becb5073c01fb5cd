"""A program whose types a checker knows; it is not run."""

from typing import Any

import nq


def talk(path: str) -> list[list[float]]:
    model = nq.Model(path, device="cpu", threads=2)
    answer: str = model.chat([{"role": "user", "content": "Hello!"}], max_tokens=8, stop=["."])
    pieces: list[str] = list(model.chat(answer, stream=True, temperature=0.5))
    ids: list[int] = model.complete([1, 2, 3], logprobs=2).tokens
    print(model.chat(answer, schema={"type": "object"}).calls, model.logits(ids).shape)
    report: dict[str, Any] = model.eval("".join(pieces), reference="demo", protocol="llama")
    print(report["ppl"])
    return model.embed(pieces, query=True)
