"""Requests for values of texts: embeddings, rankings, scores of pairs, and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from llmserve.runtime.contract import CLASSIFY, EMBED, INPUT_IDS, OPTIONS, RERANK, TRUNCATE
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.fields import (
    BYTES_PER_TOKEN,
    TOKEN_ID,
    Fields,
    check_encodable,
    is_ids,
    without_none,
)

MAX_TEXTS = 2048
"""How many texts a request may have, as in OpenAI's API."""
_MAX_BYTES = 32 << 20
"""How large all texts may be with the query that each document is compared with."""
_CALL_BYTES = 1 << 20
"""About how much text is sent to a model at once."""
_TRUNCATE, _NORMALIZE = OPTIONS[TRUNCATE.name], OPTIONS["normalize"]
_PROMPT_NAME, _DIMENSIONS = OPTIONS["prompt_name"], OPTIONS["dimensions"]

# An embedder tells how near texts are.
_COMPARES = (RERANK, EMBED)

Texts = list[str] | list[list[int]]
Call = tuple[list[str], list[str] | None, dict[str, Any]]
"""What a model is sent at once: texts, the second of each, and options."""

TEXTS = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": TOKEN_ID},
        {"type": "array", "minItems": 1, "maxItems": MAX_TEXTS,
         "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "maxItems": MAX_TEXTS,
         "items": {"type": "array", "minItems": 1, "items": TOKEN_ID}},
    ]
}  # fmt: skip
TEXT_OR_TEXTS = {
    "anyOf": [{"type": "string"},
              {"type": "array", "minItems": 1, "maxItems": MAX_TEXTS, "items": {"type": "string"}}]
}  # fmt: skip
_DOCUMENT = {
    "anyOf": [{"type": "string"}, {"type": "object", "required": ["text"],
                                   "properties": {"text": {"type": "string"}}}]
}  # fmt: skip


Shape = Literal["", "voyage", "tei"]
"""Whose answer is wanted where several APIs have a path, by the fields that they have alone."""


