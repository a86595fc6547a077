"""Models that read images answer as their own ``generate()``, alone and beside texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import llmserve
from llmserve.errors import ModelSourceError, OptionError
from llmserve.runtime import BatchDriver, ImageProcessor, RequestError, TransformersTokenizer
from llmserve.testing import ByteTokenizer, FakeRequest, generation, make_parts, read_config
from llmserve.testing.tiny_adapters import merged, save_adapter
from llmserve.testing.tiny_seeing import FAMILIES, Seeing, data_url, picture, save_seeing
from llmserve_hf.generator import TransformersGenerator

LENGTH = 10
SIZES = ((24, 16), (16, 40), (33, 33), (20, 9))


@dataclass(frozen=True)
class Built:
    """A model as it was saved, and as a build has it."""

    source: Path
    result: Any

    @property
    def folder(self) -> Path:
        return Path(self.result.folder, "1")

    def settings(self, role: str) -> Any:
        return self.result.manifest.components[role]["settings"]


@pytest.fixture(scope="module", params=FAMILIES)
def built(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp(request.param)
    source = save_seeing(request.param, folder / "source")
    return Built(source, llmserve.build("hf", str(source), output=folder / "repo", name="seeing"))


@pytest.fixture(scope="module")
def driver(built: Built) -> BatchDriver:
    return started(built)


def started(built: Built) -> BatchDriver:
    generator = TransformersGenerator(built.settings("generator"), built.folder)
    tokenizer = TransformersTokenizer(built.settings("tokenizer"), built.folder)
    inputs = built.result.manifest.contract["inputs"]
    driver = BatchDriver({}, Path())
    driver.start(make_parts(generator, tokenizer=tokenizer, inputs=inputs))
    return driver


def conversation(count: int) -> tuple[list[Any], list[Image.Image]]:
    """Return messages that show so many images, first and between texts, and the images."""
    images = [picture(seed, *SIZES[seed]) for seed in range(count)]
    parts: list[Any] = [{"type": "text", "text": f"Look at {count}"}]
    for number in range(count):
        parts += [{"type": "image"}, {"type": "text", "text": f" and {number}"}]
    if count == 1:
        parts = parts[1:]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    return messages, images


def ask(count: int, **options: Any) -> FakeRequest:
    messages, images = conversation(count)
    given: dict[str, Any] = {"max_tokens": LENGTH, "ignore_eos": True, **options}
    if images:
        given["image_url"] = json.dumps([data_url(image) for image in images])
    return FakeRequest({"messages": [json.dumps(messages)]}, **given)


def expected(built: Built, count: int, adapter: Path | None = None) -> tuple[str, int]:
    """Return what transformers answers, and how many tokens its processor makes of the prompt."""
    processor, model = Seeing(built.source).processor, Seeing(built.source).load()
    if adapter:
        model = merged(model, adapter)
    messages, images = conversation(count)
    whole = [
        {**m, "content": [{"type": "text", "text": m["content"]}]}
        if isinstance(m["content"], str) else m
        for m in messages
    ]  # fmt: skip
    # One class of processors loads without its template.
    renders = processor if processor.chat_template else processor.tokenizer
    text = renders.apply_chat_template(whole, add_generation_prompt=True, tokenize=False)
    more = {"images": [images]} if images else {}
    inputs = processor(text=[text], **more, return_tensors="pt", add_special_tokens=False)
    prompt = inputs["input_ids"].shape[1]
    with torch.inference_mode():
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=LENGTH)
    tokenizer = transformers.AutoTokenizer.from_pretrained(built.source)
    return tokenizer.decode(ids[0, prompt:], skip_special_tokens=True), prompt


def input_tokens(request: FakeRequest) -> int:
    return int(request.responses[-1].tensors["num_input_tokens"].reshape(-1)[0])


def test_answers_and_counts_are_those_of_generate(built: Built, driver: BatchDriver) -> None:
    counts = (1, 0, 2, 3, 0, 4)
    together = [ask(count) for count in counts]
    driver.execute(together)
    assert [request.error for request in together] == [None] * len(counts)
    found = [(request.text, input_tokens(request)) for request in together]
    assert found == [expected(built, count) for count in counts]
    alone = ask(2)
    driver.execute([alone])
    assert alone.text == found[2][0]


def test_an_image_changes_the_answer_and_a_stream_has_the_same_one(driver: BatchDriver) -> None:
    whole, streamed = ask(1), ask(1, stream=True)
    driver.execute([whole, streamed])
    assert streamed.text == whole.text
    assert len(streamed.responses) > 3
    messages, _ = conversation(1)
    url = data_url(picture(99, *SIZES[0]))
    other = FakeRequest(
        {"messages": [json.dumps(messages)]}, image_url=url, max_tokens=LENGTH, ignore_eos=True
    )
    driver.execute([other])
    assert input_tokens(other) == input_tokens(whole)
    assert other.text != whole.text


def test_logprobs_of_a_prompt_with_an_image_are_those_of_the_model(
    built: Built, driver: BatchDriver
) -> None:
    request = ask(1, prompt_logprobs=0)
    driver.execute([request])
    assert request.error is None
    listed = json.loads(request.responses[-1].tensors["prompt_logprobs"].reshape(-1)[0])
    assert len(listed) == expected(built, 1)[1]


def test_a_request_that_cannot_be_read_fails_alone(driver: BatchDriver) -> None:
    messages, _ = conversation(1)
    cut = data_url(picture(0, 400, 300))[:1998]
    marked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<image>"}]}]

    def asked(content: Sequence[Any], url: str) -> FakeRequest:
        return FakeRequest({"messages": [json.dumps(content)]}, image_url=url, max_tokens=4)

    requests = [
        asked(messages, cut), asked(messages, "http://169.254.169.254/a.png"),
        asked(marked, data_url(picture(0))), ask(1),
    ]  # fmt: skip
    driver.execute(requests)
    assert [request.error for request in requests] == [
        "image 1 is cut off or damaged: send the whole file",
        "image 1 is an address, and none is opened: send it as data:image/png;base64,…",
        "the prompt has 2 times <image>, which stands for an image, and 1 images: leave it out of "
        "the texts of messages",
        None,
    ]


def test_more_than_the_context_holds_is_refused_by_its_count(driver: BatchDriver) -> None:
    request = ask(4, max_tokens=5000)
    driver.execute([request])
    assert request.failure is not None
    assert request.failure.code == "context_length_exceeded"
    assert "tokens are over the model's context of 512" in request.failure.words


def test_images_wait_for_those_that_take_the_memory(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until nobody has what was made of them, nor a part of it."""
    monkeypatch.setattr("llmserve.runtime.torch.image_processor._MOST_HELD", 1)
    settings = built.result.manifest.components["generator"]["settings"]
    processor = ImageProcessor(settings, Path(built.result.folder, "1"), context_length=None)
    urls = [data_url(picture(1)), data_url(picture(2))]
    first = processor.read("<image> <image>", urls)
    part = next(each for name, each in first.images.items() if name.endswith("pixel_values"))[:1]
    del first
    with pytest.raises(RequestError, match="take the memory for images") as refused:
        processor.read("<image> <image>", urls)
    assert refused.value.code == "image_not_read"
    del part
    second = processor.read("<image> <image>", urls)
    assert second.images


