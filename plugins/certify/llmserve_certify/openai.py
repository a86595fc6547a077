"""A server with OpenAI's API, as something to examine."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmserve.client import OpenAIAnswer, OpenAIApi, OpenAIRequest, Timeouts
from llmserve.runtime.contract import GENERATE
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
from llmserve_certify.openai_answers import (
    StreamPart,
    error_words,
    joined,
    read_answer,
    read_decisions,
    read_part,
    read_vectors,
)

if TYPE_CHECKING:
    from llmserve_certify.encoder import Vector

_FORMS = {"json_schema", "choice", "regex"}


class OpenAIEndpoint:
    """``v1/completions`` and ``v1/chat/completions`` of one server."""

    kind = "OpenAI API"
    streams = True
    takes: frozenset[str] | None = None

    def __init__(
        self,
        url: str,
        model: str,
        timeout: float = 120.0,
        *,
        always: Mapping[str, Any] | None = None,
        task: str = GENERATE,
    ) -> None:
        # The part before an @ is sent nowhere.
        self._api = OpenAIApi(without_password(url))
        self.url, self.model, self.chats = self._api.url, model, True
        self._timeout = Timeouts(first=timeout, between=timeout)
        self._always, self.task = dict(always or {}), task
        self._counts_in_streams = True

    def describe(self) -> dict[str, str]:
        said = {}
        root = self.url.rpartition("/v1")[0] or self.url
        unread = (ValueError, LookupError, TypeError, AttributeError, RecursionError, Refusal, Gone)
        with suppress(*unread):
            said["version"] = str(self._get(f"{root}/version")["version"])
        with suppress(*unread):
            said["owned_by"] = str(self._get(f"{self.url}/models")["data"][0]["owned_by"])
        return said

    def _get(self, url: str) -> Any:
        with closing(self._open(url, None)) as answer:
            return json.loads(self._read(answer))

    def ask(self, ask: Ask) -> Reply:
        with closing(self._send(ask)) as answer:
            if ask.stream:
                return joined(self._parts(answer))
            return read_answer(self._read(answer))

    def _send(self, ask: Ask) -> OpenAIAnswer:
        # Others may find out meanwhile.
        counts = self._counts_in_streams
        try:
            return self._open(*self._body(ask, counts=counts))
        except Refusal as error:
            if not (ask.stream and counts) or error.is_about_server:
                raise
        # Triton's own frontend of 24.11 refuses every field that it does not know.
        answer = self._open(*self._body(ask, counts=False))
        self._counts_in_streams = False
        return answer

    def pieces(self, ask: Ask) -> Generator[str, None, None]:
        with closing(self._send(replace(ask, stream=True))) as answer:
            for part in self._parts(answer):
                yield from part.texts

    def curl(self, ask: Ask) -> str:
        path, body = self._body(ask)
        return self._curl(path, json.dumps(body, ensure_ascii=False), stream=ask.stream)

    def _curl(self, url: str, body: str, *, stream: bool = False) -> str:
        key = self._api.key_variable if "authorization" in self._api.headers() else ""
        return curl(url, body, stream=stream, key=key)

    def hostile(self) -> Sequence[Hostile]:
        plain = {"model": self.model, "prompt": "Hello", "max_tokens": 4}
        wrong: Mapping[str, dict[str, Any]] = {
            "max_tokens as a text": {**plain, "max_tokens": "many"},
            "a negative max_tokens": {**plain, "max_tokens": -5},
            "a negative temperature": {**plain, "temperature": -1},
            "a top_p above 1": {**plain, "top_p": 7.5},
            "an object as the prompt": {**plain, "prompt": {"a": 1}},
            "stop words that are numbers": {**plain, "stop": [1, 2]},
            "no model": {"prompt": "Hello", "max_tokens": 4},
            "a model that is not there": {**plain, "model": f"{self.model}-not-there"},
        }
        # A server of one model may take any name, or none.
        lenient = {"no model", "a model that is not there"}
        bodies = [
            Hostile(name, json.dumps(body).encode(), None, name not in lenient)
            for name, body in wrong.items()
        ]
        return (
            Hostile("no JSON", b'{"model": ', None, True),
            Hostile("a list instead of an object", b"[]", None, True),
            Hostile("bytes that are not UTF-8", b'{"prompt": "\xff\xfe"}', None, True),
            *bodies,
        )

    def send(self, hostile: Hostile) -> Reply | None:
        with closing(self._open(f"{self.url}/completions", hostile.body)) as answer:
            data = self._read(answer)
        with suppress(Malformed):
            return read_answer(data)
        return None

    def hostile_curl(self, hostile: Hostile) -> str:
        return self._curl(f"{self.url}/completions", hostile.body.decode(errors="backslashreplace"))

    def values(self, texts: Sequence[str]) -> list[Vector]:
        body = self._values_body(texts)
        with closing(self._open(f"{self.url}/embeddings", body)) as answer:
            return read_vectors(self._read(answer))

    def values_curl(self, texts: Sequence[str]) -> str:
        body = json.dumps(self._values_body(texts), ensure_ascii=False)
        return self._curl(f"{self.url}/embeddings", body)

    def decide(self, state: str, questions: Mapping[str, Any]) -> dict[str, Decision]:
        body = self._decision_body(state, questions)
        with closing(self._open(f"{self.url}/systemone", body)) as answer:
            return read_decisions(self._read(answer))

    def decide_curl(self, state: str, questions: Mapping[str, Any]) -> str:
        body = json.dumps(self._decision_body(state, questions), ensure_ascii=False)
        return self._curl(f"{self.url}/systemone", body)

    def _decision_body(self, state: str, questions: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "state": state, "questions": questions}

    def _values_body(self, texts: Sequence[str]) -> dict[str, Any]:
        return {**self._always, "model": self.model, "input": list(texts)}

    def _body(self, ask: Ask, *, counts: bool | None = None) -> tuple[str, dict[str, Any]]:
        options = {**self._always, **ask.options}
        forms = {name: options.pop(name) for name in _FORMS & options.keys()}
        count = options.pop("logprobs", None)
        if ask.messages:
            options["messages"] = ask.shown(in_parts=True)
        usage = self._counts_in_streams if counts is None else counts
        request = self._api.request(self.model, ask.prompt, options, stream=ask.stream, usage=usage)
        body = json.loads(request.body or b"")
        if count is not None:
            body |= (
                {"logprobs": True, "top_logprobs": count} if ask.messages else {"logprobs": count}
            )
        if schema := forms.pop("json_schema", None):
            named = {"name": "answer", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        if forms:
            # What vLLM calls it; OpenAI's API has no field for these.
            body["structured_outputs"] = forms
        return request.url, body

    def _open(self, url: str, body: Mapping[str, Any] | bytes | None) -> OpenAIAnswer:
        raw = json.dumps(body).encode() if isinstance(body, Mapping) else body
        try:
            answer = self._api.open(OpenAIRequest(url, self._api.headers(), raw), self._timeout)
        except OSError as error:
            raise Gone(f"no answer from {self.url}: {_reason(error)}") from None
        if answer.status == 200:
            return answer
        with closing(answer):
            words = error_words(self._read(answer)) or f"status {answer.status}"
        raise Refusal(answer.status, words)

    @staticmethod
    def _read(answer: OpenAIAnswer) -> bytes:
        try:
            return answer.read()
        except OSError as error:
            raise Gone(f"the answer broke off: {_reason(error)}") from None

    def _parts(self, answer: OpenAIAnswer) -> Iterator[StreamPart]:
        try:
            for line in answer.lines():
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield read_part(data)
        except OSError as error:
            raise Gone(f"the stream broke off: {_reason(error)}") from None
        raise Gone("the stream ended without [DONE]")


def _reason(error: Exception) -> str:
    # What a server sends instead of a response may have control characters.
    words = getattr(error, "strerror", None) or error
    return repr(str(words))[1:-1] or type(error).__name__
