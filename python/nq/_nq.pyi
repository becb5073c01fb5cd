from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Optional, final


__all__ = [
    "Error",
    "Model",
    "Stream",
    "__version__",
    "isolate_templates",
    "main",
    "quantize",
    "serve_templates",
]

_Report = Callable[[Optional[str], Any, Any], object]

__version__: str

class Error(Exception): ...

@final
class Model:
    def __new__(cls, name: str, how: Mapping[str, Any], report: _Report) -> Model: ...
    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    def chat(self, messages_json: str, settings: Mapping[str, Any], report: _Report) -> str: ...
    def stream(self, messages_json: str, settings: Mapping[str, Any]) -> Stream: ...
    def embed(
        self,
        texts: Sequence[str],
        query: bool,
        instruction: Optional[str],
        dimensions: Optional[int],
        report: _Report,
    ) -> list[list[float]]: ...
    def rerank(
        self, query: str, documents: Sequence[str], instruction: Optional[str], report: _Report
    ) -> list[float]: ...
    def eval(
        self, text: str, how: Mapping[str, Any], reference: Optional[Model], report: _Report
    ) -> str: ...

@final
class Stream:
    def __iter__(self) -> Stream: ...
    def __next__(self) -> str: ...
    def close(self) -> None: ...

def quantize(source: str, out: str, how: Mapping[str, Any], report: _Report) -> str: ...
def main(command_line: Sequence[str]) -> NoReturn: ...
def isolate_templates(command: Sequence[str]) -> None: ...
def serve_templates() -> NoReturn: ...