@dataclass(frozen=True)
class ValueRequest:
    """A validated request for values, in terms of the tensor contract.

    ``texts`` has one text for all ``pairs`` if there are several of these; texts may be token ids.
    ``tasks`` are those of the models that can answer it. A text is cut ``at`` so many tokens.
    """

    model: str
    tasks: tuple[str, ...]
    texts: Texts
    pairs: list[str] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    at: tuple[str, int] | None = None
    encoding: str = "float"
    best: int | None = None
    """How many of the ranked documents to return."""
    returns_documents: bool = False
    shape: Shape = ""
    cut: bool | None = None
    """Whether texts that are too long are cut; None if the request leaves that to the gateway."""
    may_cut: bool = False
    """Whether the gateway has them cut then."""
    sent: Mapping[str, str] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()

    answer_count = 1
    answers_per_prompt = 1
    stream = False

    @property
    def count(self) -> int:
        return len(self.texts) if self.pairs is None else len(self.pairs)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All texts, each once."""
        # With pairs, they are not token ids.
        prompts: Any = [*self.texts, *(self.pairs or ())]
        return cast("list[str] | list[list[int]]", prompts)

    @property
    def size(self) -> int:
        """The bytes of all texts, with one that belongs to each pair counted for each."""
        repeated = self.count // len(self.texts)
        return repeated * sum(map(_size, self.texts)) + sum(map(_size, self.pairs or ()))

    @property
    def estimated_tokens(self) -> int:
        return self.size // BYTES_PER_TOKEN + 1

    @property
    def held_tokens(self) -> int:
        """What it counts as while it waits."""
        return self.estimated_tokens

    @property
    def cuts(self) -> bool:
        return bool(self.cut) or self.may_cut

    def with_cut(self, by_default: bool) -> ValueRequest:
        """Return the request with its texts cut if it says nothing of it, and its model can."""
        # Token ids cannot be cut, as what ends them would be lost.
        can = self.cut is None and isinstance(self.texts[0], str)
        return replace(self, may_cut=by_default and can)

    def calls(self, rows: int | None) -> Iterator[Call]:
        """Yield what to send to a model that takes this many rows at once."""
        if not isinstance(self.texts[0], str):
            # An option, and so the same for all rows of a call.
            for ids in self.texts:
                yield [""], None, {**self.options, INPUT_IDS.name: ids}
            return
        start, size = 0, 0
        for index in range(self.count):
            text = self._text(index)
            row = _size(text) + _size(self.pairs[index] if self.pairs else "")
            if index > start and (index - start == rows or size + row > _CALL_BYTES):
                yield self._call(start, index)
                start, size = index, 0
            size += row
        yield self._call(start, self.count)

    def _call(self, start: int, end: int) -> Call:
        texts = [self._text(index) for index in range(start, end)]
        return texts, self.pairs and self.pairs[start:end], self.options

    def _text(self, index: int) -> Any:
        return self.texts[index if len(self.texts) > 1 else 0]


def _size(text: str | Sequence[int]) -> int:
    if isinstance(text, str):
        return len(text) if text.isascii() else len(text.encode(errors="replace"))
    return len(text) * BYTES_PER_TOKEN


def read_embeddings(content: Mapping[str, Any]) -> ValueRequest:
    fields = Fields(content)
    encoding = fields.take("encoding_format", enum=["float", "base64", None]) or "float"
    if encoding not in ("float", "base64"):
        raise bad_request("encoding_format must be float or base64", "encoding_format")
    if fields.take("output_dtype") not in (None, "float"):
        raise bad_request("output_dtype: embeddings are sent as float", "output_dtype")
    if fields.take("embed_dtype") not in (None, "float32"):
        raise bad_request("embed_dtype: embeddings are sent as float32", "embed_dtype")
    if fields.take("endianness") not in (None, "native", "little"):
        raise bad_request("endianness: embeddings are sent little-endian", "endianness")
    options = {
        # Voyage's name for the same.
        _DIMENSIONS.name: _first(
            fields.option(_DIMENSIONS), fields.option(_DIMENSIONS, "output_dimension")
        ),
        # vLLM's name for the same.
        _NORMALIZE.name: _first(
            fields.option(_NORMALIZE), fields.option(_NORMALIZE, "use_activation")
        ),
    }
    texts = _read_input(fields)
    return _parsed(fields, (EMBED,), texts, None, options, encoding=encoding)


def read_rerank(content: Mapping[str, Any], *, returns_documents: bool = True) -> ValueRequest:
    """Read a request of Jina's or Cohere's API; they differ in what is returned by default.

    Voyage's and that of Hugging Face's text-embeddings-inference have the same path.
    """
    if "texts" in content:
        return _read_tei_rerank(content)
    fields = Fields(content)
    shape: Shape = "voyage" if {"top_k", "truncation"} & {*content} else ""
    query = fields.text("query")
    documents = fields.take("documents", type="array", minItems=1, maxItems=MAX_TEXTS,
                            items=_DOCUMENT)  # fmt: skip
    texts = _documents(documents)
    best = _first(fields.number("top_n", int, 0), fields.number("top_k", int, 0))
    fields.refuse("only the text of a document is compared", "rank_fields")
    # Left out, it is what the API has by default.
    is_said = content.get("return_documents") is not None
    wanted = fields.boolean("return_documents")
    _refuse_raw(fields)
    return _parsed(
        fields,
        _COMPARES,
        [query],
        texts,
        {},
        best=best or None,
        returns_documents=wanted if is_said else returns_documents and not shape,
        shape=shape,
        sent={"text_input": "query", "text_pair": "documents"},
    )


def read_cohere_rerank(content: Mapping[str, Any]) -> ValueRequest:
    return read_rerank(content, returns_documents=False)


def _read_tei_rerank(content: Mapping[str, Any]) -> ValueRequest:
    fields = Fields(content)
    query, texts = fields.text("query"), _texts(fields, "texts")
    if fields.boolean("raw_scores"):
        what = "raw_scores: the model answers with what its own files say, not with raw numbers"
        raise bad_request(what, "raw_scores")
    returned, best = fields.boolean("return_text"), fields.number("top_n", int, 0)
    return _parsed(
        fields, _COMPARES, [query], texts, {}, best=best or None, returns_documents=returned,
        shape="tei", sent={"text_input": "query", "text_pair": "texts"},
    )  # fmt: skip


def read_tei_embed(content: Mapping[str, Any]) -> ValueRequest:
    """Read a request of Hugging Face's text-embeddings-inference, whose servers have one model."""
    fields = Fields(content)
    texts = _read_input(fields, "inputs")
    options = {
        _DIMENSIONS.name: fields.option(_DIMENSIONS),
        _NORMALIZE.name: fields.option(_NORMALIZE),
    }
    sent = {"text_input": "inputs", "input_ids": "inputs"}
    return _parsed(fields, (EMBED,), texts, None, options, shape="tei", sent=sent)


SCORE_NAMES = (
    ("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")
)  # fmt: skip


def read_score(content: Mapping[str, Any]) -> ValueRequest:
    fields = Fields(content)
    names = next((pair for pair in SCORE_NAMES if all(name in content for name in pair)), None)
    if names is None:
        raise bad_request("send text_1 and text_2, or queries and documents", "text_1")
    first, second = (_texts(fields, name) for name in names)
    if len(first) not in (1, len(second)):
        what = f"{names[0]} must be one text, or as many as {names[1]}"
        raise bad_request(f"{what}: {len(first)} and {len(second)}", names[0])
    _refuse_raw(fields)
    sent = {"text_input": names[0], "text_pair": names[1]}
    return _parsed(fields, _COMPARES, first, second, {}, sent=sent)


