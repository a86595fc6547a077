"""Whether a chat reaches the model as its template writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from llmserve.plugin import Check
from llmserve_certify.endpoint import Ask, Refusal, Reply
from llmserve_certify.examination import Examination
from llmserve_certify.outcome import Broken, NotOffered, Undecided

Messages = Sequence[Mapping[str, Any]]
_USER = {"role": "user", "content": "What is the capital of Japan?"}
_SYSTEM = {"role": "system", "content": "You answer in one short sentence."}
_TURNS = (
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Hello Ada."},
    {"role": "user", "content": "What is my name?"},
)
_TOOL = (
    {"role": "user", "content": "How warm is it in Rome?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "31 degrees"},
)


def _once(exam: Examination) -> None:
    _compare(exam, [(_USER,), ({"role": "user", "content": "Hello"},)])


def _roles(exam: Examination) -> None:
    _compare(exam, [(_SYSTEM, _USER), _TURNS])


def _tools(exam: Examination) -> None:
    try:
        is_known = "weather" in exam.model.render(_TOOL)
    except ValueError:
        is_known = False
    if not is_known:
        # What a server then writes instead is its own choice.
        raise NotOffered("the model's template has no calls of tools")
    _compare(exam, [_TOOL])


def _compare(exam: Examination, chats: Sequence[Messages]) -> None:
    model = exam.model
    rendered = 0
    for messages in chats:
        try:
            text = model.render(messages)
        except ValueError as error:
            exam.note(f"the model's template does not take this chat: {str(error)[:80]}")
            continue
        rendered += 1
        ask = exam.chat(*messages)
        try:
            answer = exam.try_ask(ask)
        except Refusal as error:
            if error.is_orderly and rendered == 1 and len(messages) == 1:
                raise NotOffered(f"chats are refused: {error.words}") from None
            raise Broken(f"a chat is refused: {error.words}", got=error.words, ask=ask) from None
        _explain(exam, ask, answer, model.encode(text, special=False))
    if not rendered:
        raise NotOffered("the model's template takes no such chat")


def _explain(exam: Examination, ask: Ask, answer: Reply, right: list[int]) -> None:
    """Expect the right prompt; else say which wrong one explains the answer or its count."""
    model = exam.model
    fits = exam.is_explained(exam.walk(ask, answer, ids=right))
    count = answer.input_tokens
    if not answer.text and answer.finish_reason != "stop":
        # Such as that of a model whose reasoning a server sends in a field of its own.
        if count is None:
            raise Undecided("an answer to a chat has no text that could be compared")
        exam.note("an answer to a chat has no text: only the count of its tokens is compared")
    if fits and count in (None, len(right)):
        return
    for words, ids in _wrong_prompts(exam, ask, right):
        counted = count is not None and count == len(ids) != len(right)
        if counted or (not fits and exam.is_explained(exam.walk(ask, answer, ids=ids))):
            raise Broken(
                f"{words}: that explains the {'count' if counted else 'answer'}",
                expected=f"{len(right)} tokens: {model.render(ask.messages)!r}",
                got=f"{count} tokens, and the answer {answer.text!r}",
                ask=ask,
            )
    if count not in (None, len(right)):
        raise Broken(
            f"the chat has {count} tokens there and {len(right)} by the model's template",
            expected=f"{len(right)} tokens: {model.render(ask.messages)!r}",
            got=count,
            ask=ask,
        )
    exam.expect_model(ask, answer, f"in a chat of {len(ask.messages)} messages")


def _wrong_prompts(
    exam: Examination, ask: Ask, right: list[int]
) -> Iterator[tuple[str, list[int]]]:
    model = exam.model
    messages = ask.messages
    text = model.render(messages)
    if model.begin is not None:
        yield "the token that begins a prompt stands twice", [model.begin, *right]
        if right[:1] == [model.begin]:
            yield "the token that begins a prompt is left out", right[1:]
    # A chat that the template refuses, such as a lone answer of a tool, explains nothing.
    with suppress(ValueError):
        twice = model.render([{"role": "user", "content": text}])
        yield "the chat template is applied twice", model.encode(twice, special=False)
        yield "the chat template is applied twice", model.encode(twice)
    with suppress(ValueError):
        closed = model.render(messages, opened=False)
        yield "the words that open the answer are missing", model.encode(closed, special=False)
    plain = "\n".join(str(message["content"]) for message in messages)
    yield "the chat template is not applied", model.encode(plain)
    users = [message for message in messages if message["role"] != "system"]
    with suppress(ValueError):
        if 0 < len(users) < len(messages):
            yield "the system message is lost", model.encode(model.render(users), special=False)
    with suppress(ValueError):
        last = model.render(messages[-1:])
        yield "all but the last message are lost", model.encode(last, special=False)


CHECKS = (
    Check(
        name="chat-template",
        severity="critical",
        promise="the chat template is applied once, and no special token is doubled",
        meaning="the model reads a chat as it never saw one, and answers worse",
        run=_once,
        needs=("reference", "chat"),
        follows=("begin-token", "greedy-is-the-models"),
    ),
    Check(
        name="chat-roles",
        severity="critical",
        promise="system messages and earlier turns reach the model",
        meaning="instructions are ignored, or the conversation is forgotten",
        run=_roles,
        needs=("reference", "chat"),
        follows=("begin-token", "chat-template", "greedy-is-the-models"),
    ),
    Check(
        name="chat-tools",
        severity="major",
        promise="the results of tools reach the model",
        meaning="agents ask again for what they have",
        run=_tools,
        needs=("reference", "chat"),
        follows=("begin-token", "chat-template", "chat-roles", "greedy-is-the-models"),
        quick=False,
    ),
)
