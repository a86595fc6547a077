"""Requests to models that answer with values, and what they return."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmserve.client.exchange import FINAL_RESPONSE
from llmserve.client.messages import build_request, check_options, unpack_texts
from llmserve.client.model import ModelInfo
from llmserve.contract.tasks import GENERATE
from llmserve.contract.tensors import INPUT_TOKENS, LABEL, PROBABILITY, SCORE, TEXT_PAIR
from llmserve.errors import ClientError, UsageError

if TYPE_CHECKING:
    import numpy.typing as npt

_TYPES = {"FP32": "<f4", "FP64": "<f8", "FP16": "<f2", "BOOL": "?"} | {
    f"{kind}{8 * size}": f"<{kind[0].lower()}{size}"
    for kind in ("INT", "UINT")
    for size in (1, 2, 4, 8)
}


@dataclass(frozen=True, eq=False)
class Computed:
    """What a model has computed of several texts: each output has a row for every text."""

    outputs: Mapping[str, npt.NDArray[Any]]
    input_tokens: tuple[int, ...] | None = None
    """The number of tokens of each text, if the model counts them."""


@dataclass(frozen=True)
class Ranked:
    """A document with its score; ``index`` is its position in the request."""

    index: int
    score: float
    document: str


@dataclass(frozen=True)
class Labels:
    """The labels of a text: the likeliest, its probability, and those of all."""

    label: str
    probability: float
    probabilities: Mapping[str, float]


def value_requests(
    info: ModelInfo, texts: Sequence[str], pairs: Sequence[str] | None, options: Mapping[str, Any]
) -> list[Any]:
    """Return the requests that ask a model for the values of texts."""
    if isinstance(texts, str) or isinstance(pairs, str):
        raise UsageError("texts are given as a list", hint='write ["…"] for a single one')
    if pairs is not None and len(pairs) != len(texts):
        raise UsageError(
            f"{len(texts)} texts and {len(pairs)} second texts", hint="give as many of both"
        )
    if info.task == GENERATE:
        raise UsageError(f"{info.name} generates text", hint="call generate()")
    if pairs is not None and TEXT_PAIR.name not in info.inputs:
        raise UsageError(f"{info.name} reads one text, not pairs", hint="leave out the second")
    if not texts:
        raise UsageError("there is no text", hint="give at least one")
    checked = check_options(options)
    size = info.rows or len(texts)
    requests = []
    for first in range(0, len(texts), size):
        rows = slice(first, first + size)
        request = build_request(
            info,
            texts[rows],
            checked,
            request_id=str(secrets.randbits(63) or 1),
            pairs=None if pairs is None else pairs[rows],
        )
        if info.exchange == "stream":
            request.parameters[FINAL_RESPONSE].bool_param = True
        requests.append(request)
    return requests


def read_values(responses: Iterable[Any]) -> Computed:
    """Join the responses to the requests for values, in the order of the requests."""
    import numpy as np

    parts: dict[str, list[npt.NDArray[Any]]] = {}
    for response in responses:
        if response is None:
            raise ClientError("the server sent no values for some of the texts")
        outputs = zip(response.outputs, response.raw_output_contents, strict=False)
        for output, raw in outputs:
            parts.setdefault(output.name, []).append(_array(output, raw))
    try:
        arrays = {name: np.concatenate(rows) for name, rows in parts.items()}
    except ValueError:
        raise ClientError("the server sent values of different sizes") from None
    counts = arrays.pop(INPUT_TOKENS.name, None)
    tokens = None if counts is None else tuple(int(count) for count in counts.reshape(-1))
    return Computed(arrays, tokens)


def _array(output: Any, raw: bytes) -> npt.NDArray[Any]:
    import numpy as np

    try:
        if output.datatype == "BYTES":
            values = np.array(unpack_texts(raw), dtype=np.object_)
        else:
            values = np.frombuffer(raw, dtype=_TYPES[output.datatype])
        return values.reshape(tuple(output.shape))
    except (KeyError, ValueError):
        raise ClientError(
            f"the server sent an output {output.name} of type {output.datatype} that cannot be read"
        ) from None


def output_of(computed: Computed, name: str) -> npt.NDArray[Any]:
    """Return an output, with a row for each text."""
    if name not in computed.outputs:
        raise ClientError(f"the server sent no {name}")
    return computed.outputs[name]


def ranked(computed: Computed, documents: Sequence[str]) -> list[Ranked]:
    """Return the documents with their scores, the best first, equals in their own order."""
    scores = output_of(computed, SCORE.name).reshape(-1).tolist()
    found = [Ranked(i, s, d) for i, (s, d) in enumerate(zip(scores, documents, strict=True))]
    return sorted(found, key=lambda document: -document.score)


def labels(computed: Computed) -> list[Labels]:
    """Return the labels of each text."""
    rows = zip(
        output_of(computed, LABEL.name).tolist(),
        output_of(computed, PROBABILITY.name).tolist(),
        strict=True,
    )
    return [Labels(n[0], p[0], dict(zip(n, p, strict=True))) for n, p in rows]
