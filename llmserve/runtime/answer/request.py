"""Reads a Triton request into prompts; a tensor takes precedence over a parameter of its name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from llmserve.contract.bounded_json import parse_json
from llmserve.contract.options import (
    ALIASES,
    DEFAULT_LENGTH,
    EXTRA_FILES,
    FORMS,
    LOGPROBS_OF,
    OPTIONS,
    SUFFIX,
)
from llmserve.contract.tasks import TOKENS
from llmserve.runtime.answer import reading
from llmserve.runtime.answer.fill_in import File, FillIn
from llmserve.runtime.answer.next_tokens import tokens_after
from llmserve.runtime.answer.params import READERS, Params, check_text, read_params
from llmserve.runtime.errors import RequestError, invalid_value, panics_as_errors
from llmserve.runtime.protocols import Parts, Tokenizer

_MAX_PROMPTS = 256
_LISTS = frozenset(row.name for row in OPTIONS.values() if row.is_list)
_IMAGE = {"type": "image"}
_NO_INPUT = frozenset(row.name for row in OPTIONS.values() if not row.inputs)


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request and its parameters."""

    text: str
    ids: list[int]
    params: Params
    segments: list[int] | None = None
    images: Any = None
    """What the generator has made of its images."""
    ends: frozenset[int] = frozenset()
    """Tokens that end this answer besides the model's own."""
    scored: tuple[int, ...] = ()
    """The tokens whose log-probabilities it wants instead of the likeliest."""


