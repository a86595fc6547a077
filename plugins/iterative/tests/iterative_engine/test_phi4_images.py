"""Images of Phi-4 multimodal: crops that differ in number, and the adapter that reads images."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import llmserve
from llmserve.errors import ModelSourceError
from llmserve.plugin import BuildSpec, ModelSource, Note, build_spec, lacks_adapter
from llmserve.runtime import Adapters, Engine, ImageTower, embedded_parts
from llmserve.runtime.causal import load
from llmserve.testing import ByteTokenizer
from llmserve.testing.tiny_adapters import merged, save_adapter
from llmserve.testing.tiny_seeing import Seeing, SeenQuestion, data_url, picture, save_seeing
from llmserve_iterative.attention import PagePlan
from llmserve_iterative.generator import StepwiseGenerator
from llmserve_iterative.runner import FlatRunner

from .families import finish

FAMILY = "phi4_multimodal"


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """A model as it is released: the adapter that reads images is beside its weights."""
    seeing = Seeing(save_seeing(FAMILY, tmp_path_factory.mktemp("phi")))
    save_adapter(seeing.folder / "vision-lora", seeing.model, targets=("qkv_proj",), rank=8)
    return seeing


def test_images_have_as_many_tokens_as_their_crops_are_covered(phi: Seeing) -> None:
    # An overview has 2 rows of 3 tokens, and one follows the crops. A row of them has one more than
    # is covered: 3 of 2 x 1 crops, 2 of 1 x 3, both of 2 x 2, 4 of 2 x 1.
    found = [(part.count, len(part.source["image_pixel_values"][0])) for part in asked(phi).parts]
    assert found == [(7 + 2 * 4, 3), (7 + 5 * 3, 4), (7 + 4 * 5, 5), (7 + 2 * 5, 3)]


def asked(phi: Seeing) -> SeenQuestion:
    return phi.ask(1, 2, 3, 4)


def test_what_fills_up_the_crops_of_a_prompt_is_no_part_of_an_image(phi: Seeing) -> None:
    """An image is the same one whatever is beside it."""
    alone, beside = phi.ask(1).parts[0], asked(phi).parts[0]
    assert (alone.digest, alone.count) == (beside.digest, beside.count)


def test_an_image_is_read_as_beside_one_that_fills_less(phi: Seeing) -> None:
    """And with PyTorch's attention as with the one of transformers."""
    settings = {"path": phi.folder.name, "device": "cpu", "dtype": "float32", "image_limits": {}}
    own = transformers.AutoModelForCausalLM.from_pretrained(phi.folder).eval()
    own.set_attn_implementation({"vision_config": "eager"})
    # It fills four crops.
    pictures = [picture(3, 32, 32), picture(4, 24, 16)]
    inputs = phi.processor(text=["<image><image>"], images=[pictures], return_tensors="pt")
    tensors = {name: each for name, each in inputs.items() if name.startswith("image_")}
    full = {name: each[:1] for name, each in tensors.items()}
    assert bool(full["image_attention_mask"].all())
    assert not bool(tensors["image_attention_mask"].all())
    ids, width = inputs["input_ids"][0].tolist(), own.config.hidden_size
    count, other = (part.count for part in embedded_parts(own.config, ids, tensors))
    rows = []
    for model in (own, load(settings, phi.folder.parent)):
        mark = model.config.vision_config.image_token_id
        for read, marks in ((full, count), (tensors, count + other)):
            embedded = torch.full((1, marks), mark), torch.zeros(1, marks, width)
            with torch.inference_mode():
                found = model.model.embed_tokens_extend.image_embed(*embedded, **read)
            rows.append(found[0, :count])
    near = 1e-4 * float(rows[0].abs().max())
    assert all(torch.allclose(each, rows[0], atol=near) for each in rows)


def engine_of(model: Any, adapters: Path) -> Engine:
    runner = FlatRunner(PagePlan, model, 4096, tower=ImageTower(model))
    held = Adapters(adapters, runner.adapters, 1_000_000)
    return Engine(runner, ByteTokenizer(), max_sequences=8, prefill_chunk=20, adapters=held)


