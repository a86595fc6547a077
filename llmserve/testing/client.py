"""A client without a server, and its errors, for tests of what is given one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmserve.client import Completion, ModelInfo, Piece
from llmserve.client.failures import Recipient, translate
from llmserve.errors import ClientError, LLMServeError, ModelNotReadyError


def client_error(details: str | None, status: str = "", *, model: str = "m") -> ClientError:
    """Return what the client raises when a server has answered this; ``status`` is gRPC's."""
    return translate(status, details or "", Recipient("127.0.0.1:8001", model))


@dataclass
class ScriptedClient:
    """Answers at once as a test prescribes; a test may change every field between requests.

    >>> ScriptedClient(pieces=["Hello ", "world"]).generate("m", "Hi").text
    'Hello world'
    """

    pieces: Sequence[str] = ("x ", "x")
    """The text of every answer, a token each."""
    inputs: Sequence[str] = ()
    """What the models take besides ``text_input``."""
    names: Sequence[str] = ("m",)
    """The models."""
    error: LLMServeError | None = None
    """What is raised instead of an answer."""
    input_tokens: int = 7
    requests: list[dict[str, Any]] = field(default_factory=list)
    """The requests so far: the model, the prompt if there was one, and the options."""

    def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        del refresh
        if name not in self.names:
            raise ModelNotReadyError(f"no model {name!r}")
        inputs: Any = dict.fromkeys(("text_input", *self.inputs), True)
        return ModelInfo(name, "stream", True, 1, inputs, {}, "1")

    def generate(self, model: str, prompt: str = "", **options: Any) -> Completion:
        pieces = list(self.stream(model, prompt, **options))
        text, end = "".join(piece.text for piece in pieces), pieces[-1]
        return Completion(text, end.finish_reason, end.input_tokens, end.output_tokens)

    def stream(self, model: str, prompt: str = "", **options: Any) -> Iterator[Piece]:
        self.requests.append({"model": model, **({"prompt": prompt} if prompt else {}), **options})
        if self.error:
            raise self.error
        *before, last = self.pieces
        for text in before:
            yield Piece(text)
        yield Piece(last, 0, "stop", self.input_tokens, len(self.pieces))
