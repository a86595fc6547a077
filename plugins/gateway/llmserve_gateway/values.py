"""Values of texts: asking a model for them, and the responses that have them."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from llmserve.client import Computed, ModelInfo
from llmserve.runtime.contract import (
    EMBED,
    EMBEDDING,
    INPUT_IDS,
    LABEL,
    PROBABILITY,
    PROMPT_NAME,
    SCORE,
)
from llmserve_gateway.errors import ApiError
from llmserve_gateway.openai_answers import dump
from llmserve_gateway.reply import RequestRecord
from llmserve_gateway.value_requests import Call, Texts, ValueRequest

if TYPE_CHECKING:
    from llmserve_gateway.replicas import Replicas

AT_ONCE = 2
"""How many calls of one request each Triton gets at once: enough to keep it busy, while requests
of others take their turns between them."""
IDS_AT_ONCE = 64
"""The same for calls with token ids, which have one text each."""
_BUSY_SECONDS = 0.005
"""How long a response is written without a pause in which other requests go on."""
_SHORTEST = 1e-12
_MAX_WARNINGS = 16
QUESTIONS, DOCUMENTS = ("query",), ("document", "passage", "corpus")
"""How models call their prompts for questions and for what answers them."""

Array = npt.NDArray[Any]
T = TypeVar("T")


async def compute(
    client: Replicas,
    info: ModelInfo,
    request: ValueRequest,
    timeout: float | None,
    prompts: Sequence[str] = (),
) -> Computed:
    """Return the values of all texts of a request; of pairs of an embedder, how near they are.

    ``prompts`` are the names of the model's own: some read questions and documents differently.
    """
    if info.task != EMBED or request.pairs is None:
        return await _compute(client, info, request, timeout)
    first = _alone(request, request.texts, prompts, QUESTIONS)
    second = _alone(request, request.pairs, prompts, DOCUMENTS)
    both = [asyncio.ensure_future(_compute(client, info, one, timeout)) for one in (first, second)]
    try:
        return _nearness(*await asyncio.gather(*both))
    finally:
        # If one side has failed, nobody waits for the other.
        for side in both:
            side.cancel()


def _alone(
    request: ValueRequest, texts: Texts, prompts: Sequence[str], names: Sequence[str]
) -> ValueRequest:
    """Return a request for the embeddings of one side of its pairs."""
    name = next((name for name in names if name in prompts), None)
    chosen = {} if name is None else {PROMPT_NAME.name: name}
    return replace(request, texts=texts, pairs=None, options={**chosen, **request.options})


async def _compute(
    client: Replicas, info: ModelInfo, request: ValueRequest, timeout: float | None
) -> Computed:
    until = None if timeout is None else time.monotonic() + timeout

    async def ask(call: Call) -> Computed:
        texts, pairs, options = call
        left = None if until is None else max(0.001, until - time.monotonic())
        return await client.compute(info.name, texts, pairs=pairs, timeout=left, **options)

    calls = list(request.calls(info.rows))
    at_once = IDS_AT_ONCE if INPUT_IDS.name in calls[0][2] else AT_ONCE
    return _joined(await _each(ask, calls, at_once * len(client.all)))


async def _each(
    ask: Callable[[Call], Awaitable[T]], calls: Sequence[Call], at_once: int
) -> list[T]:
    """Ask for each, not more than so many at once; stop asking when one fails."""
    answers: dict[int, T] = {}
    waiting = iter(enumerate(calls))

    async def work() -> None:
        for index, call in waiting:
            answers[index] = await ask(call)

    workers = [asyncio.ensure_future(work()) for _ in range(min(at_once, len(calls)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
    return [answers[index] for index in range(len(calls))]


def _joined(parts: Sequence[Computed]) -> Computed:
    if len(parts) == 1:
        return parts[0]
    names = parts[0].outputs.keys()
    outputs = {name: np.concatenate([part.outputs[name] for part in parts]) for name in names}
    counts = [part.input_tokens for part in parts]
    if any(count is None for count in counts):
        return Computed(outputs)
    return Computed(outputs, tuple(number for count in counts for number in count or ()))


def _nearness(first: Computed, second: Computed) -> Computed:
    """Return the cosines of texts, or of one, with others, as scores."""
    one, other = (_directions(computed) for computed in (first, second))
    tokens = (*(first.input_tokens or ()), *(second.input_tokens or ()))
    return Computed({SCORE.name: np.sum(one * other, axis=1)}, tokens)


def _directions(computed: Computed) -> Array:
    vectors = output(computed, EMBEDDING.name).astype(np.float64)
    lengths: Array = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions: Array = vectors / np.maximum(lengths, _SHORTEST)
    return directions


class ValueWriter:
    """Writes the response to one request; each API has a class of its own."""

    prefix, kind = "embd", "list"

    def __init__(
        self, request: ValueRequest, record: RequestRecord, labels: Sequence[str] = ()
    ) -> None:
        self._request = request
        self._id = f"{self.prefix}-{record.id}"
        self._record = record
        self._labels = labels
        self.warnings: list[str] = []
        """What a client should know of its answer."""

    async def whole(self, computed: Computed) -> bytes:
        head, more = self._head(), {**self._usage(computed), **self._warned()}
        return dump({**head, "data": self._data(computed), **more})

    def _warned(self) -> dict[str, Any]:
        return {"meta": {"warnings": self.warnings}} if self.warnings else {}

    def _head(self) -> dict[str, Any]:
        head = {"id": self._id, "object": self.kind, "created": int(time.time())}
        return {**head, "model": self._request.called}

    def _usage(self, computed: Computed) -> dict[str, Any]:
        tokens = input_tokens(computed)
        return {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}}

    def _data(self, computed: Computed) -> list[dict[str, Any]]:
        raise NotImplementedError


class EmbeddingsWriter(ValueWriter):
    async def whole(self, computed: Computed) -> bytes:
        vectors = await self._vectors(computed)
        if self._request.shape == "tei":
            return b"[%b]" % b",".join(vectors)
        rows = [
            b'{"object":"embedding","index":%d,"embedding":%b}' % (index, vector)
            for index, vector in enumerate(vectors)
        ]
        head, usage = dump(self._head()), dump({**self._usage(computed), **self._warned()})
        return b'%b,"data":[%b],%b' % (head[:-1], b",".join(rows), usage[1:])

    async def _vectors(self, computed: Computed) -> list[bytes]:
        """Return each vector as JSON."""
        vectors = np.ascontiguousarray(output(computed, EMBEDDING.name), dtype="<f4")
        write = _base64 if self._request.encoding == "base64" else _numbers
        rows, paused = [], time.perf_counter()
        for vector in vectors:
            rows.append(write(vector))
            if time.perf_counter() - paused > _BUSY_SECONDS:
                await asyncio.sleep(0)
                paused = time.perf_counter()
        return rows


class RankingWriter(ValueWriter):
    prefix = "rerank"

    async def whole(self, computed: Computed) -> bytes:
        scores = output(computed, SCORE.name).reshape(-1).tolist()
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        best = [(index, scores[index]) for index in order[: self._request.best]]
        if self._request.shape == "tei":
            return dump([self._bare(index, score) for index, score in best])
        results = [self._result(index, score) for index, score in best]
        if self._request.shape == "voyage":
            head, more = self._head(), {**self._usage(computed), **self._warned()}
            return dump({**head, "data": results, **more})
        head = {"id": self._id, "model": self._request.called, "results": results}
        return dump({**head, **self._usage(computed), "meta": self._meta()})

    def _result(self, index: int, score: float) -> dict[str, Any]:
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        if self._request.returns_documents and self._request.pairs:
            text = self._request.pairs[index]
            result["document"] = text if self._request.shape == "voyage" else {"text": text}
        return result

    def _bare(self, index: int, score: float) -> dict[str, Any]:
        pairs = self._request.pairs if self._request.returns_documents else None
        return {"index": index, "score": score, **({"text": pairs[index]} if pairs else {})}

    def _meta(self) -> dict[str, Any]:
        """Return what Cohere's clients read of what a request costs, and of what was cut."""
        return {"billed_units": {"search_units": 1}, **self._warned().get("meta", {})}


