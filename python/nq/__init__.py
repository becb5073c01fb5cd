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

import asyncio
import base64
import html
import io
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Optional, Protocol, TypedDict, Union, overload

from . import _nq
from ._nq import Error, __version__

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Answer", "Call", "ChatSettings", "Error", "Logprob", "Model", "Settings", "Stream", "__version__", "eval", "main", "quantize"]

Path = Union[str, "os.PathLike[str]"]
"""A name or a path."""

Messages = Union[str, Sequence[Mapping[str, Any]]]
"""A user's message, or a chat: `[{"role": "user", "content": "Hello!"}]`. A message may have `images`, a list."""


class _PILImage(Protocol):
    def save(self, fp: Any, format: Optional[str] = None) -> None: ...


Image = Union[bytes, str, "os.PathLike[str]", "_PILImage"]
"""An image: the bytes or the path of a PNG, JPEG, WebP, GIF or BMP file, or an image of PIL."""

Progress = Callable[[str, int, int], object]
"""Called with a stage's name, how much of it is done, and all of it."""

OnPiece = Callable[[str], object]
"""Called with each piece of an answer."""

_log = logging.getLogger(__name__)


def _reporter(progress: Optional[Progress]) -> Callable[[Optional[str], Any, Any], object]:
    """What the native part reports to: notes have no stage."""

    def report(stage: Optional[str], done: Any, total: Any) -> object:
        if stage is None:
            _log.warning("%s", done)
            return None
        return progress(stage, done, total) if progress else None

    return report


class Call(NamedTuple):
    """A call of a tool: its name, and its arguments as JSON text, which is not whole if the answer was cut off in it."""

    name: str
    arguments: str


