"""Reading a request's tensors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from llmserve.runtime.answer.request import Prompt, read_prompts
from llmserve.runtime.contract import TYPES
from llmserve.runtime.errors import RequestError
from llmserve.testing import ByteTokenizer, FakeRequest, make_parts

INTEGERS = [kind for kind in TYPES.values() if "int" in kind]
# Every option that takes a whole number.
OPTIONS = ("max_tokens", "min_tokens", "top_k", "seed", "end_id", "logprobs", "prompt_logprobs")


class Generator:
    """Reading a request needs its limits only."""

    context_length = 64
    eos_ids: frozenset[int] = frozenset()

    def generate(self, generations: Any, tokenizer: Any) -> None:
        """Nothing is generated here."""


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("kind", INTEGERS)
def test_a_whole_number_is_read_from_any_integer_type(kind: str, batched: bool) -> None:
    shape = (1, 1) if batched else (1,)
    tensors = {name: np.full(shape, 3, kind) for name in OPTIONS}
    tensors["input_ids"] = np.full((*shape[:-1], 4), 65, kind)
    raw = FakeRequest({"text_input": np.full(shape, b"abc", np.object_), **tensors})
    parts = make_parts(Generator(), inputs=[*OPTIONS, "input_ids"], batched=batched)
    (prompt,) = read_prompts(raw, parts)
    assert [getattr(prompt.params, name) for name in OPTIONS] == [3] * len(OPTIONS)
    assert prompt.params.input_ids == (65, 65, 65, 65)


def test_the_largest_number_of_a_type_is_not_wrapped() -> None:
    parts = make_parts(Generator(), inputs=["max_tokens", "seed"])
    largest = np.array([[2**64 - 1]], np.uint64)
    (prompt,) = read_prompts(FakeRequest({"text_input": ["abc"], "seed": largest}), parts)
    assert prompt.params.seed == 2**64 - 1
    with pytest.raises(RequestError, match=f"max_tokens must be .* not {2**64 - 1}"):
        read_prompts(FakeRequest({"text_input": ["abc"], "max_tokens": largest}), parts)


class ChatTokenizer(ByteTokenizer):
    """Records the conversations that it encodes."""

    def __init__(self) -> None:
        super().__init__()
        self.chats: list[Any] = []

    def encode_chat(self, messages: Any, **options: Any) -> list[int]:
        self.chats.append(messages)
        return [65]


IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "This?"}


def read_chat(content: Any, images: list[str], inputs: tuple[str, ...]) -> tuple[Prompt, Any]:
    tokenizer = ChatTokenizer()
    parts = make_parts(Generator(), tokenizer=tokenizer, inputs=[*inputs, "messages"])
    messages = json.dumps([{"role": "user", "content": content}])
    rows = np.array([[image.encode() for image in images]], np.object_)
    tensors = {"image_url": rows} if images else {}
    (prompt,) = read_prompts(FakeRequest({"messages": [messages], **tensors}), parts)
    return prompt, tokenizer.chats[0][0]["content"]


def test_a_model_with_an_input_for_images_gets_them_and_the_messages_that_show_them() -> None:
    images = ["data:image/png;base64," + "A" * 5000, "data:image/png;base64,BBBB"]
    content = [IMAGE, TEXT, IMAGE]
    prompt, passed = read_chat(content, images, ("image_url",))
    assert (list(prompt.params.image_url), passed) == (images, content)


@pytest.mark.parametrize("inputs", [(), ("image_url",)])
def test_parts_that_are_all_texts_are_one_text(inputs: tuple[str, ...]) -> None:
    assert read_chat([TEXT, TEXT], [], inputs)[1] == "This?This?"


@pytest.mark.parametrize(
    ("content", "images", "param"),
    [
        ([IMAGE, TEXT], [], "image_url"),
        ([TEXT], ["data:,"], "image_url"),
        ([{"type": "video"}], [], "messages"),
        ([{"type": "text"}], [], "messages"),
        ([], [], "messages"),
        (["a"], [], "messages"),
    ],
)
def test_messages_and_images_that_do_not_agree_are_refused(
    content: Any, images: list[str], param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        read_chat(content, images, ("image_url",))
    assert (refused.value.code, refused.value.param) == ("invalid_value", param)