@panics_as_errors()
def read_prompts(
    raw: Any,
    parts: Parts,
    *,
    empty: bool = False,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> list[Prompt]:
    """Read every prompt of a request; raise ``RequestError`` if the request is invalid.

    If ``empty``, as in the later steps of a sequence, empty prompts are allowed and have no ids.
    ``renamed`` maps the model's tensor names to those of the contract.
    """
    # Other tensors are control tensors of the sequence batcher, which no user has sent.
    named = ((renamed.get(tensor.name(), tensor.name()), tensor) for tensor in raw.inputs())
    tensors = {name: tensor.as_numpy() for name, tensor in named if name in parts.inputs}
    shared = _parameters(raw, parts)
    texts, chats = tensors.pop("text_input", None), tensors.pop("messages", None)
    pairs = tensors.pop("text_pair", None)
    chat = shared.pop("messages", None)
    source = chats if chats is not None else texts
    if source is None:
        source = tensors.get("input_ids") if parts.batched else None
    count = 1 if source is None else (source.shape[0] if source.ndim else 1)
    if not 1 <= count <= _MAX_PROMPTS:
        raise RequestError(f"a request takes 1 to {_MAX_PROMPTS} prompts, not {count}")
    if texts is not None and chats is not None and texts.size != chats.size:
        problem = f"{texts.size} text_input and {chats.size} messages: send only one"
        raise RequestError(problem, code="conflicting_options")
    prompts = []
    for row in range(count):
        values = dict(shared)
        for name, tensor in tensors.items():
            values[ALIASES.get(name, name)] = _row_value(name, tensor, row, count, parts.batched)
        params = read_params(values, extras=parts.extras)
        text = "" if texts is None else _text(texts.reshape(-1)[row], "text_input")
        messages = chat if chats is None else _text(chats.reshape(-1)[row], "messages")
        if parts.answers != TOKENS:
            pair = None if pairs is None else _text(pairs.reshape(-1)[row], "text_pair")
            prompts.append(_value_prompt(text, pair, params, parts))
        elif empty and params.suffix is None and not (text or messages or params.input_ids):
            prompts.append(Prompt("", [], params))
        else:
            prompts.append(_scored(_prompt(text, messages, params, parts), parts.tokenizer))
    return prompts


def about_prompt(prompt: Prompt, parts: Parts) -> str:
    """Return the answer to a request with ``prompt_only``."""
    context = parts.generator.context_length
    about: dict[str, Any] = {
        "ids": prompt.ids,
        "text": parts.tokenizer.decode(prompt.ids),
        "context_length": context,
        # In characters; a longer prompt is refused without looking at it.
        "longest_prompt": context and reading.NEVER_MORE * context,
    }
    if not prompt.ids:
        about["chat_template"] = getattr(parts.tokenizer, "chat_template", None)
        # In the order of the model's classes, if its answers are such.
        about["labels"] = getattr(parts.formatter, "labels", None)
        about["prompts"] = [*getattr(parts.tokenizer, "prompts", ())]
        about["special_tokens"] = getattr(parts.tokenizer, "special_tokens", None)
        fill_in: FillIn | None = getattr(parts.tokenizer, "fill_in", None)
        about["fill_in"] = fill_in and fill_in.family.name
        about["built"] = parts.built
        about["adapters"] = [*getattr(parts.generator, "adapters", ())]
        about_images = getattr(parts.generator, "about_images", None)
        about["images"] = about_images and about_images()
    return json.dumps(about, ensure_ascii=False)


def answer_limit(prompt: Prompt, context_length: int | None, default: int) -> int:
    """Return how many tokens the answer may have; refuse a request that exceeds the context.

    ``default`` applies to a request without ``max_tokens``. If it is 0, such an answer has at most
    ``DEFAULT_LENGTH`` tokens, or what is left of the context if the request has ``fill_context``.
    With ``prompt_only``, the limit is 1.
    """
    if prompt.params.prompt_only:
        return 1
    limit = _limit(prompt, context_length, default)
    if prompt.params.min_tokens > limit:
        raise invalid_value(
            "min_tokens", f"{prompt.params.min_tokens} is over max_tokens {limit}: lower it"
        )
    return limit


def _limit(prompt: Prompt, context_length: int | None, default: int) -> int:
    max_tokens, used = prompt.params.max_tokens, len(prompt.ids)
    if context_length is None:
        return max_tokens or default or DEFAULT_LENGTH
    limit = context_length - used
    if limit < 1:
        raise RequestError(
            f"the prompt has {used} tokens and the model's context {context_length}: shorten the "
            f"prompt to at most {context_length - 1} tokens",
            code="context_length_exceeded",
            context=context_length,
            prompt_tokens=used,
        )
    if max_tokens is not None and max_tokens > limit:
        raise RequestError(
            f"max_tokens {max_tokens} and the prompt's {used} tokens are over the model's context "
            f"of {context_length}: ask for at most {limit}",
            code="context_length_exceeded",
            param="max_tokens",
            context=context_length,
            prompt_tokens=used,
            max_tokens=max_tokens,
        )
    if max_tokens is not None:
        return max_tokens
    if not default and prompt.params.fill_context:
        return limit
    return min(default or DEFAULT_LENGTH, limit)


def _prompt(text: str, messages: Any, params: Params, parts: Parts) -> Prompt:
    tokenizer = parts.tokenizer
    if params.suffix is not None:
        return _gap(text, params.suffix, params, parts, has_messages=bool(messages))
    _refuse_long(text or f"{messages or ''}{params.chat_template_kwargs or ''}", parts)
    if params.image_url and (params.input_ids or not messages):
        raise invalid_value("image_url", "needs messages that show the images")
    if params.input_ids:
        ids = _checked_ids(params.input_ids, tokenizer)
        text = tokenizer.decode(ids)
    elif messages:
        kwargs = params.chat_template_kwargs
        if "messages" in kwargs or "self" in kwargs:
            raise invalid_value("chat_template_kwargs", "cannot contain messages or self")
        read = _messages(messages, params.image_url)
        # Only some generators have this method. Others find the images in the parameters.
        read_images = getattr(parts.generator, "read_images", None)
        if params.image_url and read_images:
            seeing: Any = tokenizer
            seen = read_images(seeing.render_chat(read, **kwargs), params.image_url)
            params = _with_adapter(params, seen.adapter)
            return Prompt(text, [*seen.ids], params, images=seen.images)
        # Only a tokenizer that declares template options gets any.
        encode_chat: Any = tokenizer.encode_chat
        ids = encode_chat(read, **kwargs)
    elif not text and params.prompt_only:
        return Prompt("", [], params)
    elif not text:
        raise _empty("text_input is empty")
    elif parts.defaults.get("chat"):
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
    else:
        ids = tokenizer.encode(text)
    if not ids:
        raise _empty("text_input has no tokens")
    return Prompt(text, ids, params)


def _with_adapter(params: Params, adapter: str) -> Params:
    """Return the parameters of a request that is answered with an adapter, if with any."""
    if not adapter or params.adapter == adapter:
        return params
    if params.adapter:
        raise invalid_value("adapter", f"cannot be another than {adapter} beside images")
    return replace(params, adapter=adapter)


def _scored(prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
    """Return a prompt with the tokens whose log-probabilities it wants, if it names any."""
    params = prompt.params
    if not params.logprobs_of:
        return prompt
    if params.logprobs is None:
        raise invalid_value(LOGPROBS_OF, "needs logprobs")
    tokens = tokens_after(prompt.ids, params.logprobs_of, tokenizer)
    return replace(prompt, scored=tokens)


def _gap(before: str, after: str, params: Params, parts: Parts, *, has_messages: bool) -> Prompt:
    """Read a prompt with a gap between two texts, which the answer fills in."""
    tokenizer: Any = parts.tokenizer
    fill_in: FillIn | None = getattr(tokenizer, "fill_in", None)
    if fill_in is None:
        problem = "suffix: this model fills in no gap, because its tokenizer has no tokens for that"
        raise RequestError(problem, code="unsupported_option", param=SUFFIX)
    if has_messages or params.input_ids or params.image_url:
        other = "messages" if has_messages else "input_ids" if params.input_ids else "image_url"
        problem = f"suffix is for a prompt of text: leave out {other}"
        raise RequestError(problem, code="conflicting_options", param=SUFFIX)
    form = next((row.name for row in FORMS if getattr(params, row.name)), "")
    if form:
        # Its end is that of whole answers, and a gap's is another.
        problem = f"suffix: what fills a gap cannot be constrained, leave out {form}"
        raise RequestError(problem, code="conflicting_options", param=SUFFIX)
    files = _files(params.extra_files)
    _refuse_long("".join((*(file.name + file.text for file in files), before, after)), parts)
    ids = tokenizer.encode_fill_in(before, after, files)
    return Prompt(before, ids, params, ends=fill_in.ends)


def _files(value: str | None) -> list[File]:
    try:
        items = parse_json(value) if value else []
    except (ValueError, RecursionError) as error:
        raise invalid_value(EXTRA_FILES, f"cannot be read as JSON: {error}") from None
    if not isinstance(items, list) or not all(map(_is_file, items)):
        raise invalid_value(EXTRA_FILES, 'takes a JSON list of {"filename": …, "text": …}')
    check_text(EXTRA_FILES, json.dumps(items, ensure_ascii=False))
    return [File(item.get("filename", "tmp"), item["text"]) for item in items]


def _is_file(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        return False
    return isinstance(value.get("filename", ""), str)


def _value_prompt(text: str, pair: str | None, params: Params, parts: Parts) -> Prompt:
    """Read a prompt of a model that answers with values: it has no messages and no template."""
    if params.suffix is not None:
        problem = "suffix: this model answers with values, and fills in no gap"
        raise RequestError(problem, code="unsupported_option", param=SUFFIX)
    if params.input_ids:
        for name, value in (("text_pair", pair), ("prompt_name", params.prompt_name)):
            # Where pairs are usual, Triton asks for an empty one.
            if value:
                raise invalid_value(name, "cannot be put beside input_ids: send text_input")
        ids = _checked_ids(params.input_ids, parts.tokenizer)
        return Prompt(text, reading.whole_ids(ids, params, parts.generator.context_length), params)
    if not text and params.prompt_only:
        return Prompt("", [], params)
    if not text:
        raise _empty("text_input is empty")
    ids, segments = reading.encode(text, pair, params, parts)
    if not ids:
        raise _empty("text_input has no tokens")
    return Prompt(text, ids, params, segments)


def _empty(problem: str) -> RequestError:
    problem += ": send at least one character"
    return RequestError(problem, code="empty_prompt", param="text_input")


def _refuse_long(text: str, parts: Parts) -> None:
    """Refuse a prompt that exceeds the context without tokenizing all of it.

    Tokenizing takes a second per megabyte, and every other request of the model waits meanwhile.
    """
    context = getattr(parts.generator, "context_length", None)
    if not context or len(text) <= reading.RARELY_MORE * context:
        return
    beginning = text[: reading.RARELY_MORE * context]
    if len(text) > reading.NEVER_MORE * context or len(parts.tokenizer.encode(beginning)) > context:
        raise RequestError(
            f"the prompt has {len(text)} characters, which are over the model's context of "
            f"{context} tokens: shorten the prompt to at most {context - 1} tokens",
            code="context_length_exceeded",
            context=context,
        )


def _checked_ids(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Refuse ids that are not tokens, which could crash the model's process."""
    size = getattr(tokenizer, "vocab_size", None)
    if size is None:
        problem = "input_ids: this model does not accept token ids, send text_input"
        raise RequestError(problem, code="unsupported_option", param="input_ids")
    if max(ids) >= size:
        problem = f"input_ids: {max(ids)} is not a token, send ids from 0 to {size - 1}"
        raise RequestError(problem, code="invalid_value", param="input_ids")
    return list(ids)


def _parameters(raw: Any, parts: Parts) -> dict[str, Any]:
    try:
        parameters: Mapping[str, Any] = parse_json(raw.parameters() or "{}")
    except (ValueError, RecursionError) as error:
        # Python refuses integers with thousands of digits, and text that is not UTF-8.
        raise RequestError(f"the parameters cannot be read: {error}") from None
    values: dict[str, Any] = {}
    for name, value in parameters.items():
        canonical = ALIASES.get(name, name)
        readable = canonical in READERS or name in parts.extras
        is_input = name in parts.inputs or canonical in parts.inputs
        if readable and not is_input and name not in _NO_INPUT:
            problem = f"this model does not take {name}"
            raise RequestError(problem, code="unsupported_option", param=name)
        values[canonical] = value
    return values


def _row_value(name: str, tensor: Any, row: int, count: int, batched: bool) -> Any:
    """Return a row's value, a scalar or a list; a single value applies to all rows."""
    if name in _LISTS:
        items = (tensor[row] if batched else tensor).reshape(-1)
        is_text = OPTIONS[name].kind == "words"
        return [_text(word, name) for word in items] if is_text else items.tolist()
    flat = tensor.reshape(-1)
    if not flat.size:
        raise invalid_value(name, "is empty: leave it out or send a value")
    value = flat[row] if flat.size == count else flat[0]
    return _text(value, name) if isinstance(value, bytes) else value.item()


def _text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return check_text(name, value)
    try:
        return str(bytes(value).decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        problem = f"is not UTF-8: byte 0x{byte:02x} at position {error.start}"
        raise invalid_value(name, problem) from None


def _messages(value: Any, images: Sequence[str]) -> list[dict[str, Any]]:
    try:
        messages = parse_json(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise invalid_value("messages", f"cannot be read as JSON: {error}") from None
    if not messages or not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise invalid_value("messages", 'takes a JSON list of {"role": …, "content": …}')
    check_text("messages", json.dumps(messages, ensure_ascii=False))
    messages = [{**message, "content": _content(message["content"])} for message in messages]
    contents = [message["content"] for message in messages]
    in_messages = sum(c.count(_IMAGE) for c in contents if isinstance(c, list))
    if in_messages != len(images):
        problem = f"has {len(images)} images, and the messages show {in_messages}"
        raise invalid_value("image_url", problem)
    return messages


def _content(value: Any) -> Any:
    """Return a content whose parts are all texts as one: many templates know no parts."""
    if not isinstance(value, list) or _IMAGE in value:
        return value
    return "".join(part["text"] for part in value)


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    calls = value.get("tool_calls", [])
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        return False
    content = value.get("content", 0)
    if isinstance(content, list):
        return bool(content) and all(map(_is_part, content))
    # Next to tool calls, an assistant's content may be null.
    return isinstance(content, str) or bool(calls and content is None)


def _is_part(value: Any) -> bool:
    """Return whether a value is a part of a message that shows images."""
    if value == _IMAGE:
        return True
    is_text = isinstance(value, dict) and value.get("type") == "text"
    return is_text and value.keys() == {"type", "text"} and isinstance(value["text"], str)


def _is_call(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), dict)
    )