class Logprob(NamedTuple):
    """The log-probability of a token of an answer, and the most probable tokens with theirs, the best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Answer(str):
    """An answer: a text, in which what was thought comes first, between <think> and </think>, and all that is known of it.

    `thinking` and `text` are its parts, `calls` the calls of tools, `message` the answer as a message of a chat. `tokens`
    are all that the model wrote but the one that ended it. `stop_reason` is eos, max_tokens, context_full, stop_text, call
    (the only one allowed) or interrupted; `stop_text` is the text of `stop` that was found. `usage` counts tokens of the
    prompt, of those that were cached, of the answer and of drafts, and seconds. `logprobs` are those of the tokens that the
    model drew, if they were asked for.
    """

    thinking: str
    text: str
    calls: list[Call]
    message: dict[str, Any]
    tokens: list[int]
    logprobs: list[Logprob]
    stop_reason: str
    stop_text: Optional[str]
    usage: dict[str, float]

    def _repr_html_(self) -> str:
        """The answer in a notebook."""
        parts = []
        if self.thinking:
            parts.append(f"<details><summary>thinking</summary>{_shown(self.thinking)}</details>")
        if self.text:
            parts.append(_shown(self.text))
        parts += [_shown(f"{call.name}({call.arguments})") for call in self.calls]
        return "".join(parts)


def _shown(text: str) -> str:
    return f'<div style="white-space: pre-wrap">{html.escape(text)}</div>'


def _answer(made: str) -> Answer:
    """The answer that the native part describes."""
    told = json.loads(made)
    answer = Answer(told.pop("whole"))
    told["calls"] = [Call(**call) for call in told["calls"]]
    told["logprobs"] = [
        # JSON has no infinity: a token that the model excludes has none.
        Logprob(token, _number(logprob), [(other, _number(its)) for other, its in top])
        for token, logprob, top in told["logprobs"]
    ]
    vars(answer).update(told)
    return answer


def _number(logprob: Optional[float]) -> float:
    return float("-inf") if logprob is None else logprob


class Stream(Iterator[str], AsyncIterator[str]):
    """An answer in pieces, as they come, for `for` and `async for`. Ends when it is closed or nobody holds it any more."""

    def __init__(self, pieces: "_nq.Stream") -> None:
        self._pieces = pieces

    def __next__(self) -> str:
        return next(self._pieces)

    async def __anext__(self) -> str:
        try:
            piece = await asyncio.get_running_loop().run_in_executor(None, next, self._pieces, None)
        except asyncio.CancelledError:
            self.close()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    @property
    def answer(self) -> Answer:
        """The whole answer, once it has ended or was closed."""
        made = self._pieces.answer
        if made is None:
            raise ValueError("the answer has not ended")
        return _answer(made)

    def close(self) -> None:
        """Ends the answer; what has not been read is lost."""
        self._pieces.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Settings(TypedDict, total=False):
    """How tokens are chosen, and what ends them. Settings that are left out or None are those that the model's makers
    recommend."""

    max_tokens: Optional[int]
    """Most tokens of an answer; otherwise all that the context has room for."""
    temperature: Optional[float]
    top_k: Optional[int]
    top_p: Optional[float]
    min_p: Optional[float]
    repetition_penalty: Optional[float]
    frequency_penalty: Optional[float]
    presence_penalty: Optional[float]
    seed: Optional[int]
    """The same seed gives the same answer."""
    stop: Union[str, Sequence[str], None]
    """Texts that end an answer, without being part of it."""
    schema: Union[Mapping[str, Any], bool, None]
    """A JSON schema that the answer fits; True: any JSON object."""
    regex: Optional[str]
    """A regular expression that matches the whole answer."""
    grammar: Optional[str]
    """A Lark grammar of the answer."""
    logprobs: Optional[int]
    """How many of the most probable tokens are reported with the log-probability of each token, at most 20."""


class ChatSettings(Settings, total=False):
    """Settings of an answer to a chat, and those of `Settings`."""

    thinking: Optional[bool]
    """Whether the model thinks first, if its template can switch that."""
    thinking_budget: Optional[int]
    """Most tokens of thinking; it is then closed, and the answer begins."""
    tools: Optional[Sequence[Mapping[str, Any]]]
    """Tools that the model may call: `{"type": "function", "function": {"name", "description", "parameters"}}`, whose
    parameters are a JSON schema."""
    tool_choice: Optional[str]
    """auto, none, required, or the name of the tool to call."""
    images: Optional[Sequence[Image]]
    """Images of the last message, for a model that sees."""


class Model:
    """A loaded model.

    `device` is auto (the first GPU, otherwise the CPU), cpu, cuda, cuda:N, several GPUs as cuda:0,1 or cuda:all,
    or gpu or wgpu:N, over Vulkan, Metal or Direct3D 12;
    `threads` are those of a CPU, one per core if it is None. `ctx` is the number of tokens that a chat has room for, by default at most 8192. `bits` quantizes an
    unquantized model while it is loaded, to 3, 4, 5, 6 or 8; `nq.quantize` gives better quality. `kv` is the bits of
    keys and values, 8 or 16 (32 for comparison). `cpu_experts` is the number of layers whose experts stay with the CPU,
    if the model is a mixture on a GPU; as few as possible if it is None. `activations` is how inputs of the linear layers
    are rounded: auto, f32, bf16, int8 or int16. `draft` is what drafts tokens, so that answers come sooner: ngram (the text
    so far), mtp (the model's own layer), a smaller model's name, eagle3:FOLDER or none; if it is None, mtp or ngram where
    answers stay exactly the same, as on CPUs. `progress` hears of downloads and loading.

    In a `with` block it is closed at its end.
    """

    def __init__(
        self,
        name: Path,
        *,
        device: str = "auto",
        threads: Optional[int] = None,
        ctx: Optional[int] = None,
        bits: Optional[int] = None,
        kv: int = 16,
        activations: str = "auto",
        cpu_experts: Optional[int] = None,
        draft: Optional[Path] = None,
        progress: Optional[Progress] = None,
    ) -> None:
        how = {
            "device": device,
            "threads": threads,
            "ctx": ctx,
            "bits": bits,
            "kv": kv,
            "activations": activations,
            "cpu_experts": cpu_experts,
            "draft": None if draft is None else os.fspath(draft),
        }
        self._model = _nq.Model(os.fspath(name), how, _reporter(progress))
        self._device = device

    def __repr__(self) -> str:
        return f"<nq.Model {self.name!r} on {self.device}>"

    def _repr_html_(self) -> str:
        """The model in a notebook."""
        return f"<b>{html.escape(self.name)}</b> on {html.escape(self.device)}"

    def with_adapters(self, adapters: Union[Sequence[Path], Mapping[Path, float]]) -> "Model":
        """The same model with LoRA adapters, PEFT's folders or GGUF files, each multiplied by its number in a mapping.

        Both share the weights, which may be quantized and stay as they are. This works on CPUs and, but for mixtures of
        experts, on one GPU.
        """
        model = Model.__new__(Model)
        model._model = self._model.with_adapters(_weighed(adapters))
        model._device = self._device
        return model

    def close(self) -> None:
        """Frees its memory, once what is being computed has ended. It can then not be used any more."""
        self._model.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Its short name, such as `demo` or `Qwen3-0.6B`."""
        return self._model.name

    @property
    def device(self) -> str:
        """What it runs on, such as `cpu (avx512)`."""
        return self._model.device

    @property
    def vocab(self) -> int:
        """The number of tokens that it tells apart."""
        return self._model.vocab

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[False] = False, on_piece: Optional[OnPiece] = None,
        **settings: "Unpack[ChatSettings]"
    ) -> Answer: ...

    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **settings: "Unpack[ChatSettings]") -> Stream: ...

    def chat(
        self, messages: Messages, *, stream: bool = False, on_piece: Optional[OnPiece] = None,
        **settings: "Unpack[ChatSettings]"
    ) -> Union[Answer, Stream]:
        """Answers the last of `messages`: the answer, or with `stream` an iterator over its pieces. What the model thinks
        comes before the answer, between <think> and </think>. `on_piece` is called with each piece; an exception that it
        raises ends the answer.

        What the messages have in common with those of the last call is not computed again. `help(nq.ChatSettings)`
        explains the settings.
        """
        images = settings.pop("images", None)
        return self._answer(_messages(messages, images), stream, on_piece, settings, ChatSettings)

    async def chat_async(
        self, messages: Messages, *, on_piece: Optional[OnPiece] = None, **settings: "Unpack[ChatSettings]"
    ) -> Answer:
        """Like `chat`, for asyncio: other tasks run meanwhile, and cancelling ends the answer. With `chat(stream=True)`,
        `async for` gets the pieces."""
        stream = self.chat(messages, stream=True, **settings)
        async for piece in stream:
            if on_piece:
                on_piece(piece)
        return stream.answer

    @overload
    def complete(
        self, prompt: Union[str, Sequence[int]], *, stream: Literal[False] = False, on_piece: Optional[OnPiece] = None,
        **settings: "Unpack[Settings]"
    ) -> Answer: ...

    @overload
    def complete(
        self, prompt: Union[str, Sequence[int]], *, stream: Literal[True], **settings: "Unpack[Settings]"
    ) -> Stream: ...

    def complete(
        self, prompt: Union[str, Sequence[int]], *, stream: bool = False, on_piece: Optional[OnPiece] = None,
        **settings: "Unpack[Settings]"
    ) -> Union[Answer, Stream]:
        """Continues a text, or the tokens of one, as it is: no template makes a chat of it."""
        tokens = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return self._answer(tokens, stream, on_piece, settings, Settings)

    def _answer(
        self, request: Union[str, list[int]], stream: bool, on_piece: Optional[OnPiece], given: Any, known: Any
    ) -> Union[Answer, Stream]:
        unknown = given.keys() - known.__optional_keys__
        if unknown:
            raise TypeError(f"unexpected settings: {', '.join(sorted(unknown))}")
        settings = dict.fromkeys(ChatSettings.__optional_keys__) | given
        if settings["seed"] is None:
            settings["seed"] = secrets.randbits(64)
        stop = settings["stop"] or ()
        settings["stop"] = [stop] if isinstance(stop, str) else list(stop)
        settings["tool_choice"] = settings["tool_choice"] or "auto"
        for name in ["schema", "tools"]:
            settings[name] = None if settings[name] is None else json.dumps(settings[name])
        if not stream and on_piece is None:
            return _answer(self._model.chat(request, settings, _reporter(None)))
        pieces = Stream(self._model.stream(request, settings))
        if stream:
            return pieces
        with pieces:
            for piece in pieces:
                if on_piece:
                    on_piece(piece)
        return pieces.answer

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the tokenizer puts around one; names of control tokens become these."""
        return self._model.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens included."""
        return self._model.decode(list(tokens))

    def apply_template(
        self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] = (), thinking: Optional[bool] = None
    ) -> tuple[str, list[int]]:
        """The prompt that the model's chat template makes of messages, as a text and as tokens.

        The tokens are what `chat` computes with: where a message quotes a control token, it is text in them.
        """
        shown = json.dumps(list(tools)) if tools else None
        return self._model.prompt(_messages(messages), shown, thinking)

    def logits(self, tokens: Sequence[int]) -> "memoryview[float]":
        """The model's logits after each of `tokens`: float32 numbers in the shape (tokens, vocab).

        `numpy.asarray` makes an array of them without copying.
        """
        tokens = list(tokens)
        return memoryview(self._model.logits(tokens, _reporter(None))).cast("f", (len(tokens), self.vocab))

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