class ScoreWriter(ValueWriter):
    prefix = "score"

    def _data(self, computed: Computed) -> list[dict[str, Any]]:
        scores = output(computed, SCORE.name).reshape(-1).tolist()
        return [{"index": i, "object": "score", "score": s} for i, s in enumerate(scores)]


class LabelWriter(ValueWriter):
    prefix = "classify"

    def _data(self, computed: Computed) -> list[dict[str, Any]]:
        names, shares = output(computed, LABEL.name), output(computed, PROBABILITY.name)
        return [
            self._text(index, dict(zip(names[index].tolist(), shares[index].tolist(), strict=True)))
            for index in range(len(names))
        ]

    def _text(self, index: int, shares: Mapping[str, float]) -> dict[str, Any]:
        """Return the likeliest label, and the probabilities in the order of the model's labels."""
        order = self._labels if set(self._labels) == set(shares) else [*shares]
        return {
            "index": index,
            "label": next(iter(shares)),
            "probs": [shares[label] for label in order],
            "num_classes": len(shares),
            "labels": order,
        }


def cut_texts(request: ValueRequest, computed: Computed, limit: int | None) -> list[str]:
    """Return a warning for each text that was cut: the model has read as much as it can of it.

    One that fits exactly is among them, as models do not say what they have left out.
    """
    counts = computed.input_tokens or ()
    if not request.cuts or limit is None or len(counts) < request.count:
        return []
    name = request.sent.get("text_pair" if request.pairs else "text_input", "")
    # Of an embedder that compares, those of the other side come first.
    others, own = counts[: -request.count], counts[-request.count :]
    names = [f"{name}[{index}]" for index, count in enumerate(own) if count >= limit]
    if any(count >= limit for count in others):
        names.insert(0, request.sent.get("text_input", ""))
    most = names[:_MAX_WARNINGS]
    more = [f"and {len(names) - len(most)} others"] if names[len(most) :] else []
    return [
        f"{name} reaches the {limit} tokens that the model reads, and is cut there" for name in most
    ] + more


def input_tokens(computed: Computed) -> int:
    return sum(computed.input_tokens or ())


def output(computed: Computed, name: str) -> Array:
    """Return an output with a row for each text; JSON has no number that is none."""
    values = computed.outputs.get(name)
    if values is None:
        raise ApiError(500, f"the model sent no {name}", code="bad_answer")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        what = f"the model computed a {name} that is no number"
        raise ApiError(422, what, code="not_a_number")
    return values


def _base64(vector: Array) -> bytes:
    return b'"%b"' % b64encode(vector.tobytes())


def _numbers(vector: Array) -> bytes:
    """Return a vector as JSON, in a third of the time that ``json`` takes.

    Nine digits tell each number of 32 bits from all others.
    """
    return (b"[%b]" % b",".join([b"%.9g"] * len(vector))) % tuple(vector.tolist())
