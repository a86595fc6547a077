"""Requests for values of texts: embeddings, rankings, scores of pairs, and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from llmserve.runtime.contract import CLASSIFY, EMBED, INPUT_IDS, OPTIONS, RERANK, TRUNCATE
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.fields import (
    STRING,
    TOKEN_IDS,
    Body,
    Field,
    Reader,
    Readers,
    Values,
    check_encodable,
    flag,
    is_ids,
    needed,
    only,
    option,
    reads,
    refused,
    said,
    text,
    whole,
)
from llmserve_gateway.generation_fields import MODEL, PRIORITY, unaffected
from llmserve_gateway.text_requests import BYTES_PER_TOKEN

MAX_TEXTS = 2048
"""How many texts a request may have, as in OpenAI's API."""
_MAX_BYTES = 32 << 20
"""How large all texts may be with the query that each document is compared with."""
_CALL_BYTES = 1 << 20
"""About how much text is sent to a model at once."""
# An embedder tells how near texts are.
_COMPARES = (RERANK, EMBED)

Texts = list[str] | list[list[int]]
Call = tuple[list[str], list[str] | None, dict[str, Any]]
"""What a model is sent at once: texts, the second of each, and options."""

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
    asked: str = ""
    """What the client calls the model, if not by its name."""
    unknown: frozenset[str] = frozenset()
    priority: int | None = None
    """The class that it asks for, None for that of its key."""
    keep: float | None = None
    """For how many seconds its model stays loaded after it, below 0 without end, if it says so."""

    adapter = ""
    unloads = False
    answer_count = 1
    answers_per_prompt = 1
    stream = False

    @property
    def called(self) -> str:
        """What the client calls the model, and the answer as well."""
        return self.asked or self.model

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


# Kinds of fields


def _texts_or_ids(value: Any, name: str) -> Texts:
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
    return cast(Texts, value)