def _weighed(adapters: Union[Sequence[Path], Mapping[Path, float]]) -> list[tuple[str, float]]:
    pairs = adapters.items() if isinstance(adapters, Mapping) else [(path, 1.0) for path in adapters]
    return [(os.fspath(path), float(weight)) for path, weight in pairs]


def _messages(messages: Messages, images: Optional[Sequence[Image]] = None) -> str:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    chat = [dict(message) for message in messages]
    if images and chat:
        chat[-1]["images"] = [*chat[-1].get("images", ()), *images]
    return json.dumps([_with_images(message) for message in chat])


def _with_images(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its images among the parts of its content."""
    images = message.pop("images", None)
    if images:
        parts = [{"type": "image_url", "image_url": {"url": _url(image)}} for image in images]
        message["content"] = [*parts, {"type": "text", "text": message.get("content") or ""}]
    return message


def _url(image: Image) -> str:
    if isinstance(image, (str, os.PathLike)):
        with open(image, "rb") as file:
            data = file.read()
    elif isinstance(image, (bytes, bytearray, memoryview)):
        data = bytes(image)
    else:
        made = io.BytesIO()
        image.save(made, format="PNG")
        data = made.getvalue()
    return "data:;base64," + base64.b64encode(data).decode()


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
    clip: bool = False,
    simple: bool = False,
    group_size: Union[int, Literal["channel"], None] = None,
    zero_points: Optional[bool] = None,
    head_bits: Optional[int] = None,
    format: str = "nq",
    adapters: Union[Sequence[Path], Mapping[Path, float]] = (),
    force: bool = False,
    resume: bool = False,
    measure: bool = True,
    max_kld: Optional[float] = None,
    min_top1: Optional[float] = None,
    target_bytes: Optional[int] = None,
    target_bpw: Optional[float] = None,
    calib: Optional[Path] = None,
    calib_tokens: Optional[int] = None,
    eval_text: Optional[Path] = None,
    eval_tokens: Optional[int] = None,
    budget: Optional[float] = None,
    tune_steps: Optional[int] = None,
    tune_batch: int = 32,
    device_memory: Optional[int] = None,
    seed: int = 0,
    device: str = "auto",
    threads: Optional[int] = None,
    progress: Optional[Progress] = None,
) -> dict[str, Any]:
    """Quantizes an unquantized model into the folder or file `out`; the report that `nq quantize --json` prints.

    `bits` is 3, 4, 5, 6 or 8; with `trellis` "octagon", which makes trellis codes, 2, 2.5, 3, 3.5, 4, 5 or 6, with "sum"
    2, 3, 4, 5 or 6. `method` is gptq, rtn (plain rounding, the fastest), another of `nq quantize --method`, or
    auto: gptq, then tuned while that helps; `clip` searches the clipping range of each group for rtn. `simple` gives all
    layers one scheme instead of a mix, and so do `group_size` (inputs that share a scale: 32, 64, 128 or "channel"),
    `zero_points` (whether a group has one) and `head_bits` (of embedding and head: 3, 4, 5, 6, 8, or 16 for unquantized).
    `format` is nq, gguf, compressed-tensors, gptq or awq. `adapters`, LoRA adapters as for `Model.with_adapters`, are
    merged into the model first. `force` replaces what
    is at `out`; `resume` continues an interrupted run. `measure` compares the result with the source on text that the
    source samples; a result that misses `max_kld` or `min_top1` is not written. `target_bytes` and `target_bpw` choose
    schemes by measured sensitivity for a size. `calib` is a .txt or .jsonl file to calibrate on, `eval_text` one to measure
    on, instead of text that the source samples. `budget` is the minutes that tuning may take, and `tune_steps`, of
    `tune_batch` sequences each, a number of steps instead. `device_memory` is the bytes of a GPU that may be used.
    """
    how = {
        "bits": bits,
        "trellis": trellis,
        "method": method,
        "clip": clip,
        "simple": simple,
        "group_size": None if group_size is None else str(group_size),
        "zero_points": zero_points,
        "head_bits": head_bits,
        "format": format,
        "adapters": _weighed(adapters),
        "force": force,
        "resume": resume,
        "measure": measure,
        "max_kld": max_kld,
        "min_top1": min_top1,
        "target_bytes": target_bytes,
        "target_bpw": target_bpw,
        "calib": None if calib is None else os.fspath(calib),
        "calib_tokens": calib_tokens,
        "eval_text": None if eval_text is None else os.fspath(eval_text),
        "eval_tokens": eval_tokens,
        "budget": budget,
        "tune_steps": tune_steps,
        "tune_batch": tune_batch,
        "device_memory": device_memory,
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
