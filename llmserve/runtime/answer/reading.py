"""Reads a text or a pair of texts, whole or cut, for a model that answers with values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llmserve.runtime.answer.params import Params
from llmserve.runtime.errors import RequestError, invalid_value
from llmserve.runtime.protocols import Parts, Tokenizer

# Characters per token. Words have about four; no tokenizer has a token of five hundred.
RARELY_MORE, NEVER_MORE = 32, 512

Encoded = tuple[list[int], list[int] | None]
"""The ids of a text or a pair, and the segment of each if the model distinguishes them."""
_Encode = Callable[..., Encoded]


def encode(text: str, pair: str | None, params: Params, parts: Parts) -> Encoded:
    """Encode what a model is to compute a value of; refuse or cut what is over its limit."""
    text = _with_prompt(text, params, parts.tokenizer)
    encode_pair = _encoder(parts.tokenizer, pair)
    limit = parts.generator.context_length
    if limit is None:
        return encode_pair(text, pair)
    if not (params.truncate and getattr(parts.tokenizer, "cuts_beginnings", False)):
        text, pair = _without_the_end(text, pair, limit, encode_pair, cuts=params.truncate)
    ids, segments = encode_pair(text, pair)
    if len(ids) <= limit:
        return ids, segments
    if not params.truncate:
        raise _too_long(f"{len(ids)} tokens", limit, len(ids))
    cut, segments = encode_pair(text, pair, limit=limit)
    if len(cut) > limit:
        # The special tokens alone are over the limit, and nothing is cut then.
        raise _too_long(f"{len(ids)} tokens", limit, len(ids), can_be_cut=False)
    return cut, segments


def whole_ids(ids: Sequence[int], params: Params, limit: int | None) -> list[int]:
    """Return token ids that a client has sent; what ends them would be lost if they were cut."""
    if limit is not None and len(ids) > limit:
        if params.truncate:
            raise invalid_value("truncate", "cannot cut input_ids: send text_input")
        raise _too_long(f"{len(ids)} tokens", limit, len(ids), can_be_cut=False)
    return list(ids)


def _encoder(tokenizer: Tokenizer, pair: str | None) -> _Encode:
    # Only some tokenizers have this method.
    encode_pair: _Encode | None = getattr(tokenizer, "encode_pair", None)
    if encode_pair is not None:
        return encode_pair
    if pair is not None:
        raise RequestError(
            "this model's tokenizer reads no pairs of texts",
            code="unsupported_option",
            param="text_pair",
        )

    def encode_alone(text: str, pair: None = None, *, limit: int | None = None) -> Encoded:
        del pair
        return tokenizer.encode(text)[:limit], None

    return encode_alone


def _with_prompt(text: str, params: Params, tokenizer: Any) -> str:
    """Put the model's own prompt before a text, such as ``query: ``."""
    prompts = getattr(tokenizer, "prompts", {})
    name = params.prompt_name
    if name is None:
        name = getattr(tokenizer, "default_prompt", None)
        return f"{prompts.get(name, '')}{text}"
    if name not in prompts:
        known = f"choose one of {', '.join(sorted(prompts))}" if prompts else "leave it out"
        raise invalid_value("prompt_name", f"{name[:40]!r} is no prompt of this model: {known}")
    return f"{prompts[name]}{text}"


def _without_the_end(
    text: str, pair: str | None, limit: int, encode_pair: _Encode, *, cuts: bool
) -> tuple[str, str | None]:
    """Refuse or cut a very long text without tokenizing all of it.

    Tokenizing takes a second per megabyte, and every other request of the model waits meanwhile.
    """
    size = max(len(text), len(pair or ""))
    if size <= RARELY_MORE * limit:
        return text, pair
    for most in (RARELY_MORE * limit, NEVER_MORE * limit):
        beginnings = text[:most], None if pair is None else pair[:most]
        if size > most and len(encode_pair(*beginnings)[0]) > limit:
            if not cuts:
                raise _too_long(f"{len(text) + len(pair or '')} characters", limit)
            return beginnings
    return text, pair


def _too_long(
    size: str, limit: int, tokens: int | None = None, *, can_be_cut: bool = True
) -> RequestError:
    details = {} if tokens is None else {"prompt_tokens": tokens}
    details["context"] = limit
    advice = "shorten it, or send truncate=true to have it cut" if can_be_cut else "shorten it"
    return RequestError(
        f"the text has {size} and the model reads at most {limit} tokens: {advice}",
        code="context_length_exceeded",
        param=None,
        **details,
    )
