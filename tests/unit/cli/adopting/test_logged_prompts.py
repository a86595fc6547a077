"""Prompts are taken out of what an old server was asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmserve.errors import UsageError
from llmserve_cli.adopting.logged_prompts import read_logged_prompts


def written(folder: Path, *lines: object) -> Path:
    path = folder / "requests.jsonl"
    texts = (each if isinstance(each, str) else json.dumps(each) for each in lines)
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    "line",
    [
        CHAT,
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
        {"id": "chatcmpl-1", "kwargs": {"proxy_server_request": {"body": CHAT}}},
        {"request": CHAT, "response": {"choices": []}},
    ],
)
def test_a_body_is_found_where_a_log_has_it(tmp_path: Path, line: object) -> None:
    found = read_logged_prompts(written(tmp_path, line))
    assert found is not None
    assert (found.prompts[0].text, found.chat) == ("Hi", True)
    assert found.prompts[0].before == (("system", "Be brief."),)
    assert found.left_out == ()


SAID = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": [{"type": "text", "text": "Why?\u2028So."}]},
]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}


@pytest.mark.parametrize(
    ("body", "before", "left_out"),
    [
        ({"messages": SAID}, ("user", "assistant"), ()),
        # The answer that was given is in some logs, and is not asked.
        ({"messages": [*SAID, {"role": "assistant", "content": "So."}]}, ("user", "assistant"), ()),
        ({"messages": SAID, "system": "Be brief."}, ("system", "user", "assistant"), ()),
        (
            {"messages": SAID, "system": [{"type": "text", "text": "Be brief."}]},
            ("system", "user", "assistant"),
            (),
        ),
        (
            {"messages": [CALL, {"role": "tool", "content": "1"}, *SAID]},
            (),
            ("what stood before the last message of 1 chats",),
        ),
    ],
)
def test_a_chat_of_several_turns_is_asked_whole(
    tmp_path: Path, body: dict[str, object], before: tuple[str, ...], left_out: tuple[str, ...]
) -> None:
    path = tmp_path / "requests.jsonl"
    # As logs are written that do not escape what is no ASCII.
    path.write_text(json.dumps(body, ensure_ascii=False) + "\n", encoding="utf-8")
    found = read_logged_prompts(path)
    assert found is not None
    (prompt,) = found.prompts
    assert prompt.text == "Why?\u2028So."
    assert tuple(role for role, _ in prompt.before) == before
    assert found.left_out == left_out
    found.write(tmp_path / "prompts.jsonl")
    (line,) = (tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    written = json.loads(line)
    assert written["prompt"] == prompt.text
    roles = [each["role"] for each in written.get("messages", ())]
    assert roles == ([*before, "user"] if before else [])


def test_the_parts_of_a_message_are_put_together_and_each_prompt_is_asked_once(
    tmp_path: Path,
) -> None:
    parts = [{"type": "text", "text": "Hello, "}, {"type": "image_url"}, {"text": "you"}]
    line = {"messages": [{"role": "user", "content": parts}]}
    found = read_logged_prompts(written(tmp_path, line, line))
    assert found is not None
    assert [each.text for each in found.prompts] == ["Hello, you"]


def test_prompts_of_completions_may_be_several_and_have_lines(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": ["one\ntwo", "three"]}, CHAT, {"prompt": [[1, 2]]}, "{ no")
    found = read_logged_prompts(path)
    assert found is not None
    assert ([each.text for each in found.prompts], found.chat) == (["one\ntwo", "three"], False)
    assert found.left_out[0] == "1 of chats, since most are of the other kind"
    found.write(tmp_path / "prompts.jsonl")
    lines = (tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["one\ntwo", "three"]


def test_a_log_of_vllm_is_read_as_python_wrote_it(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "INFO 06-01 api_server.py:1] Started server process",
        'INFO 06-01 [logger.py:39] Received request cmpl-1: prompt: "It\'s\\nso", params: …',
        "DEBUG Request cmpl-2 details: prompt: 'Hello', prompt_token_ids: None",
        "DEBUG Request cmpl-3 details: prompt: '\\x', prompt_token_ids: None",
    )
    found = read_logged_prompts(path)
    assert found is not None
    assert ([each.text for each in found.prompts], found.chat) == (["It's\nso", "Hello"], False)


def test_a_plain_file_stays_as_it_is(tmp_path: Path) -> None:
    assert read_logged_prompts(written(tmp_path, "Once upon a time", "{ is a bracket")) is None


def test_a_file_without_a_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no prompt in it"):
        read_logged_prompts(written(tmp_path, {"model": "a", "input": "b"}))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        read_logged_prompts(tmp_path / "bytes")
