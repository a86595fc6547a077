"""Images in OpenVINO's engine: answers are those of ``generate()``, and no image is read twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openvino
import pytest
import torch
import transformers

import llmserve
from llmserve.errors import OptionError
from llmserve.graphs import StoredWeights, load
from llmserve.plugin import BuildSpec, IncompatibleError, UnservedError, build_spec
from llmserve.runtime import (
    Chunk,
    Embedded,
    Engine,
    Generation,
    ImageTower,
    PromptLookup,
    RequestError,
)
from llmserve.testing import ByteTokenizer
from llmserve.testing.tiny_seeing import (
    AS_TEXTS,
    IN_GRIDS,
    LENGTH,
    Seeing,
    SeenQuestion,
    data_url,
    picture,
    save_seeing,
)
from llmserve_openvino.compare import difference, seen_difference
from llmserve_openvino.embedded_rows import (
    CHOSEN,
    DEEPER,
    ROWS,
    SHIFTS,
    TYPES,
    row_inputs,
    take_rows,
)
from llmserve_openvino.engine import OpenVinoGenerator
from llmserve_openvino.runner import make_runner, paged
from llmserve_openvino.tower import LOADER, save_tower
from llmserve_openvino.trace import convert
from llmserve_openvino.trial import try_small

# Tracing warns of what the comparison with the original would show.
pytestmark = pytest.mark.filterwarnings("ignore")
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
COUNTS = (1, 2, 0, 3, 1, 0)
"""How many images the prompts have that are asked together."""
LOOKS_BACK = {"gemma3": 30, "gemma4_moe": 70}
"""Windows that are as long as the longest image, where its tokens see each other, and hardly
longer."""


QUANTISED = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}


def look_back(folder: Path, window: int) -> None:
    """Change how far the layers with a window look back."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["text_config"]["sliding_window"] = window
    file.write_text(json.dumps(config), encoding="utf-8")


class Served(Seeing):
    """A model that sees, converted as a build does."""

    def __init__(self, family: str, folder: Path) -> None:
        super().__init__(save_seeing(family, folder))
        self.family = family
        if family in LOOKS_BACK:
            look_back(folder, LOOKS_BACK[family])
        model = load(folder, loader=LOADER)
        self.stored, self.traced = StoredWeights(model), model
        self.graph = convert(model, self.stored)
        tower = folder.with_name("tower")
        self.numbers = save_tower(folder, tower, pickle=False)
        self.sight = transformers.AutoModelForImageTextToText.from_pretrained(tower).eval()

    def engine(
        self, *, exact: bool = False, most: int = 24, tokens: int = 4096, **options: Any
    ) -> tuple[Engine, ImageTower]:
        tower = ImageTower(self.sight)
        runner = make_runner(
            self.graph.clone(), EXACT, cache_tokens=tokens, exact=exact, embeds=tower
        )
        engine = Engine(runner, ByteTokenizer(), max_sequences=8, **options)
        engine._scheduler.pace.most = most
        return engine, tower


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    """What makes the model of a family, once."""
    return lru_cache(lambda family: Served(family, tmp_path_factory.mktemp(family) / "model"))


@pytest.fixture(scope="module", params=sorted({**AS_TEXTS, **IN_GRIDS, "gemma3": None}))
def served(request: Any, made: Callable[[str], Served]) -> Served:
    return made(request.param)


@pytest.fixture(scope="module")
def asked(served: Served) -> list[SeenQuestion]:
    return [
        served.ask(*range(10 * number, 10 * number + count), question=f"what of {number}?")
        for number, count in enumerate(COUNTS)
    ]


def finish(engine: Engine) -> None:
    while engine.busy:
        assert not engine.step().failed
    assert engine.cache_used == 0


def answer(engine: Engine, asked: SeenQuestion, **params: Any) -> Generation:
    engine.admit(found := asked.begin(**params))
    finish(engine)
    assert found.token_ids == asked.expected
    return found


@pytest.mark.parametrize("exact", [False, True])
def test_prompts_with_images_and_without_answer_as_generate(
    served: Served, asked: list[SeenQuestion], exact: bool
) -> None:
    engine, _ = served.engine(exact=exact)
    together = [each.begin() for each in asked]
    for each in together:
        engine.admit(each)
    finish(engine)
    assert [each.token_ids for each in together] == [each.expected for each in asked]
    # Pieces of one token too.
    answer(served.engine(exact=exact, most=1)[0], asked[1])


