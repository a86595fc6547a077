"""A Triton request read into prompts: tensors first, then request parameters of the same names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llmserve.runtime.contract import ALIASES
from llmserve.runtime.errors import RequestError, panics_as_errors
from llmserve.runtime.params import READERS, Params, check_text, read_params
from llmserve.runtime.protocols import Parts, Tokenizer

_MOST_PROMPTS = 256
# Characters a token. Words have four of them; no tokenizer knows a token of five hundred.
_SELDOM_MORE, _NEVER_MORE = 32, 512
_LISTS = frozenset({"stop_words", "bad_words", "input_ids", "choice"})


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request and what is asked for it."""

    text: str
    ids: list[int]
    params: Params


@panics_as_errors()
def read_prompts(
    raw: Any,
    parts: Parts,
    *,
    empty: bool = False,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> list[Prompt]:
    """Read every prompt of a request, or refuse the request with what is wrong in it.

    Where ``empty`` is allowed, as in the later steps of a sequence, such a prompt has no ids.
    ``renamed`` leads from a model's own names of tensors to those of the contract.
    """
    # Control tensors of a sequence batcher come along; no user sent them.
    named = ((renamed.get(tensor.name(), tensor.name()), tensor) for tensor in raw.inputs())
    tensors = {name: tensor.as_numpy() for name, tensor in named if name in parts.inputs}
    shared = _parameters(raw, parts)
    texts, chats = tensors.pop("text_input", None), tensors.pop("messages", None)
    chat = shared.pop("messages", None)
    source = chats if chats is not None else texts
    if source is None:
        source = tensors.get("input_ids") if parts.batched else None
    count = 1 if source is None else (source.shape[0] if source.ndim else 1)
    if not 1 <= count <= _MOST_PROMPTS:
        raise RequestError(f"a request takes 1 to {_MOST_PROMPTS} prompts, not {count}")
    if texts is not None and chats is not None and texts.size != chats.size:
        raise RequestError(f"{texts.size} of text_input and {chats.size} of messages: send one")
    prompts = []
    for row in range(count):
        values = dict(shared)
        for name, tensor in tensors.items():
            values[ALIASES.get(name, name)] = _of_row(name, tensor, row, count, parts.batched)
        params = read_params(values, extras=parts.extras)
        text = "" if texts is None else _text(texts.reshape(-1)[row], "text_input")
        messages = chat if chats is None else _text(chats.reshape(-1)[row], "messages")
        if empty and not (text or messages or params.input_ids):
            prompts.append(Prompt("", [], params))
        else:
            prompts.append(_prompt(text, messages, params, parts))
    return prompts


def about_prompt(prompt: Prompt, parts: Parts) -> str:
    """Return what a request for ``prompt_only`` is answered with."""
    text = parts.tokenizer.decode(prompt.ids)
    about: dict[str, Any] = {
        "ids": prompt.ids,
        "text": text,
        "context_length": parts.generator.context_length,
    }
    if not prompt.ids:
        about["chat_template"] = getattr(parts.tokenizer, "chat_template", None)
    return json.dumps(about, ensure_ascii=False)


def answer_limit(prompt: Prompt, context_length: int | None, default: int) -> int:
    """Return how many tokens the answer may have; refuse what the context cannot hold.

    What the prompt is, where that is all that is asked for, counts as one.
    """
    if prompt.params.prompt_only:
        return 1
    limit = _limit(prompt, context_length, default)
    if prompt.params.min_tokens > limit:
        raise RequestError(
            f"min_tokens {prompt.params.min_tokens} is over max_tokens {limit}: lower it"
        )
    return limit


def _limit(prompt: Prompt, context_length: int | None, default: int) -> int:
    wanted, used = prompt.params.max_tokens, len(prompt.ids)
    if context_length is None:
        return wanted or default
    limit = context_length - used
    if limit < 1:
        raise RequestError(
            f"the prompt has {used} tokens and the model's context {context_length}: shorten the "
            f"prompt to at most {context_length - 1} tokens"
        )
    if wanted is not None and wanted > limit:
        raise RequestError(
            f"max_tokens {wanted} and the prompt's {used} tokens are over the model's context of "
            f"{context_length}: ask for at most {limit}"
        )
    return wanted if wanted is not None else min(default, limit)


def _prompt(text: str, messages: Any, params: Params, parts: Parts) -> Prompt:
    tokenizer = parts.tokenizer
    _refuse_long(text or f"{messages or ''}{params.chat_template_kwargs or ''}", parts)
    if params.input_ids:
        ids = _checked(params.input_ids, tokenizer)
        text = tokenizer.decode(ids)
    elif messages:
        kwargs = params.chat_template_kwargs
        if "messages" in kwargs or "self" in kwargs:
            raise RequestError("chat_template_kwargs cannot have messages, or self")
        # Only a tokenizer that declares options for its template is given some.
        encode_chat: Any = tokenizer.encode_chat
        ids = encode_chat(_messages(messages), **kwargs)
    elif not text and params.prompt_only:
        return Prompt("", [], params)
    elif not text:
        raise RequestError("text_input is empty: send at least one character")
    elif parts.defaults.get("chat"):
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
    else:
        ids = tokenizer.encode(text)
    if not ids:
        raise RequestError("text_input has no tokens: send at least one character")
    return Prompt(text, ids, params)


def _refuse_long(text: str, parts: Parts) -> None:
    """Refuse what the context cannot hold before all of it is made into tokens.

    That takes a second a megabyte, and every other request of the model waits for it.
    """
    context = getattr(parts.generator, "context_length", None)
    if not context or len(text) <= _SELDOM_MORE * context:
        return
    beginning = text[: _SELDOM_MORE * context]
    if len(text) > _NEVER_MORE * context or len(parts.tokenizer.encode(beginning)) > context:
        raise RequestError(
            f"the prompt has {len(text)} characters, which are over the model's context of "
            f"{context} tokens: shorten the prompt to at most {context - 1} tokens"
        )


def _checked(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Refuse ids that are no tokens: what a model makes of one could end its process."""
    size = getattr(tokenizer, "vocab_size", None)
    if size is None:
        raise RequestError("input_ids: this model's tokenizer takes none, so send text_input")
    if max(ids) >= size:
        raise RequestError(f"input_ids: {max(ids)} is no token, they go from 0 to {size - 1}")
    return list(ids)


def _parameters(raw: Any, parts: Parts) -> dict[str, Any]:
    try:
        given: Mapping[str, Any] = json.loads(raw.parameters() or "{}")
    except (ValueError, RecursionError) as error:
        # Python refuses whole numbers of thousands of digits, and what is not UTF-8.
        raise RequestError(f"the parameters cannot be read: {error}") from None
    values: dict[str, Any] = {}
    for name, value in given.items():
        ours = ALIASES.get(name, name)
        known = ours in READERS or name in parts.extras
        if known and name not in parts.inputs and ours not in parts.inputs:
            raise RequestError(f"this model does not take {name}")
        values[ours] = value
    return values


def _of_row(name: str, tensor: Any, row: int, count: int, batched: bool) -> Any:
    """Return a row's own value: a scalar, or a list; one value stands for all rows."""
    if name in _LISTS:
        given = (tensor[row] if batched else tensor).reshape(-1)
        return given.tolist() if name == "input_ids" else [_text(word, name) for word in given]
    flat = tensor.reshape(-1)
    if not flat.size:
        raise RequestError(f"{name} is empty: leave it out or send a value")
    value = flat[row] if flat.size == count else flat[0]
    return _text(value, name) if isinstance(value, bytes) else value.item()


def _text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return check_text(name, value)
    try:
        return str(bytes(value).decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise RequestError(
            f"{name} is not UTF-8: byte 0x{byte:02x} at position {error.start}"
        ) from None


def _messages(given: Any) -> list[dict[str, Any]]:
    try:
        messages = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise RequestError(f"messages is not JSON: {error}") from None
    if not messages or not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise RequestError('messages takes a JSON list of {"role": …, "content": …}')
    check_text("messages", json.dumps(messages, ensure_ascii=False))
    return messages


def _is_message(given: Any) -> bool:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        return False
    calls = given.get("tool_calls", [])
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        return False
    # Beside its calls an assistant may say nothing.
    return isinstance(given.get("content"), str) or bool(calls and given.get("content", 0) is None)


def _is_call(given: Any) -> bool:
    function = given.get("function") if isinstance(given, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), dict)
    )
