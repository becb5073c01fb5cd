"""Quantizes language models with measured quality, and runs them.

    import nq

    report = nq.quantize("demo", "demo-int4", bits=4)
    model = nq.Model("demo-int4")
    for piece in model.chat("Tell me about a river.", stream=True):
        print(piece, end="", flush=True)

A model is named as the program nq names it: a folder, a GGUF file, `demo`, a name of `nq list`, or a model of the hub
such as `Qwen/Qwen3-0.6B`, which is downloaded. Notes go to the logger `nq`. Errors of the operating system are
`OSError` and its kinds, wrong arguments `ValueError`, all others `nq.Error`.
"""

import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn, Optional, Union, overload

from . import _nq
from ._nq import Error, __version__

__all__ = ["Error", "Model", "Stream", "__version__", "eval", "main", "quantize"]

Path = Union[str, "os.PathLike[str]"]
"""A name or a path."""

Messages = Union[str, Sequence[Mapping[str, Any]]]
"""A user's message, or a chat: `[{"role": "user", "content": "Hello!"}]`."""

Progress = Callable[[str, int, int], object]
"""Called with a stage's name, how much of it is done, and all of it."""

_log = logging.getLogger(__name__)


def _reporter(progress: Optional[Progress]) -> Callable[[Optional[str], Any, Any], object]:
    """What the native part reports to: notes have no stage."""

    def report(stage: Optional[str], done: Any, total: Any) -> object:
        if stage is None:
            _log.warning("%s", done)
            return None
        return progress(stage, done, total) if progress else None

    return report


class Stream(Iterator[str]):
    """An answer in pieces, as they come. Ends when it is closed or nobody holds it any more."""

    def __init__(self, pieces: "_nq.Stream") -> None:
        self._pieces = pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the answer; what has not been read is lost."""
        self._pieces.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Model:
    """A loaded model.

    `device` is auto (the first GPU, otherwise the CPU), cpu, cuda, cuda:N, or several GPUs as cuda:0,1 or cuda:all;
    `threads` are those of a CPU, one per core if it is None. `ctx` is the number of tokens that a chat has room for, by default at most 8192. `bits` quantizes an
    unquantized model while it is loaded, to 3, 4, 5, 6 or 8; `nq.quantize` gives better quality. `activations` is how
    inputs of the linear layers are rounded: auto, f32, bf16, int8 or int16. `progress` hears of downloads and loading.
    """

    def __init__(
        self,
        name: Path,
        *,
        device: str = "auto",
        threads: Optional[int] = None,
        ctx: Optional[int] = None,
        bits: Optional[int] = None,
        activations: str = "auto",
        progress: Optional[Progress] = None,
    ) -> None:
        how = {"device": device, "threads": threads, "ctx": ctx, "bits": bits, "activations": activations}
        self._model = _nq.Model(os.fspath(name), how, _reporter(progress))
        self._device = device

    def __repr__(self) -> str:
        return f"<nq.Model {self.name!r} on {self.device}>"

    @property
    def name(self) -> str:
        """Its short name, such as `demo` or `Qwen3-0.6B`."""
        return self._model.name

    @property
    def device(self) -> str:
        """What it runs on, such as `cpu (avx512)`."""
        return self._model.device

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        stream: Literal[False] = False,
        max_tokens: Optional[int] = None,
        temperature: Optional[float] = None,
        top_k: Optional[int] = None,
        top_p: Optional[float] = None,
        min_p: Optional[float] = None,
        repetition_penalty: Optional[float] = None,
        frequency_penalty: Optional[float] = None,
        presence_penalty: Optional[float] = None,
        seed: Optional[int] = None,
        stop: Sequence[str] = (),
        thinking: Optional[bool] = None,
    ) -> str: ...

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        stream: Literal[True],
        max_tokens: Optional[int] = None,
        temperature: Optional[float] = None,
        top_k: Optional[int] = None,
        top_p: Optional[float] = None,
        min_p: Optional[float] = None,
        repetition_penalty: Optional[float] = None,
        frequency_penalty: Optional[float] = None,
        presence_penalty: Optional[float] = None,
        seed: Optional[int] = None,
        stop: Sequence[str] = (),
        thinking: Optional[bool] = None,
    ) -> Stream: ...

    def chat(
        self,
        messages: Messages,
        *,
        stream: bool = False,
        max_tokens: Optional[int] = None,
        temperature: Optional[float] = None,
        top_k: Optional[int] = None,
        top_p: Optional[float] = None,
        min_p: Optional[float] = None,
        repetition_penalty: Optional[float] = None,
        frequency_penalty: Optional[float] = None,
        presence_penalty: Optional[float] = None,
        seed: Optional[int] = None,
        stop: Sequence[str] = (),
        thinking: Optional[bool] = None,
    ) -> Union[str, Stream]:
        """Answers the last of `messages`: the text, or with `stream` an iterator over its pieces. What the model thinks
        comes before the answer, between <think> and </think>.

        What the messages have in common with those of the last call is not computed again. Settings that are None are
        those that the model's makers recommend, `max_tokens` is then all that the context has room for. The same `seed`
        gives the same answer. `stop` are texts that end it. `thinking` says whether the model thinks first, if its
        template can switch that.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        settings = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "frequency_penalty": frequency_penalty,
            "presence_penalty": presence_penalty,
            "seed": secrets.randbits(64) if seed is None else seed,
            "stop": [stop] if isinstance(stop, str) else list(stop),
            "thinking": thinking,
        }
        text = json.dumps([dict(message) for message in messages])
        if stream:
            return Stream(self._model.stream(text, settings))
        return self._model.chat(text, settings, _reporter(None))

    def embed(
        self,
        texts: Sequence[str],
        *,
        query: bool = False,
        instruction: Optional[str] = None,
        dimensions: Optional[int] = None,
    ) -> list[list[float]]:
        """A vector of length 1 for each text; zeros for one without tokens. Needs an embedding model.

        Queries get the model's prompt for queries, or a prompt with `instruction`. `dimensions` keeps as many numbers
        of each vector, and makes its length 1 again.
        """
        return self._model.embed(_texts(texts), query, instruction, dimensions, _reporter(None))

    def rerank(self, query: str, documents: Sequence[str], *, instruction: Optional[str] = None) -> list[float]:
        """How well each document answers the query, 0 to 1. Needs a reranker."""
        return self._model.rerank(query, _texts(documents), instruction, _reporter(None))

    def eval(
        self,
        text: Path,
        *,
        reference: Union["Model", Path, None] = None,
        protocol: Literal["hf", "llama"] = "hf",
        ctx: Optional[int] = None,
        windows: Optional[int] = None,
        progress: Optional[Progress] = None,
    ) -> dict[str, Any]:
        """The perplexity on a text, and with a `reference` the KL divergence from it: what `nq eval --json` reports.

        `text` is a text, or a file if it is a `pathlib.Path`. A reference that is named is loaded without rounding of
        activations. `protocol`: every token of windows of 2048 (hf), or the second half of windows of 512 (llama), or of
        `ctx` tokens; `windows` limits their number.
        """
        name = "a text"
        if not isinstance(text, str):
            name = os.path.basename(os.fspath(text))
            with open(text, encoding="utf-8", newline="") as file:
                text = file.read()
        if reference is not None and not isinstance(reference, Model):
            reference = Model(reference, device=self._device, activations="f32", progress=progress)
        how = {"text_name": name, "protocol": protocol, "ctx": ctx, "windows": windows}
        other = None if reference is None else reference._model
        report: dict[str, Any] = json.loads(self._model.eval(text, how, other, _reporter(progress)))
        return report


