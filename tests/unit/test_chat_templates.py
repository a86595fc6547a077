"""Conversations with tools, as chat templates that differ take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from llmserve.demo import demo_model_path
from llmserve.runtime.errors import RequestError
from llmserve.runtime.hf_tokenizer import TransformersTokenizer

CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Zürich"}}}
TALK: Any = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "warm", "tool_call_id": "a"},
]
# How Qwen, Qwen 3, DeepSeek V3.1 and one that knows no calls write what an assistant did.
WRITES = {
    "{{ m.content }}{{ c.arguments|tojson }}": '{"city": "Zürich"}',
    "{{ m.content + '!' }}{{ c.arguments|tojson }}": '!{"city": "Zürich"}',
    "{{ '!' + c.arguments }}": '!{"city": "Zürich"}',
    "{{ m.content + '!' }}": "!",
}
ROUND = """{% for m in messages %}{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}WRITE
{%- else %}{{ m.content }};{% endif %}{% endfor %}{{ tools|length }}"""


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def made(template: str, *special: str) -> TransformersTokenizer:
        tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        return TransformersTokenizer({"path": "."}, tmp_path)

    return made


@pytest.mark.parametrize("write", WRITES)
def test_calls_go_to_a_template_in_the_form_that_it_takes(make: Any, write: str) -> None:
    tokenizer = make(ROUND.replace("WRITE", write))
    assert tokenizer.chat_template
    ids = tokenizer.encode_chat(TALK, tools=[CALL])
    assert tokenizer.decode(ids) == f"Hi;{WRITES[write]}warm;1"


def test_what_no_form_mends_is_the_templates_refusal(make: Any) -> None:
    tokenizer = make("{{ '' + messages }}")
    for options, why in (
        ({}, "refuses these messages: can only concatenate"),
        ({"tools": [1]}, "refuses these messages: Tools"),
        ({"chat_template": "{{ 1 }}"}, "of its own"),
    ):
        with pytest.raises(RequestError, match=why):
            tokenizer.encode_chat(TALK, **options)


def test_marks_of_calls_are_text_and_other_special_tokens_are_not(make: Any) -> None:
    tokenizer = make("", "[TOOL_CALLS]", "<|start_header_id|>")
    ids = tokenizer.encode("<|start_header_id|>a[TOOL_CALLS] b<|endoftext|>")
    assert tokenizer.decode(ids) == "a[TOOL_CALLS] b"