def test_images_with_an_adapter_and_texts_without_are_computed_together(
    phi: Seeing, tmp_path: Path
) -> None:
    shutil.copytree(phi.folder / "vision-lora", tmp_path / "vision")
    engine = engine_of(phi.load(), tmp_path)
    adapted = Seeing(phi.folder)
    adapted.__dict__["model"] = merged(phi.load(), phi.folder / "vision-lora")
    seen, text = adapted.ask(1, 2, 3), phi.ask()
    # Read without it, the images give another answer.
    assert phi.ask(1, 2, 3).expected != seen.expected
    together = [seen.begin(adapter="vision"), text.begin(), adapted.ask().begin(adapter="vision")]
    for each in together:
        engine.admit(each)
    finish(engine)
    expected = [seen.expected, text.expected, adapted.ask().expected]
    assert [each.token_ids for each in together] == expected
    # What the tower makes of an image is the same without it, and is kept.
    engine.admit(again := phi.ask(1, 2, 3).begin())
    finish(engine)
    assert again.token_ids == phi.ask(1, 2, 3).expected


PLUGINS = ["hf", pytest.param("iterative", marks=pytest.mark.long)]


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_model_is_built_with_the_adapter_of_its_images(
    phi: Seeing, tmp_path: Path, plugin: str
) -> None:
    adapters = f"vision={phi.folder / 'vision-lora'}"
    built = llmserve.build(plugin, str(phi.folder), output=tmp_path, adapters=adapters)
    assert "image_url" in built.manifest.contract["inputs"]
    settings = built.manifest.components["generator"]["settings"]
    assert settings["image_adapter"] == "vision"
    if plugin == "iterative":
        generator = StepwiseGenerator(settings, Path(built.folder, "1"))
        seen = generator.read_images("a <image>", [data_url(picture(1))])
        assert (seen.adapter, generator.adapters) == ("vision", ["vision"])


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_model_without_the_adapter_of_its_images_is_served_for_text(
    phi: Seeing, tmp_path: Path, plugin: str
) -> None:
    notes: list[str] = []
    spec = BuildSpec(plugin, str(phi.folder), output=tmp_path)
    built = build_spec(spec, report=notes.append)
    assert "image_url" not in built.manifest.contract["inputs"]
    beside = phi.folder / "vision-lora"
    assert [str(note) for note in notes if isinstance(note, Note)] == [
        f"note: the images of {phi.folder} want its adapter vision: it is served for text alone; "
        f"--adapter vision={beside} reads them"
    ]


def test_only_a_folder_shows_that_the_weights_have_the_adapter(phi: Seeing, tmp_path: Path) -> None:
    merged_into = tmp_path / "merged"
    shutil.copytree(phi.folder, merged_into, ignore=shutil.ignore_patterns("vision-lora"))

    def told(**hub: Any) -> tuple[bool, list[str]]:
        notes: list[str] = []
        source = ModelSource("a/phi", merged_into, **hub)
        context: Any = SimpleNamespace(source=source, options={}, report=notes.append)
        return lacks_adapter(context), notes

    alone = "note: there is no vision-lora beside the weights of a/phi: its images are read with"
    assert told() == (False, [f"{alone} these alone"])
    # Files in folders are not downloaded.
    wanted = "note: the images of a/phi want its adapter vision: it is served for text alone;"
    unseen = f"{wanted} --adapter vision=FOLDER/vision-lora reads them"
    assert told(repo_id="a/phi", revision="0" * 40) == (True, [unseen])


def test_an_adapter_that_changes_how_images_are_embedded_is_refused(
    phi: Seeing, tmp_path: Path
) -> None:
    folder = save_adapter(tmp_path / "vision", phi.model, targets=("img_projection_up",))
    with pytest.raises(ModelSourceError, match="the adapter vision"):
        llmserve.build("hf", str(phi.folder), output=tmp_path / "repo", adapters=f"vision={folder}")


def test_what_makes_crops_otherwise_is_refused_by_the_build(phi: Seeing, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(phi.folder, source)
    shutil.rmtree(source / "vision-lora")
    file = source / "preprocessor_config.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"resample": 3', '"resample": 2'))
    with pytest.raises(ModelSourceError, match="images with resample 2 are not read"):
        llmserve.build("hf", str(source), output=tmp_path / "repo")