def test_a_second_question_about_an_image_reads_nothing_anew(served: Served) -> None:
    engine, tower = served.engine()
    first = served.ask(1, 2, 3)
    answer(engine, first)
    count = tower.computed
    assert count == len(first.parts)
    found = answer(engine, served.ask(1, 2, 3, question="and then, what is it?"))
    assert tower.computed == count
    assert (found.cached_tokens or 0) >= first.parts[-1].start // 32 * 32 > 0
    other = served.ask(4, 5, 6)
    assert other.ids == first.ids
    assert answer(engine, other).cached_tokens == 0


def test_guesses_change_no_answer_about_images(served: Served, asked: list[SeenQuestion]) -> None:
    engine, _ = served.engine(guesser=PromptLookup(4))
    for each in asked[:3]:
        answer(engine, each)


def test_a_tower_is_kept_without_the_layers_for_texts(served: Served) -> None:
    parts = (served.model.get_decoder(), served.model.get_output_embeddings())
    of_text = sum(each.numel() for part in parts for each in part.parameters())
    others = sum(each.numel() for each in served.model.parameters()) - of_text
    # A table and scores of one token, and the last norm, are left.
    assert served.numbers == others + 3 * 32


def test_pages_of_another_tower_are_not_those_of_this_one(served: Served) -> None:
    plain = make_runner(served.graph.clone(), EXACT, cache_tokens=64)
    seeing = make_runner(
        served.graph.clone(), EXACT, cache_tokens=64, embeds=ImageTower(served.sight)
    )
    assert plain.page_form
    assert plain.page_form != seeing.page_form