def _texts(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        raise TypeError("expected a list of texts, found one text")
    return list(texts)


def quantize(
    source: Path,
    out: Path,
    *,
    bits: float = 4,
    trellis: Optional[str] = None,
    method: str = "gptq",
    simple: bool = False,
    force: bool = False,
    resume: bool = False,
    measure: bool = True,
    max_kld: Optional[float] = None,
    min_top1: Optional[float] = None,
    target_bytes: Optional[int] = None,
    target_bpw: Optional[float] = None,
    calib_tokens: Optional[int] = None,
    eval_tokens: Optional[int] = None,
    seed: int = 0,
    device: str = "auto",
    threads: Optional[int] = None,
    progress: Optional[Progress] = None,
) -> dict[str, Any]:
    """Quantizes an unquantized model into the folder `out`; the report that `nq quantize --json` prints.

    `bits` is 3, 4, 5, 6 or 8; with `trellis` "octagon", which makes trellis codes, 2, 2.5, 3, 3.5, 4, 5 or 6, with "sum"
    2, 3, 4, 5 or 6. `method` is gptq, rtn (plain rounding, the fastest), another of `nq quantize --method`, or
    auto: gptq, then tuned while that helps. `simple` gives all layers one scheme instead of a mix. `force` replaces what
    is at `out`; `resume` continues an interrupted run. `measure` compares the result with the source on text that the
    source samples; a result that misses `max_kld` or `min_top1` is not written. `target_bytes` and `target_bpw` choose
    schemes by measured sensitivity for a size.
    """
    how = {
        "bits": bits,
        "trellis": trellis,
        "method": method,
        "simple": simple,
        "force": force,
        "resume": resume,
        "measure": measure,
        "max_kld": max_kld,
        "min_top1": min_top1,
        "target_bytes": target_bytes,
        "target_bpw": target_bpw,
        "calib_tokens": calib_tokens,
        "eval_tokens": eval_tokens,
        "seed": seed,
        "device": device,
        "threads": threads,
    }
    made = _nq.quantize(os.fspath(source), os.fspath(out), how, _reporter(progress))
    report: dict[str, Any] = json.loads(made)
    return report


def eval(
    model: Union[Model, Path],
    text: Path,
    *,
    reference: Union[Model, Path, None] = None,
    protocol: Literal["hf", "llama"] = "hf",
    ctx: Optional[int] = None,
    windows: Optional[int] = None,
    progress: Optional[Progress] = None,
) -> dict[str, Any]:
    """Like `Model.eval`, of a model that may be named."""
    if not isinstance(model, Model):
        model = Model(model, progress=progress)
    return model.eval(text, reference=reference, protocol=protocol, ctx=ctx, windows=windows, progress=progress)


def main() -> NoReturn:
    """The program nq."""
    # The program handles signals; until it does, they end it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _nq.main(["nq", *sys.argv[1:]])


# A process that renders chat templates: a Python that loads the native part and nothing else.
_RENDERER = """\
import sys, importlib.util as util
spec = util.spec_from_file_location("nq._nq", sys.argv[1])
native = util.module_from_spec(spec)
spec.loader.exec_module(native)
native.serve_templates()
"""


def _python() -> str:
    """The interpreter, also in a program that Python is built into."""
    program = sys.executable or ""
    if "python" in os.path.basename(program).lower():
        return program
    return os.path.join(sys.exec_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")


_nq.isolate_templates([_python(), "-I", "-S", "-c", _RENDERER, _nq.__file__])
