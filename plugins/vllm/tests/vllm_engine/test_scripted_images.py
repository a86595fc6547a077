"""How images pass through vLLM's engine: a scripted one that makes four tokens of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmserve.runtime import RequestError, SeenPrompt
from llmserve.testing import ByteTokenizer, generation
from llmserve.testing.tiny_seeing import data_url, picture, save_seeing

from .scripted import LLMEngine, Renderer, scripted  # noqa: F401

CHAT = "user: <image>what?\nassistant:"
URL = data_url(picture(1))


@pytest.fixture
def generator(scripted: type[LLMEngine], tmp_path: Path) -> Any:  # noqa: F811
    del scripted
    from llmserve_vllm.generator import VllmGenerator

    save_seeing("llava", tmp_path / "model")
    limits = {"images": 2, "megabytes": 1, "megapixels": 1}
    settings = {
        "path": "model", "dtype": "float32", "device": "auto", "engine_args": {},
        "image_limits": limits,
    }  # fmt: skip
    return VllmGenerator(settings, tmp_path)


def engine() -> LLMEngine:
    return LLMEngine.made[-1]


def test_a_model_that_sees_is_loaded_for_as_many_images_as_its_build_says(generator: Any) -> None:
    arguments = engine().vllm_config.arguments
    assert arguments["limit_mm_per_prompt"] == {"image": 2}
    assert arguments["mm_processor_cache_gb"] == 0


def test_images_are_decoded_here_and_made_into_tokens_by_vllm(generator: Any) -> None:
    seen: SeenPrompt = generator.read_images(CHAT, [URL])
    assert seen.ids.count(Renderer.MARK) == 4
    (image,) = seen.images["mm_kwargs"]["image"]
    assert (image.size, image.tobytes()) == (picture(1).size, picture(1).tobytes())


def test_a_request_has_its_images_also_when_it_goes_on_in_another_engine(generator: Any) -> None:
    seen: SeenPrompt = generator.read_images(CHAT, [URL])
    asked = generation([*seen.ids], 6, eos=frozenset({0}))
    asked.images = seen.images
    stepper = generator.stepper(ByteTokenizer())
    stepper.admit(asked)
    for _ in range(2):
        stepper.step()
    assert asked.token_ids == seen.ids[:2]
    stepper.drop(asked)
    stepper.admit(asked)
    (request,) = engine().requests.values()
    assert request.prompt == [*seen.ids, *seen.ids[:2]]
    assert request.seen == seen.images["mm_kwargs"]["image"]
    stepper.admit(generation([1, 2], 6, eos=frozenset({0})))
    assert [len(each.seen) for each in engine().requests.values()] == [1, 0]


@pytest.mark.parametrize(
    ("text", "urls", "expected"),
    [
        (CHAT, [URL] * 2, "the prompt has 1 times <image>"),
        (CHAT.replace("what", "<image>"), [URL], "the prompt has 2 times <image>"),
        (CHAT * 3, [URL] * 3, "3 images are more than the 2"),
        (CHAT, [data_url(picture(1, 1200, 1000))], "image 1 "),
        (CHAT, ["data:image/png;base64,AAAA"], "image 1 "),
        (CHAT, ["https://example.com/a.png"], "image 1 is an address"),
    ],
)
def test_what_is_no_image_or_has_no_place_is_refused_before_vllm_gets_it(
    generator: Any, text: str, urls: list[str], expected: str
) -> None:
    with pytest.raises(RequestError, match=expected) as refused:
        generator.read_images(text, urls)
    assert refused.value.code in ("invalid_value", "image_not_read")
    assert not engine().requests


def test_what_vllm_refuses_is_said_in_one_line(generator: Any) -> None:
    with pytest.raises(RequestError, match=r"^vLLM refuses these images: no place for an image$"):
        generator._model.seen([1, 2], [picture(1)])