def test_a_converted_model_is_compared_where_tokens_stand_for_an_image(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off() -> float:
        return seen_difference(served.traced, served.stored, served.graph)

    def leave_out(name: str) -> Callable[..., Any]:
        def inputs(*given: Any) -> dict[str, Any]:
            found = row_inputs(*given)
            return {**found, name: found[name] * 0}

        return inputs

    assert off() < 0.001
    traced = {port.any_name for port in served.graph.inputs} & {SHIFTS, DEEPER}
    assert traced == {
        *([SHIFTS] if served.family in IN_GRIDS else []),
        *([DEEPER] if served.family == "qwen3_vl" else []),
    }
    for name in (ROWS, *traced):
        with monkeypatch.context() as patch:
            patch.setattr("llmserve_openvino.runner.row_inputs", leave_out(name))
            assert off() > 0.02
    assert difference(served.traced, served.stored, served.graph) < 0.001, "nothing is left of it"


def test_a_text_is_given_one_zero_for_all_that_is_added_where_an_image_is() -> None:
    embedded = Embedded(1, 2, b"", torch.ones(2, 12), positions=np.array([[0, 0], [0, 0], [0, 1]]))
    widths = {ROWS: 4, SHIFTS: 1, DEEPER: 8}
    tower: Any = SimpleNamespace(rows=lambda part: part.source)

    def given(*chunks: Chunk) -> dict[str, Any]:
        begins = [0, *accumulate(len(chunk.ids) for chunk in chunks)]
        return row_inputs(tower, chunks, begins, widths)

    text = Chunk([5] * 40, 0, [0, 1])
    found = given(text)
    assert {name: each.shape for name, each in found.items() if name in (SHIFTS, DEEPER)} == {
        SHIFTS: (3, 1, 1),
        DEEPER: (1, 1, 8),
    }
    assert not any(found[name].any() for name in (SHIFTS, DEEPER))
    found = given(text, Chunk([5] * 4, 0, [2], embedded=[embedded]))
    assert found[SHIFTS][:, 40:, 0].tolist() == [[0, 0, -1, 0], [0, 0, -1, 0], [0, 0, 0, 0]]
    assert [bool(row.any()) for row in found[DEEPER]] == [False] * 41 + [True, True, False]
    # What follows an image is so much nearer, also where no image is in its chunk any more.
    assert (given(text, Chunk([5], 9, [2], fewer=3))[SHIFTS][:, 40:] == -3).all()


def test_a_token_that_comes_alone_sees_none_that_follow_it() -> None:
    image = Embedded(3, 4, b"", torch.ones(4, 2), is_whole=True)
    widths = {ROWS: 2, TYPES: 1}
    tower: Any = SimpleNamespace(rows=lambda part: part.source)

    def types(*chunks: Chunk, begins: list[int]) -> list[int]:
        found = row_inputs(tower, chunks, begins, widths)
        assert set(found) == {TYPES, ROWS, CHOSEN}
        return [*found[TYPES]]

    # The last one of an image, given twice, and a text: none is told anything.
    last, text = Chunk([5], 6, [0], embedded=[image]), Chunk([5] * 3, 0, [1])
    assert types(last, text, begins=[0, 2, 5]) == []
    rest = Chunk([5] * 4, 4, [2], embedded=[image])
    assert types(last, text, rest, begins=[0, 2, 5, 9]) == [0] * 5 + [1, 1, 1, 0]


@pytest.fixture(scope="module", params=["gemma3", "gemma4", "gemma4_moe"])
def gemma(request: Any, made: Callable[[str], Served]) -> Served:
    return made(request.param)


def test_prompts_far_beyond_a_window_are_answered_as_generate_does(gemma: Served) -> None:
    counts = (1, 4, 0, 2, 3, 1, 0, 4)
    words = "and what else is there to be seen in all of it?"
    asked = [
        gemma.ask(*range(number, number + count), question=words[: 6 * number])
        for number, count in enumerate(counts)
    ]
    engine, tower = gemma.engine(most=40)
    together = [each.begin() for each in asked]
    for each in together:
        engine.admit(each)
    finish(engine)
    assert [each.token_ids for each in together] == [each.expected for each in asked]
    # Another question about the same images.
    count = tower.computed
    found = answer(engine, gemma.ask(*range(1, 5), question="and then?"))
    assert tower.computed == count
    assert (found.cached_tokens or 0) >= asked[1].parts[-1].start // 32 * 32


def test_a_converted_gemma_is_compared_where_the_tokens_of_an_image_see_each_other(
    gemma: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off() -> float:
        return seen_difference(gemma.traced, gemma.stored, gemma.graph)

    assert off() < 0.001
    if gemma.family != "gemma4":
        monkeypatch.setattr(Chunk, "wholes", lambda _: [])
        assert off() > 0.02


def test_who_lost_its_pages_before_an_image_reads_it_again(gemma: Served) -> None:
    asked, longest = gemma.ask(1, 2), gemma.ask(3, 4, 5)
    room = -(-(len(longest.ids) + LENGTH) // 32) * 32
    # Two begin, and there is no room for both of them to end.
    engine, _ = gemma.engine(most=16, tokens=room)
    lower, upper = asked.begin(priority_class=1), longest.begin(priority_class=-1)
    engine.admit(lower)
    engine.step()
    engine.step()
    assert not lower.token_ids, "it is in the middle of its prompt"
    engine.admit(upper)
    engine.step()
    assert (engine.live, engine.waiting) == (1, 1)
    finish(engine)
    assert lower.token_ids == asked.expected
    assert upper.token_ids == longest.expected


def test_an_older_openvino_that_would_read_an_image_otherwise_is_refused(
    made: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openvino.get_version", lambda: "2026.2.0-21903-abc-releases/2026/2")
    with pytest.raises(IncompatibleError, match=r"2026\.3 or later, .*; this is 2026\.2\.0: "):
        made("gemma3").engine()


def test_images_longer_than_a_window_are_refused(tmp_path: Path) -> None:
    folder = save_seeing("gemma3", tmp_path / "source")
    look_back(folder, 24)
    config = transformers.AutoConfig.from_pretrained(folder)
    with pytest.raises(UnservedError, match=r"24 tokens, and an image has 25.*max_images=0"):
        try_small(config, sees=True)


@pytest.mark.long
def test_images_that_alone_exceed_the_context_are_refused_before_they_are_processed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save_seeing("qwen2_vl", tmp_path / "source") / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["text_config"]["max_position_embeddings"] = 40
    file.write_text(json.dumps(config), encoding="utf-8")
    built = llmserve.build("openvino", str(file.parent), output=tmp_path / "repository")
    settings = built.manifest.components["generator"]["settings"]
    generator = OpenVinoGenerator(settings, built.folder / "1")
    monkeypatch.setattr(transformers.ProcessorMixin, "__call__", lambda *_, **__: 1 / 0)
    with pytest.raises(RequestError, match="the model's context 40") as caught:
        generator.read_images("<image>" * 4, [data_url(picture(seed, 33, 33)) for seed in range(4)])
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.long
def test_a_build_for_text_says_which_plugin_reads_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_seeing("llava", tmp_path / "source")
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }  # fmt: skip
    text = {**sizes, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 200}
    text |= {"intermediate_size_mlp": 48, "num_local_experts": 2}
    vision = {**sizes, "image_size": 16, "patch_size": 4, "intermediate_size": 128}
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    # Beside the tokenizer, and with a processor that is never loaded.
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(source)
    reports: list[str] = []

    def convert_nothing(*_: Any, **options: Any) -> Any:
        assert not options["sees"]
        raise UnservedError("this was enough")

    monkeypatch.setattr("llmserve_openvino.prepare._place_or_convert", convert_nothing)
    spec = BuildSpec("openvino", str(source), output=tmp_path / "repository")
    with pytest.raises(UnservedError, match="this was enough"):
        build_spec(spec, report=reports.append)
    assert any(each.endswith("served for text alone; hf reads them") for each in reports)


@pytest.mark.long
def test_a_gemma_4_is_built_and_refuses_images_longer_than_its_window(tmp_path: Path) -> None:
    source = save_seeing("gemma4_moe", tmp_path / "source")
    # Of the four images, the second has the most tokens.
    look_back(source, 64)
    built = llmserve.build("openvino", str(source), output=tmp_path / "repository")
    settings = built.manifest.components["generator"]["settings"]
    generator = OpenVinoGenerator(settings, built.folder / "1")
    small, large = (data_url(picture(seed, *size)) for seed, size in ((0, (24, 16)), (1, (16, 40))))
    with pytest.raises(RequestError, match="an image has 65 tokens, more than the 64") as caught:
        generator.read_images("look <image> <image>", [small, large])
    assert (caught.value.code, caught.value.param) == ("invalid_value", "image_url")
    seen = generator.read_images("look 0:<image> what?", [small])
    expected = Seeing(source).ask(0)
    assert seen.ids == expected.ids
    answer(generator.stepper(ByteTokenizer()), replace(expected, parts=seen.images))


@pytest.mark.long
def test_a_model_in_grids_is_built_for_text_alone(tmp_path: Path) -> None:
    source = save_seeing("qwen3_vl", tmp_path / "source")
    built = llmserve.build("openvino", str(source), output=tmp_path / "repository", max_images=0)
    assert "image_url" not in built.manifest.contract["inputs"]
    settings = built.manifest.components["generator"]["settings"]
    assert settings["images"] is None
    generator = OpenVinoGenerator(settings, built.folder / "1")
    answer(generator.stepper(ByteTokenizer()), Seeing(source).ask())


@pytest.mark.parametrize(
    ("family", "changes", "options", "error", "words"),
    [
        (
            "llava",
            {},
            {"draft_model": "demo"},
            OptionError,
            "images, which goes with no draft_model",
        ),
        ("llava", QUANTISED, {}, UnservedError, r"reads images, and is quantised \([^)]*\):"),
        ("gemma3", QUANTISED, {}, UnservedError, "which goes with max_images=0 alone"),
    ],
    ids=["draft", "quantised", "quantised gemma"],
)
def test_what_goes_with_no_images_is_refused_before_a_model_is_converted(
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
    options: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    source = save_seeing(family, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(error, match=words):
        llmserve.build("openvino", str(source), output=tmp_path / "repository", **options)


def test_a_model_with_two_tables_of_tokens_takes_no_rows(served: Served) -> None:
    graph = paged(served.graph.clone())
    ops = openvino.opset13
    tokens = graph.input("input_ids").get_node()
    table = ops.constant(np.zeros((200, 4), np.float32))
    second = ops.result(ops.gather(table, tokens, ops.constant(np.int64(0))))
    graph.add_results([second])
    with pytest.raises(IncompatibleError, match="from 2 tables"):
        take_rows(graph)