def test_what_a_processor_makes_of_images_may_be_more_than_tensors(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as sizes, or the parts of images of different sizes, in lists."""
    settings = built.result.manifest.components["generator"]["settings"]
    processor = ImageProcessor(settings, Path(built.result.folder, "1"), context_length=None)
    parts = [torch.zeros(1, 3), torch.zeros(2, 3)]
    found = {"input_ids": torch.tensor([[1, 2]]), "pixel_values": parts, "sizes": [[4, 5]]}
    monkeypatch.setattr(processor, "_processed", lambda *_: found)
    seen = processor.read("<image>", [data_url(picture(1))])
    assert seen.images == {"pixel_values": parts, "sizes": [[4, 5]]}


def test_images_that_alone_exceed_the_context_are_refused_before_they_are_processed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save_seeing("qwen2_vl", tmp_path / "source") / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["text_config"]["max_position_embeddings"] = 40
    file.write_text(json.dumps(config), encoding="utf-8")
    result = llmserve.build("hf", str(file.parent), output=tmp_path / "repo", name="seeing")
    driver = started(Built(file.parent, result))
    monkeypatch.setattr(transformers.ProcessorMixin, "__call__", lambda *_, **__: 1 / 0)
    request = ask(4)
    driver.execute([request])
    assert request.failure is not None
    assert request.failure.code == "context_length_exceeded"
    counts = [15, 18, 16, 18]
    assert request.failure.details == {"context": 40, "prompt_tokens": sum(counts)}
    assert request.failure.words == (
        f"the images have {sum(counts)} tokens and the model's context 40: send fewer or smaller "
        "images"
    )


def test_a_model_tells_what_it_takes_of_images_and_makes_of_one(
    built: Built, driver: BatchDriver
) -> None:
    request = FakeRequest({"text_input": [""]}, prompt_only=True)
    driver.execute([request])
    assert request.error is None
    processor = Seeing(built.source).processor
    screen = Image.new("RGB", (1024, 768))
    read = processor(text=["<image>"], images=[[screen]], add_special_tokens=False)
    tokens = len(read["input_ids"][0])
    assert tokens > 1
    assert json.loads(request.text)["images"] == {
        "images": 8, "megabytes": 20, "megapixels": 25, "tokens": tokens,
    }  # fmt: skip


def test_the_build_declares_images_and_needs_pillow(built: Built) -> None:
    config = read_config(built.result.folder)
    assert "image_url" in [tensor.name for tensor in config.input]
    assert "image_url" in built.result.manifest.contract["inputs"]
    assert "pillow" in built.result.manifest.packages
    assert "pillow==" in built.result.dockerfile.read_text(encoding="utf-8")
    text = llmserve.build("hf", "demo", output=built.source.parent / "text", name="text")
    assert "image_url" not in text.manifest.contract["inputs"]
    assert "pillow" not in text.manifest.packages


def test_a_processor_that_cannot_be_loaded_is_refused_by_the_build(
    built: Built, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(built.source, source)
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (source / name).is_file():
            content = json.loads((source / name).read_text(encoding="utf-8"))
            content["processor_class"] = "LlavaOnevisionProcessor"
            (source / name).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelSourceError, match=r"the processor of .* cannot be loaded: "):
        llmserve.build("hf", str(source), output=tmp_path / "repo")


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="it reads videos as well")
@pytest.mark.parametrize("kind", ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"])
def test_a_processor_of_videos_reads_images_without_torchvision(tmp_path: Path, kind: str) -> None:
    source = save_seeing("qwen2_vl", tmp_path)
    file = source / "preprocessor_config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**content, "image_processor_type": kind}), encoding="utf-8")
    processor = Seeing(source).processor
    assert type(processor).__name__ == "Qwen2VLProcessor"
    images = [picture(seed, *size) for seed, size in enumerate(SIZES)]
    read = processor(text=["<image> " * 4], images=[images], return_tensors="pt")
    alone = transformers.AutoImageProcessor.from_pretrained(source)
    assert isinstance(alone, Qwen2VLImageProcessorPil)
    for name, expected in alone(images, return_tensors="pt").items():
        assert torch.equal(read[name], expected)
    marks = int((read["input_ids"] == processor.tokenizer.image_token_id).sum())
    assert marks == int(read["image_grid_thw"].prod(-1).sum()) // 4
    assert int(read["mm_token_type_ids"].sum()) == marks


def test_images_are_read_with_the_adapter_that_is_for_them(tmp_path: Path) -> None:
    source = save_seeing("phi4_multimodal", tmp_path / "source")
    vision, other = (
        save_adapter(tmp_path / name, Seeing(source).model, targets=("qkv_proj",), seed=seed)
        for seed, name in enumerate(("vision", "other"))
    )
    adapters = f"vision={vision},other={other}"
    output = tmp_path / "repo"
    built = Built(source, llmserve.build("hf", str(source), output=output, adapters=adapters))
    together = [
        ask(1), ask(0), ask(2, adapter="vision"), ask(0, adapter="other"), ask(1, adapter="other")
    ]  # fmt: skip
    started(built).execute(together)
    refused = "adapter cannot be another than vision beside images"
    assert [request.error for request in together] == [None] * 4 + [refused]
    assert [(request.text, input_tokens(request)) for request in together[:4]] == [
        expected(built, 1, vision), expected(built, 0), expected(built, 2, vision),
        expected(built, 0, other),
    ]  # fmt: skip
    assert expected(built, 1) != expected(built, 1, vision)


@pytest.mark.parametrize("images", [(1, 2), ()])
def test_an_answer_goes_on_beyond_the_length_of_longrope(
    tmp_path: Path, images: tuple[int, ...]
) -> None:
    """Then all tokens are computed anew, also those of images."""
    file = save_seeing("phi4_multimodal", tmp_path / "source") / "config.json"
    seeing = Seeing(file.parent)
    asked = seeing.ask(*images)
    config = json.loads(file.read_text(encoding="utf-8"))
    factors = {"short_factor": [1.0] * 4, "long_factor": [40.0] * 4}
    config["rope_parameters"] |= {"rope_type": "longrope", "attention_factor": 1.0, **factors}
    config["original_max_position_embeddings"] = len(asked.ids) + LENGTH // 2
    file.write_text(json.dumps(config), encoding="utf-8")
    ids = torch.tensor([asked.ids])
    with torch.inference_mode():
        found = (
            seeing.load()
            .generate(
                ids, **asked.tensors, do_sample=False, max_new_tokens=LENGTH, use_cache=False
            )[0, len(asked.ids) :]
            .tolist()
        )
    # It turns otherwise in the middle.
    assert found[: LENGTH // 2] == asked.expected[: LENGTH // 2]
    assert found != asked.expected
    result = llmserve.build("hf", str(file.parent), output=tmp_path / "repo", name="seeing")
    built = Built(file.parent, result)
    generator = TransformersGenerator(built.settings("generator"), built.folder)
    row = generation(asked.ids, LENGTH, images=asked.tensors if images else None)
    generator.generate([row], ByteTokenizer())
    assert row.token_ids == found


def test_what_goes_with_no_images_yet_is_refused(built: Built, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="reads images, which goes with no layout yet"):
        llmserve.build("hf", str(built.source), output=tmp_path, layout="tutorial")
