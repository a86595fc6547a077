"""Images in the engine: answers are those of ``generate()``, and no image is read twice."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import llmserve
from llmserve.errors import IncompatibleError, OptionError
from llmserve.runtime import (
    Chunk,
    Engine,
    Generation,
    Guesser,
    ImageProcessor,
    ImageTower,
    PromptLookup,
    RequestError,
    embedded_parts,
    embeds_images,
)
from llmserve.testing import ByteTokenizer
from llmserve.testing.tiny_seeing import (
    FAMILIES,
    IN_GRIDS,
    LENGTH,
    Seeing,
    SeenQuestion,
    data_url,
    picture,
    save_seeing,
)
from llmserve_iterative.attention import PagePlan, Tokens
from llmserve_iterative.generator import StepwiseGenerator
from llmserve_iterative.runner import FlatRunner, PaddedRunner, make_runner

from .families import finish

COUNTS = (1, 2, 0, 3, 4, 1, 0, 2)
"""How many images the prompts have that are asked together."""


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def seeing(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(save_seeing(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def asked(seeing: Seeing) -> list[SeenQuestion]:
    """Eight prompts with images of their own, of which two have none."""
    return [
        seeing.ask(*range(10 * number, 10 * number + count), question=f"what of {number}?")
        for number, count in enumerate(COUNTS)
    ]


def flat(model: Any, tokens: int, tower: ImageTower, plan: Any = PagePlan) -> Any:
    return FlatRunner(plan, model, tokens, tower=tower)


def padded(model: Any, tokens: int, tower: ImageTower) -> Any:
    return PaddedRunner(model, tokens, tower=tower)


def engine_of(
    seeing: Seeing,
    create: Callable[..., Any] = flat,
    *,
    cache_tokens: int = 4096,
    prefill_chunk: int = 256,
    guesser: Guesser | None = None,
    most_bytes: int = 1_000_000,
    max_sequences: int = 8,
) -> tuple[Engine, ImageTower]:
    model = seeing.load()
    tower = ImageTower(model, most_bytes)
    runner = create(model, cache_tokens, tower)
    return Engine(
        runner,
        ByteTokenizer(),
        max_sequences=max_sequences,
        prefill_chunk=prefill_chunk,
        guesser=guesser,
    ), tower


def answer(engine: Engine, asked: SeenQuestion, **params: Any) -> Generation:
    engine.admit(found := asked.begin(**params))
    finish(engine)
    assert found.token_ids == asked.expected
    return found


@pytest.mark.parametrize("create", [flat, padded])
@pytest.mark.parametrize("chunk", [7, 256])
def test_prompts_with_images_and_without_answer_as_generate(
    seeing: Seeing, asked: list[SeenQuestion], create: Callable[..., Any], chunk: int
) -> None:
    engine, _ = engine_of(seeing, create, prefill_chunk=chunk)
    together = [each.begin() for each in asked]
    for each in together:
        engine.admit(each)
    finish(engine)
    assert [each.token_ids for each in together] == [each.expected for each in asked]
    for one in asked[:3]:
        answer(engine_of(seeing, create, prefill_chunk=chunk)[0], one)


def test_a_model_that_sees_runs_in_one_row_of_tokens(seeing: Seeing) -> None:
    model = seeing.load()
    assert isinstance(make_runner(model, 256, tower=ImageTower(model)), FlatRunner)


def test_a_second_question_about_an_image_reads_nothing_anew(seeing: Seeing) -> None:
    engine, tower = engine_of(seeing)
    first = seeing.ask(1, 2, 3)
    answer(engine, first)
    count = tower.computed
    assert count == len(first.parts)
    second = seeing.ask(1, 2, 3, question="and then, what is it?")
    found = answer(engine, second)
    assert tower.computed == count
    assert (found.cached_tokens or 0) >= first.parts[-1].start // 32 * 32 > 0


def test_another_image_with_the_same_marks_shares_none_of_its_pages(seeing: Seeing) -> None:
    engine, _ = engine_of(seeing)
    first, other = seeing.ask(1, 2), seeing.ask(3, 4)
    assert first.ids == other.ids
    assert first.expected != other.expected
    answer(engine, first)
    assert answer(engine, other).cached_tokens == 0


def test_who_lost_its_pages_within_an_image_computes_them_again(
    seeing: Seeing, asked: list[SeenQuestion]
) -> None:
    longest = max(asked, key=lambda each: len(each.ids))
    room = -(-(len(longest.ids) + LENGTH) // 32) * 32
    # Two begin, and there is no room for both of them to end.
    engine, _ = engine_of(seeing, cache_tokens=room, prefill_chunk=16, most_bytes=1)
    lower, upper = asked[1].begin(priority_class=1), longest.begin(priority_class=-1)
    engine.admit(lower)
    engine.step()
    engine.step()
    assert not lower.token_ids, "it is in the middle of its prompt"
    engine.admit(upper)
    engine.step()
    assert (engine.live, engine.waiting) == (1, 1)
    finish(engine)
    assert lower.token_ids == asked[1].expected
    assert upper.token_ids == longest.expected


def test_what_is_kept_of_images_is_bounded(seeing: Seeing, asked: list[SeenQuestion]) -> None:
    # More than one part of each family's has, and less than all have.
    engine, tower = engine_of(seeing, most_bytes=9000, prefill_chunk=5)
    for each in asked[:4]:
        answer(engine, each)
        assert 0 < tower.bytes <= 9000


def test_a_client_that_leaves_within_an_image_leaves_nothing(
    seeing: Seeing, asked: list[SeenQuestion]
) -> None:
    engine, _ = engine_of(seeing, prefill_chunk=9)
    engine.admit(gone := asked[3].begin())
    engine.step()
    engine.drop(gone)
    assert (engine.live, engine.waiting, engine.cache_used) == (0, 0, 0)
    answer(engine, asked[3])


def test_guesses_change_no_answer_about_images(seeing: Seeing, asked: list[SeenQuestion]) -> None:
    engine, _ = engine_of(seeing, guesser=PromptLookup(4))
    for each in asked[:3]:
        answer(engine, each)


def test_log_probabilities_of_a_prompt_with_an_image_are_those_of_the_model(
    seeing: Seeing, asked: list[SeenQuestion]
) -> None:
    engine, _ = engine_of(seeing)
    found = answer(engine, asked[0], prompt_logprobs=0)
    with torch.inference_mode():
        ids = torch.tensor([asked[0].ids])
        rows = seeing.model(input_ids=ids, **asked[0].tensors).logits[0].log_softmax(-1)
    expected = [float(rows[at, token]) for at, token in enumerate(asked[0].ids[1:])]
    assert [each.value for each in found.prompt_logprobs[1:]] == pytest.approx(expected, abs=1e-4)


class BackwardPlan(PagePlan):
    """As the kernel for CUDA: it knows no tokens that see those that follow."""

    page_size = 64
    sees_ahead = False

    def __init__(self, chunks: Sequence[Chunk], device: Any) -> None:
        super().__init__(chunks, device)
        assert not any(chunk.wholes() for chunk in chunks)


def test_a_kernel_that_sees_only_backwards_reads_no_image_whose_tokens_see_each_other(
    seeing: Seeing, asked: list[SeenQuestion]
) -> None:
    engine, _ = engine_of(seeing, partial(flat, plan=BackwardPlan), prefill_chunk=30)
    together = [each.begin() for each in asked[:4]]
    for each in together:
        engine.admit(each)
    finish(engine)
    assert [each.token_ids for each in together] == [each.expected for each in asked[:4]]


class NotingRunner(FlatRunner):
    """Notes the positions of all tokens that it computes."""

    def __init__(self, model: Any, tokens: int, tower: ImageTower) -> None:
        super().__init__(PagePlan, model, tokens, tower=tower)
        self.noted: list[torch.Tensor] = []

    def run(self, chunks: Sequence[Chunk]) -> Any:
        self.noted.append(Tokens(chunks, self.page_size, torch.device("cpu")).positions)
        return super().run(chunks)


def own_positions(model: Any, asked: SeenQuestion) -> npt.NDArray[np.int64]:
    """Return where a model itself takes the tokens of a prompt to be, and those of the answer."""
    length = len(asked.ids)
    if not hasattr(model.model, "get_rope_index"):
        return np.tile(np.arange(length + LENGTH - 1), (3, 1))
    kinds, grids = asked.tensors["mm_token_type_ids"], asked.tensors["image_grid_thw"]
    found, _ = model.model.get_rope_index(torch.tensor([asked.ids]), kinds, grids)
    after = np.tile(np.arange(LENGTH - 1) + 1 + int(found.max()), (3, 1))
    return np.concatenate([found[:, 0].numpy(), after], axis=1)


@pytest.mark.parametrize("chunk", [3, 256])
def test_tokens_are_where_the_model_takes_them_to_be(
    seeing: Seeing, asked: list[SeenQuestion], chunk: int
) -> None:
    runners: list[NotingRunner] = []

    def create(*given: Any) -> NotingRunner:
        runners.append(NotingRunner(*given))
        return runners[0]

    answer(engine_of(seeing, create, prefill_chunk=chunk)[0], asked[3])
    noted = runners[0].noted
    found = np.concatenate([each.expand(3, -1).numpy() for each in noted], axis=1)
    assert np.array_equal(found, own_positions(seeing.model, asked[3]))
    # A recorded pass of a GPU, which is one of decoding, has room for one of each token.
    assert {each.ndim for each in noted[-LENGTH + 1 :]} == {1}


@pytest.mark.parametrize("family", IN_GRIDS)
def test_the_same_pixels_in_another_grid_are_another_image(family: str) -> None:
    config = SimpleNamespace(
        model_type=family, image_token_id=3, vision_config=SimpleNamespace(spatial_merge_size=2)
    )
    pixels = torch.zeros(16, 4)
    wide, high = (
        embedded_parts(
            config, [3] * 4, {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}
        )
        for grid in ([1, 2, 8], [1, 8, 2])
    )
    assert wide[0].digest != high[0].digest
    assert (wide[0].count, wide[0].fewer) == (high[0].count, high[0].fewer) == (4, 0)


def test_a_model_with_images_in_grids_is_built_with_what_reads_them(tmp_path: Path) -> None:
    source = save_seeing("qwen2_5_vl", tmp_path / "source")
    result = llmserve.build("iterative", str(source), output=tmp_path / "repo", name="seeing")
    assert "image_url" in result.manifest.contract["inputs"]
    settings = result.manifest.components["generator"]["settings"]
    generator = StepwiseGenerator(settings, Path(result.folder, "1"))
    urls = [data_url(picture(1, *size)) for size in ((80, 20), (24, 40))]
    seen = generator.read_images("a <image> and <image>", urls)
    # One of two rows of ten tokens, and one of five rows of three.
    assert [(part.count, part.fewer) for part in seen.images] == [(20, 10), (15, 10)]


def test_marks_that_do_not_fit_the_images_are_refused(
    seeing: Seeing, asked: list[SeenQuestion]
) -> None:
    parts = partial(embedded_parts, seeing.model.config)
    ids, tensors = asked[1].ids, asked[1].tensors
    mark = ids[asked[1].parts[0].start]
    for wrong in ([*ids, mark], [each for each in ids if each != mark]):
        with pytest.raises(RequestError, match="marks for"):
            parts(wrong, tensors)


def test_an_image_that_a_model_takes_for_padding_is_refused() -> None:
    tensors = {"pixel_values": torch.zeros(1, 2, 3, 4, 4)}
    with pytest.raises(RequestError, match="without any content"):
        embedded_parts(SimpleNamespace(model_type="idefics3", image_token_id=3), [3], tensors)


@pytest.fixture(scope="module", params=["gemma4", "gemma4_moe"])
def gemma4(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(save_seeing(request.param, tmp_path_factory.mktemp(request.param)))


def test_images_of_gemma_4_have_as_many_tokens_as_their_sizes_ask_for(gemma4: Seeing) -> None:
    parts = gemma4.ask(0, 1, 2, 3).parts
    assert [part.count for part in parts] == [60, 65, 64, 60]
    # The small ones attend to an image as to a text.
    is_large = gemma4.model.config.audio_config is None
    assert {(part.is_whole, part.in_windows) for part in parts} == {(is_large, is_large)}


@pytest.mark.parametrize("create", [flat, padded])
def test_what_stands_for_a_video_or_a_sound_is_padding_beside_an_image_too(
    gemma4: Seeing, create: Callable[..., Any]
) -> None:
    """As in the pass of a whole model, which embeds no such token."""
    config, text = gemma4.model.config, gemma4.ask()
    ids = text.ids.copy()
    ids[2:5] = config.video_token_id, config.audio_token_id, config.image_token_id
    with torch.inference_mode():
        found = gemma4.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=LENGTH)
    text = SeenQuestion(ids, {}, found[0, len(ids) :].tolist())
    image = gemma4.ask(1)
    engine, _ = engine_of(gemma4, create)
    together = [each.begin() for each in (text, image)]
    for each in together:
        engine.admit(each)
    finish(engine)
    assert [each.token_ids for each in together] == [text.expected, image.expected]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(save_seeing("gemma3", tmp_path_factory.mktemp("gemma")))


def test_an_image_and_the_crops_of_it_are_read_as_several(gemma: Seeing) -> None:
    cropping = Seeing(gemma.folder)
    cropping.processor.images_kwargs = {
        "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }  # fmt: skip
    asked = cropping.ask(1, 2, 3)
    # The third is as wide as it is high.
    assert len(asked.parts) == 1 + 2 + 1 + 3 + 1
    answer(engine_of(cropping, prefill_chunk=40)[0], asked)


def test_the_processor_of_gemma_is_read_as_it_is_released(gemma: Seeing, tmp_path: Path) -> None:
    released = tmp_path / "released"
    shutil.copytree(gemma.folder, released)
    whole = json.loads((released / "processor_config.json").read_text(encoding="utf-8"))
    images = {**whole.pop("image_processor"), "processor_class": "Gemma3Processor"}
    images |= {name: None for name in ("do_convert_rgb", "do_pan_and_scan")}
    assert images["image_processor_type"] == "Gemma3ImageProcessor"
    (released / "processor_config.json").write_text(json.dumps(whole), encoding="utf-8")
    (released / "preprocessor_config.json").write_text(json.dumps(images), encoding="utf-8")
    found, expected = Seeing(released).ask(1, 2), gemma.ask(1, 2)
    assert (found.ids, found.expected) == (expected.ids, expected.expected)
    assert [each.digest for each in found.parts] == [each.digest for each in expected.parts]


@pytest.mark.parametrize(
    ("family", "mark", "what"),
    [
        ("gemma3", "<image_soft_token>", "a part of an image"),
        ("gemma4", "<|audio|>", "a sound"),
        ("gemma4", "<|video|>", "a video"),
        ("qwen2_vl", "<|video_pad|>", "a video"),
        ("phi4_multimodal", "<|audio|>", "a sound"),
    ],
)
def test_a_text_is_refused_that_has_the_mark_of_something_else(
    tmp_path: Path, family: str, mark: str, what: str
) -> None:
    source = str(save_seeing(family, tmp_path / "source"))
    result = llmserve.build("iterative", source, output=tmp_path / "repository", name="seeing")
    settings = result.manifest.components["generator"]["settings"]
    processor = ImageProcessor(settings, Path(result.folder, "1"), context_length=None)
    urls = [data_url(picture(1))]
    with pytest.raises(RequestError) as caught:
        processor.read(f"see <image> and {mark}", urls)
    assert str(caught.value) == (
        f"the prompt has {mark}, which stands for {what}: leave it out of the texts of messages"
    )
    assert caught.value.param == "messages"
    assert processor.read("see <image> and another", urls).images


def test_a_draft_model_goes_only_with_a_gemma_for_text_alone(gemma: Seeing, tmp_path: Path) -> None:
    source = str(gemma.folder)
    with pytest.raises(OptionError, match="reads images, which goes with no draft_model") as caught:
        llmserve.build("iterative", source, output=tmp_path, draft_model=source)
    assert caught.value.hint == (
        "leave out draft_model, or build it for text alone with --set max_images=0"
    )


def test_a_model_whose_images_are_read_in_both_directions_is_told_from_others() -> None:
    assert embeds_images(
        {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
    )
    assert not embeds_images({"model_type": "llava", "vision_config": {"model_type": "pixtral"}})
    assert not embeds_images({"model_type": "gemma3"})
    assert embeds_images({"model_type": "gemma3"}, wholes=True)
    assert embeds_images({"model_type": "idefics3"}, wholes=True, grids=True)
    assert not embeds_images({"model_type": "gemma4"}, wholes=True, grids=True)
    assert embeds_images({"model_type": "gemma4"}, layers=True)
    assert not embeds_images({"model_type": "llama4"}, wholes=True)
    assert not embeds_images({"model_type": "qwen2_vl"}, wholes=True)
    assert embeds_images({"model_type": "qwen2_vl", "vision_config": {}}, grids=True)
    assert embeds_images({"model_type": "qwen3_vl"}, grids=True)
    assert not embeds_images({"model_type": "phi4_multimodal"}, wholes=True, layers=True)
    assert embeds_images({"model_type": "phi4_multimodal"}, causal=True)
    assert not embeds_images({})


@pytest.mark.parametrize(
    ("family", "version", "least"),
    [
        ("llava", "4.57.1", ""), ("gemma3", "4.57.1", "5"), ("qwen2_vl", "4.57.1", "5"),
        ("qwen2_vl", "5.0.0.dev0", ""), ("gemma4", "5.9.0", "5.13"), ("gemma4", "5.13.1", ""),
        ("phi4_multimodal", "5.22.1", "5.23"),
    ],
)  # fmt: skip
def test_what_older_versions_of_transformers_read_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, version: str, least: str
) -> None:
    monkeypatch.setattr("llmserve_iterative.runner.transformers.__version__", version)
    model = Seeing(save_seeing(family, tmp_path)).load()
    if not least:
        assert make_runner(model, 64, tower=ImageTower(model))
        return
    words = f"by transformers {least} or later; this is {version}"
    with pytest.raises(IncompatibleError, match=re.escape(words)):
        make_runner(model, 64, tower=ImageTower(model))
