"""A model of a Triton with text tensors, made by llmserve or not, as something to examine."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmserve.client import Client, Completion, parse_url
from llmserve.errors import ClientError, OptionError, RequestTimeoutError, UnreachableError
from llmserve.runtime.contract import (
    EMBEDDING,
    IMAGE_URL,
    LABEL,
    OPTIONS,
    PROBABILITY,
    RERANK,
    SCORE,
)
from llmserve_certify.encoder import QUERY
from llmserve_certify.endpoint import (
    Ask,
    Decision,
    Gone,
    Hostile,
    Malformed,
    Refusal,
    Reply,
    curl,
    without_password,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmserve_certify.encoder import Vector


class TritonEndpoint:
    """One model, through a client that reads from its configuration how it is asked."""

    kind = "Triton"

    def __init__(
        self,
        client: Client,
        model: str,
        *,
        url: str = "",
        http_url: str = "",
        always: Mapping[str, Any] | None = None,
    ) -> None:
        self._client, self.model, self.url = client, model, url
        self._info = client.model(model)
        self.task = self._info.task
        self.chats = self._info.made_by_llmserve is not None
        self.streams = self._info.exchange != "unary"
        self.takes: frozenset[str] | None = frozenset(
            name for name in OPTIONS if self._info.input_of(name) or name in (always or {})
        )
        self._always = dict(always or {})
        self._http = http_url and without_password(http_url)

    def describe(self) -> dict[str, str]:
        version = self._info.made_by_llmserve
        made = {"built_by": f"llmserve {version}"} if version else {}
        return {**made, "exchange": self._info.exchange}

    def ask(self, ask: Ask) -> Reply:
        content = self._content(ask)
        with _refusals():
            if not ask.stream:
                return _answer(self._client.generate(self.model, **content))
            stream = self._client.stream(self.model, **content)
            with closing(stream):
                pieces = list(stream)
        whole = Completion.of(pieces)
        texts = tuple(piece.text for piece in pieces if piece.text)
        return replace(_answer(whole), pieces=texts, events=len(pieces))

    def pieces(self, ask: Ask) -> Generator[str, None, None]:
        with (
            _refusals(),
            closing(self._client.stream(self.model, **self._content(ask))) as stream,
        ):
            for piece in stream:
                yield piece.text

    def hostile(self) -> Sequence[Hostile]:
        def of(name: str, must_refuse: bool = True, **options: Any) -> Hostile:
            return Hostile(name, b"", Ask("Hello", options=options), must_refuse)

        takes = self.takes or frozenset()
        requests = [
            Hostile("an empty prompt", b"", Ask("", options=self._short()), False),
            of("a request without options", must_refuse=False),
        ]
        if "max_tokens" in takes:
            requests += [
                of("a max_tokens of 0", max_tokens=0),
                of("a negative max_tokens", max_tokens=-5),
            ]
            requests = [r for r in requests if not (self._is_unsigned() and "negative" in r.name)]
        if "temperature" in takes:
            requests.append(of("a negative temperature", temperature=-1.0, **self._short()))
        if "top_p" in takes:
            requests.append(of("a top_p above 1", top_p=7.5, **self._short()))
        return requests

    def send(self, hostile: Hostile) -> Reply | None:
        return self.ask(hostile.ask or Ask())

    def hostile_curl(self, hostile: Hostile) -> str:
        return self.curl(hostile.ask or Ask())

    def curl(self, ask: Ask) -> str:
        fields = {"text_input": ask.prompt, **self._options(ask)}
        if ask.messages:
            fields["messages"] = json.dumps(ask.shown(in_parts=False), ensure_ascii=False)
        if ask.images:
            fields[IMAGE_URL.name] = list(ask.images)
        body = json.dumps(fields, ensure_ascii=False)
        path = "generate_stream" if ask.stream or self._info.exchange == "stream" else "generate"
        url = f"{self._http_url()}/v2/models/{self.model}/{path}"
        return curl(url, body, stream=ask.stream)

    def values(self, texts: Sequence[str]) -> list[Vector]:
        firsts, seconds = self._texts(texts)
        with _refusals():
            computed = self._client.compute(self.model, firsts, pairs=seconds, **self._always)
        try:
            return _rows(computed.outputs)
        except (ValueError, LookupError, TypeError) as error:
            shapes = {name: values.shape for name, values in computed.outputs.items()}
            words = f"the outputs are not those of a model with values ({error})"
            raise Malformed(words, got=str(shapes)) from None

    def values_curl(self, texts: Sequence[str]) -> str:
        firsts, seconds = self._texts(texts)
        fields: dict[str, Any] = {"text_input": firsts, **self._always}
        if seconds is not None:
            fields["text_pair"] = seconds
        body = json.dumps(fields, ensure_ascii=False)
        return curl(f"{self._http_url()}/v2/models/{self.model}/generate", body)

    def decide(self, state: str, questions: Mapping[str, Any]) -> dict[str, Decision]:
        del state, questions
        raise Refusal(404, "Triton's own API has no typed decisions")

    def decide_curl(self, state: str, questions: Mapping[str, Any]) -> str:
        del state, questions
        return ""

    def _http_url(self) -> str:
        return parse_url(self.url or None).triton(http=self._http).http

    def _texts(self, texts: Sequence[str]) -> tuple[list[str], list[str] | None]:
        if self.task == RERANK:
            return [QUERY] * len(texts), list(texts)
        return list(texts), None

    def _short(self) -> dict[str, Any]:
        return {"max_tokens": 4} if self.takes and "max_tokens" in self.takes else {}

    def _is_unsigned(self) -> bool:
        tensor = self._info.inputs.get("max_tokens")
        return tensor is not None and tensor.datatype.startswith("U")

    def _options(self, ask: Ask) -> dict[str, Any]:
        # Without any, it is tested what a server does without them.
        return {**self._always, **ask.options} if ask.options else {}

    def _content(self, ask: Ask) -> dict[str, Any]:
        options = self._options(ask)
        if ask.images:
            options = {**options, IMAGE_URL.name: list(ask.images)}
        if ask.messages:
            return {"messages": ask.shown(in_parts=False), **options}
        return {"prompt": ask.prompt, **options}


def _rows(outputs: Mapping[str, NDArray[Any]]) -> list[Vector]:
    """Return a vector for each text; raise one of three errors if that is not what they are."""
    import numpy as np

    if EMBEDDING.name in outputs:
        found = outputs[EMBEDDING.name].astype(np.float32)
        if found.ndim != 2:
            raise ValueError(f"{EMBEDDING.name} has the shape {found.shape}")
        return list(found)
    if SCORE.name in outputs:
        return list(outputs[SCORE.name].astype(np.float32).reshape(-1, 1))
    # The likeliest label comes first: they are compared in the order of the model's.
    rows = zip(outputs[LABEL.name], outputs[PROBABILITY.name].astype(np.float32), strict=True)
    return [chances[np.argsort(names)] for names, chances in rows]


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (UnreachableError, RequestTimeoutError) as error:
        raise Gone(str(error)) from None
    except ClientError as error:
        raise Refusal(error.row.status, error.words or error.problem) from None
    except OptionError as error:
        # The client refuses what the model's tensors cannot carry, as any client would.
        raise Refusal(400, error.problem) from None


def _answer(whole: Completion) -> Reply:
    counts = whole.input_tokens, whole.output_tokens
    return Reply(whole.text, whole.finish_reason, *counts, logprobs=whole.logprobs)