def _one_or_more(value: Any, name: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise bad_request(f"{name} must be a string or a list of strings", name)
    if len(texts) > MAX_TEXTS:
        raise _too_many(name, len(texts))
    _refuse_item(name, texts, lambda item: isinstance(item, str))
    _check_texts(name, texts, empty=True)
    return texts


def _documents(value: Any, name: str) -> list[str]:
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
    for index, each in enumerate(texts):
        where = name if len(texts) == 1 else f"{name}[{index}]"
        if not each and not empty:
            raise bad_request(
                f"{where} is empty: send at least one character", name, "empty_prompt"
            )
        check_encodable(each, where, name)


def _refuse_item(name: str, items: Sequence[Any], is_valid: Callable[[Any], bool]) -> None:
    what = "a text or token ids" if name in ("input", "inputs") else "a text"
    for index, item in enumerate(items):
        if not is_valid(item):
            raise bad_request(f"{name}[{index}] must be {what}", name)


def _too_many(name: str, count: int) -> ApiError:
    what = f"{name} has {count} texts: a request takes at most {MAX_TEXTS}, send several"
    return bad_request(what, name)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _inputs(name: str) -> Field[Texts]:
    texts, ids = (
        {"type": "array", "minItems": 1, "maxItems": MAX_TEXTS, "items": item}
        for item in ({"type": "string", "minLength": 1}, TOKEN_IDS)
    )
    schema = {"anyOf": [{"type": "string", "minLength": 1}, TOKEN_IDS, texts, ids]}
    return Field(name, "A text, token ids, or a list of either.", _texts_or_ids, schema,
                 required=True)  # fmt: skip


def texts(name: str, help: str) -> Field[list[str] | None]:
    texts = {"type": "array", "minItems": 1, "maxItems": MAX_TEXTS, "items": STRING}
    return Field(name, help, _one_or_more, {"anyOf": [STRING, texts]})


_RAW = "the model answers with what its own files say, not with raw numbers"

# What all have

_TRUNCATE = said("truncate", OPTIONS[TRUNCATE.name].help)
_TRUNCATION = said("truncation", "The same, by Voyage's name.")
_PROMPT_TOKENS = whole("truncate_prompt_tokens", "Cut texts at so many tokens; -1: where the "
                       "model does.", -1)  # fmt: skip
_DOCUMENT_TOKENS = whole("max_tokens_per_doc", "The same, by Cohere's name.", -1)
_OPTIONAL_MODEL = text("model", "The name of a model, if there are several for this.")
_COMMON: tuple[Field[Any], ...] = (
    option(OPTIONS["prompt_name"]),
    _TRUNCATE,
    _TRUNCATION,
    _PROMPT_TOKENS,
    _DOCUMENT_TOKENS,
    only("truncation_side", "texts are cut at their end", "right", "Right"),
    only("truncation_direction", "texts are cut at their end", "right", "Right"),
    only("add_special_tokens", "a model's own tokens belong to each text; send token ids", True),
    PRIORITY,
    *unaffected(),
)
# Of rankings, scores and labels
_COMPARED: tuple[Field[Any], ...] = (
    *_COMMON,
    only("use_activation", _RAW, True),
    *refused("this model has no template for it", "instruction", "chat_template_kwargs"),
)

# Embeddings

_INPUT, _INPUTS = _inputs("input"), _inputs("inputs")
_ENCODING: Field[str] = Field(
    "encoding_format", "How the numbers are written.",
    lambda value, name: _encoding(value, name), {"enum": ["float", "base64"]}, absent="float",
)  # fmt: skip
_DIMENSIONS, _NORMALIZE = option(OPTIONS["dimensions"]), option(OPTIONS["normalize"])
_OUTPUT_DIMENSION = option(OPTIONS["dimensions"], "output_dimension", passed=False)
_USE_ACTIVATION = option(OPTIONS["normalize"], "use_activation", passed=False)
EMBEDDINGS = Body(
    _INPUT,
    MODEL,
    _ENCODING,
    _DIMENSIONS,
    _OUTPUT_DIMENSION,
    _NORMALIZE,
    _USE_ACTIVATION,
    only("output_dtype", "embeddings are sent as float", "float"),
    only("embed_dtype", "embeddings are sent as float32", "float32"),
    only("endianness", "embeddings are sent little-endian", "native", "little"),
    *_COMMON,
)
TEI_EMBEDDINGS = Body(_INPUTS, _OPTIONAL_MODEL, _DIMENSIONS, _NORMALIZE, *_COMMON)


def _encoding(value: Any, name: str) -> str:
    if value not in ("float", "base64"):
        raise bad_request(f"{name} must be float or base64", name)
    return str(value)


@reads(EMBEDDINGS)
def read_embeddings(values: Values) -> ValueRequest:
    for row, other in ((_DIMENSIONS, _OUTPUT_DIMENSION), (_NORMALIZE, _USE_ACTIVATION)):
        if values[other] is not None:
            values.options.setdefault(row.option, values[other])
    return _parsed(values, (EMBED,), values[_INPUT], None, encoding=values[_ENCODING])


@reads(TEI_EMBEDDINGS)
def read_tei_embed(values: Values) -> ValueRequest:
    """Read a request of Hugging Face's text-embeddings-inference, whose servers have one model."""
    sent = {"text_input": "inputs", "input_ids": "inputs"}
    return _parsed(values, (EMBED,), values[_INPUTS], None, shape="tei", sent=sent)


# Rankings

_QUERY = needed(text("query", "What the documents are compared with."))
_DOCUMENTS: Field[list[str]] = Field(
    "documents", "What is ranked: texts, or objects with a text.", _documents,
    {"type": "array", "minItems": 1, "maxItems": MAX_TEXTS, "items": {"anyOf": [
        STRING, {"type": "object", "required": ["text"], "properties": {"text": STRING}}]}},
    required=True,
)  # fmt: skip
_TOP_N = whole("top_n", "How many of the best to return; 0 for all.", 0)
_TOP_K = whole("top_k", "The same, by Voyage's name.", 0)
_RETURNS = said("return_documents", "Whether to return the documents, too.")
RANKING = Body(
    _QUERY,
    _DOCUMENTS,
    MODEL,
    _TOP_N,
    _TOP_K,
    _RETURNS,
    *refused("only the text of a document is compared", "rank_fields"),
    *_COMPARED,
)
_RANKED = needed(texts("texts", "What is ranked."))
_RETURNS_TEXT = flag("return_text", "Whether to return the texts, too.")
TEI_RANKING = Body(
    _QUERY,
    _RANKED,
    _OPTIONAL_MODEL,
    _TOP_N,
    _RETURNS_TEXT,
    only("raw_scores", _RAW, False),
    *_COMMON,
)


def _ranking(returns_documents: bool) -> Reader[ValueRequest]:
    """Make a reader for Jina's or Cohere's API; they differ in what is returned by default.

    Voyage's has the same path.
    """

    @reads(RANKING)
    def read(values: Values) -> ValueRequest:
        shape: Shape = "voyage" if values.has(_TOP_K) or values.has(_TRUNCATION) else ""
        best, wanted = _first(values[_TOP_N], values[_TOP_K]), values[_RETURNS]
        return _parsed(
            values,
            _COMPARES,
            [values[_QUERY]],
            values[_DOCUMENTS],
            best=best or None,
            # Left out, it is what the API has by default.
            returns_documents=returns_documents and not shape if wanted is None else wanted,
            shape=shape,
            sent={"text_input": "query", "text_pair": "documents"},
        )

    return read


@reads(TEI_RANKING)
def _read_tei_rerank(values: Values) -> ValueRequest:
    return _parsed(
        values, _COMPARES, [values[_QUERY]], values[_RANKED], best=values[_TOP_N] or None,
        returns_documents=values[_RETURNS_TEXT], shape="tei",
        sent={"text_input": "query", "text_pair": "texts"},
    )  # fmt: skip


# That of Hugging Face's text-embeddings-inference has the same path.
read_rerank = Readers(_ranking(True), _read_tei_rerank, _RANKED)
read_cohere_rerank = Readers(_ranking(False), _read_tei_rerank, _RANKED)

# Scores and labels

_SIDES = tuple(
    (texts(first, "The texts to compare, or one."), texts(second, "The texts to compare with."))
    for first, second in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
)
_ITEMS = texts("items", "The same as documents.")
_PAIRS = (*_SIDES[:2], (_SIDES[1][0], _ITEMS), _SIDES[2])
SCORES = Body(
    MODEL,
    *(field for pair in _SIDES for field in pair),
    _ITEMS,
    *_COMPARED,
    any_of=[[first.name, second.name] for first, second in _PAIRS],
)
_TEXT_PAIR = texts("text_pair", "The second text of each pair, for models that read two.")
LABELS = Body(_INPUT, _TEXT_PAIR, MODEL, *_COMPARED)


@reads(SCORES)
def read_score(values: Values) -> ValueRequest:
    for left, right in _PAIRS:
        first, second = values[left], values[right]
        if first is not None and second is not None:
            break
    else:
        halves = (right for left, right in _PAIRS if values[left] is not None)
        missing = next(halves, _SIDES[0][0]).name
        raise bad_request("send text_1 and text_2, or queries and documents", missing)
    if len(first) not in (1, len(second)):
        what = f"{left.name} must be one text, or as many as {right.name}"
        raise bad_request(f"{what}: {len(first)} and {len(second)}", left.name)
    sent = {"text_input": left.name, "text_pair": right.name}
    return _parsed(values, _COMPARES, cast(Texts, first), second, sent=sent)


@reads(LABELS)
def read_classify(values: Values) -> ValueRequest:
    texts, pairs = values[_INPUT], values[_TEXT_PAIR]
    if pairs is not None and not (len(pairs) == len(texts) and isinstance(texts[0], str)):
        raise bad_request("text_pair must be as many texts as input", "text_pair")
    return _parsed(values, (CLASSIFY,), texts, pairs)


def _parsed(
    values: Values, tasks: tuple[str, ...], texts: Texts, pairs: list[str] | None, **more: Any
) -> ValueRequest:
    cut, at = _first(values[_TRUNCATE], values[_TRUNCATION]), None
    for row in (_PROMPT_TOKENS, _DOCUMENT_TOKENS):
        if (limit := values[row]) not in (None, 0):
            at = at if limit == -1 else (row.name, limit)
            cut = True
    if cut:
        values.options[TRUNCATE.name] = True
    sent = {"text_input": "input", "text_pair": "text_pair", "input_ids": "input"}
    sent |= more.pop("sent", {})
    model = values[MODEL] or ""
    request = ValueRequest(
        model, tasks, texts, pairs, values.options, at, sent=sent, cut=cut,
        unknown=values.unknown, priority=values[PRIORITY], **more,
    )  # fmt: skip
    if request.size > _MAX_BYTES:
        what = f"{sent['text_input']} and {sent['text_pair']} together are over"
        code = "request_too_large"
        raise ApiError(413, f"{what} {_MAX_BYTES >> 20} MB: send fewer at once", code=code)
    return request