def read_classify(content: Mapping[str, Any]) -> ValueRequest:
    fields = Fields(content)
    texts = _read_input(fields)
    pairs = _texts(fields, "text_pair") if content.get("text_pair") is not None else None
    if pairs is not None and not (len(pairs) == len(texts) and isinstance(texts[0], str)):
        raise bad_request("text_pair must be as many texts as input", "text_pair")
    _refuse_raw(fields)
    return _parsed(fields, (CLASSIFY,), texts, pairs, {})


def _parsed(
    fields: Fields,
    tasks: tuple[str, ...],
    texts: Texts,
    pairs: list[str] | None,
    options: Mapping[str, Any],
    **more: Any,
) -> ValueRequest:
    options = {**options, _PROMPT_NAME.name: fields.option(_PROMPT_NAME)}
    # Voyage's name for the same.
    cut, at = _first(*(_said(fields, name) for name in (_TRUNCATE.name, "truncation"))), None
    for name in ("truncate_prompt_tokens", "max_tokens_per_doc"):
        if (limit := fields.number(name, int, -1)) not in (None, 0):
            at = at if limit == -1 else (name, limit)
            cut = True
    for name in ("truncation_side", "truncation_direction"):
        if fields.take(name) not in (None, "right", "Right"):
            raise bad_request(f"{name}: texts are cut at their end", name)
    if fields.take("add_special_tokens") is False:
        what = "add_special_tokens: a model's own tokens belong to each text; send token ids"
        raise bad_request(what, "add_special_tokens")
    options[_TRUNCATE.name] = cut or None
    sent = {"text_input": "input", "text_pair": "text_pair", "input_ids": "input"}
    sent |= more.pop("sent", {})
    is_named = more.get("shape") != "tei"
    model = fields.text("model", required=is_named) or ""
    request = ValueRequest(
        model, tasks, texts, pairs, without_none(options), at, sent=sent, cut=cut,
        unknown=fields.unknown(), **more,
    )  # fmt: skip
    if request.size > _MAX_BYTES:
        what = f"{sent['text_input']} and {sent['text_pair']} together are over"
        code = "request_too_large"
        raise ApiError(413, f"{what} {_MAX_BYTES >> 20} MB: send fewer at once", code=code)
    return request


def _said(fields: Fields, name: str) -> bool | None:
    """Take a flag of which it matters whether it is false or not there."""
    value = fields.take(name, type="boolean")
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"{name} must be true or false", name)
    return value


def _read_input(fields: Fields, name: str = "input") -> Texts:
    value = fields.take(name, **TEXTS)
    if isinstance(value, str) or is_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise bad_request(
            f"{name} must be a non-empty string, token ids, or a list of either", name
        )
    if len(value) > MAX_TEXTS:
        raise _too_many(name, len(value))
    if all(isinstance(text, str) for text in value):
        _check_texts(name, value)
    elif not all(map(is_ids, value)):
        _refuse_item(name, value, lambda item: isinstance(item, str) or is_ids(item))
        raise bad_request(f"{name} must be texts or lists of token ids, not both", name)
    return value


def _texts(fields: Fields, name: str) -> list[str]:
    value = fields.take(name, **TEXT_OR_TEXTS)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise bad_request(f"{name} must be a string or a list of strings", name)
    if len(texts) > MAX_TEXTS:
        raise _too_many(name, len(texts))
    _refuse_item(name, texts, lambda item: isinstance(item, str))
    _check_texts(name, texts, empty=True)
    return texts


def _documents(value: Any) -> list[str]:
    name = "documents"
    if not isinstance(value, list) or not value:
        raise bad_request(f"{name} must be a list with at least one text", name)
    if len(value) > MAX_TEXTS:
        raise _too_many(name, len(value))
    texts: list[Any] = [item.get("text") if isinstance(item, dict) else item for item in value]
    if not all(isinstance(text, str) for text in texts):
        _refuse_item(name, texts, lambda text: isinstance(text, str))
    _check_texts(name, texts, empty=True)
    return texts


def _check_texts(name: str, texts: Sequence[str], *, empty: bool = False) -> None:
    for index, text in enumerate(texts):
        where = name if len(texts) == 1 else f"{name}[{index}]"
        if not text and not empty:
            raise bad_request(
                f"{where} is empty: send at least one character", name, "empty_prompt"
            )
        check_encodable(text, where, name)


def _refuse_item(name: str, items: Sequence[Any], is_valid: Callable[[Any], bool]) -> None:
    what = "a text or token ids" if name in ("input", "inputs") else "a text"
    for index, item in enumerate(items):
        if not is_valid(item):
            raise bad_request(f"{name}[{index}] must be {what}", name)


def _too_many(name: str, count: int) -> ApiError:
    what = f"{name} has {count} texts: a request takes at most {MAX_TEXTS}, send several"
    return bad_request(what, name)


def _refuse_raw(fields: Fields) -> None:
    if fields.take("use_activation", type="boolean") is False:
        what = "use_activation: the model answers with what its own files say, not with raw numbers"
        raise bad_request(what, "use_activation")
    fields.refuse("this model has no template for it", "instruction", "chat_template_kwargs")


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
