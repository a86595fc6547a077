"""Conversations with tools, in the forms that different chat templates accept."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from llmserve.demo import demo_model_path
from llmserve.runtime.errors import RequestError
from llmserve.runtime.torch.hf_tokenizer import TransformersTokenizer

CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Zürich"}}}
CONVERSATION: Any = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "warm", "tool_call_id": "a"},
]
# How Qwen, Qwen 3, DeepSeek V3.1 and a template without tool calls render an assistant's turn.
RENDERED = {
    "{{ m.content }}{{ c.arguments|tojson }}": '{"city": "Zürich"}',
    "{{ m.content + '!' }}{{ c.arguments|tojson }}": '!{"city": "Zürich"}',
    "{{ '!' + c.arguments }}": '!{"city": "Zürich"}',
    "{{ m.content + '!' }}": "!",
    # How MiniMax M2 and LFM2 treat what is no text, and Kimi K2.
    "{% if m.content is not string %}None{% endif %}!": "!",
    "{% if m['content'] is none or m.content is not string %}None{% endif %}!": "None!",
}
TEMPLATE = """{% for m in messages %}{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}TURN
{%- else %}{{ m.content }};{% endif %}{% endfor %}{{ tools|length }}"""


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def make_tokenizer(template: str, *special: str) -> TransformersTokenizer:
        tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        return TransformersTokenizer({"path": "."}, tmp_path)

    return make_tokenizer


def test_a_text_on_which_the_tokenizer_gives_up_is_refused(make: Any, tmp_path: Path) -> None:
    make("{{ messages[0].content }}")
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    both = [split, content["pre_tokenizer"]]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}
    file.write_text(json.dumps(content), encoding="utf-8")
    tokenizer = TransformersTokenizer({"path": "."}, tmp_path)
    bomb = "a" * 50 + "!"
    chat = [{"role": "user", "content": bomb}]
    for encode in (partial(tokenizer.encode, bomb), partial(tokenizer.encode_chat, chat)):
        with pytest.raises(RequestError) as refused:
            encode()
        assert (refused.value.code, refused.value.param) == ("invalid_value", "text_input")
    assert tokenizer.decode(tokenizer.encode("a fine text")) == "a fine text"


@pytest.mark.parametrize("turn", RENDERED)
def test_a_template_gets_calls_in_the_form_that_it_accepts(make: Any, turn: str) -> None:
    tokenizer = make(TEMPLATE.replace("TURN", turn))
    assert tokenizer.chat_template
    ids = tokenizer.encode_chat(CONVERSATION, tools=[CALL])
    assert tokenizer.decode(ids) == f"Hi;{RENDERED[turn]}warm;1"


def test_a_template_that_accepts_no_form_refuses_the_messages(make: Any) -> None:
    tokenizer = make("{{ '' + messages }}")
    for options, message in (
        ({}, "refuses these messages: can only concatenate"),
        ({"tools": [1]}, "refuses these messages: Tools"),
        ({"chat_template": "{{ 1 }}"}, "cannot contain a chat_template"),
    ):
        with pytest.raises(RequestError, match=message):
            tokenizer.encode_chat(CONVERSATION, **options)


def test_tool_call_tokens_are_text_and_other_special_tokens_are_not(make: Any) -> None:
    tokenizer = make("", "[TOOL_CALLS]", "<|start_header_id|>")
    ids = tokenizer.encode("<|start_header_id|>a[TOOL_CALLS] b<|endoftext|>")
    assert tokenizer.decode(ids) == "a[TOOL_CALLS] b"
