"""What a build reads from a model's files, and what it refuses."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import llmserve
from llmserve.errors import IncompatibleError, LLMServeError, OptionError
from llmserve.plugin import Needs, Registry, check_repository, demo_model_path
from llmserve.testing import read_config
from llmserve.testing.needs import plan_needs, read_size
from llmserve.testing.tiny_encoders import CONTEXT, save_classifier, save_encoder, write


def build(recipe: str, model: Path, folder: Path, **options: Any) -> Any:
    """Build with transformers, which converts nothing."""
    name = options.pop("name", "m")
    if recipe != "hf":
        options.setdefault("generator", "encoder" if recipe == "embed" else "classifier")
    return llmserve.build(recipe, str(model), name=name, output=folder / "repository", **options)


def settings(result: Any, role: str) -> Any:
    return result.manifest.components[role]["settings"]


def test_a_plain_transformer_is_pooled_by_the_mean(tmp_path: Path) -> None:
    result = build("embed", save_encoder(tmp_path / "model"), tmp_path)
    assert settings(result, "generator")["pooling"] == "mean"
    assert settings(result, "generator")["max_length"] == CONTEXT
    assert settings(result, "formatter") == {"size": 32, "dimensions": 0, "normalize": False}
    assert result.manifest.task == "embed"
    config = read_config(result.folder)
    assert config.parameters["llmserve.task"].string_value == "embed"
    inputs = {entry.name for entry in config.input}
    assert {"text_input", "truncate", "dimensions", "normalize", "input_ids"} <= inputs
    assert inputs.isdisjoint({"max_tokens", "stop_words", "messages", "temperature"})
    assert not check_repository(tmp_path / "repository")


@pytest.mark.parametrize(
    ("mode", "pooling"),
    [("mean_tokens", "mean"), ("cls_token", "cls"), ("lasttoken", "last"), ("max_tokens", "max")],
)
def test_the_layout_of_sentence_transformers_is_read(
    tmp_path: Path, mode: str, pooling: str
) -> None:
    model = save_encoder(
        tmp_path / "model",
        pooling=mode,
        sentence_bert_config={"max_seq_length": 20, "do_lower_case": True},
        config_sentence_transformers={
            "prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"
        },
        # Some models have lists in files of such names.
        data_config=[{"name": "texts"}],
    )  # fmt: skip
    result = build("embed", model, tmp_path)
    assert settings(result, "generator")["pooling"] == pooling
    assert settings(result, "generator")["max_length"] == 20
    assert settings(result, "formatter")["normalize"] is True
    tokenizer = settings(result, "tokenizer")
    assert tokenizer["lowercase"] is True
    assert (tokenizer["prompts"], tokenizer["default_prompt"]) == ({"query": "query: "}, "query")
    chosen = build(
        "embed", model, tmp_path, name="n", pooling="cls", normalize="false", max_length=10,
        dimensions=16,
    )  # fmt: skip
    assert settings(chosen, "generator")["pooling"] == "cls"
    assert settings(chosen, "generator")["max_length"] == 10
    assert settings(chosen, "formatter") == {"size": 32, "dimensions": 16, "normalize": False}


@pytest.mark.parametrize("most", [1, 4])
def test_a_limit_without_place_for_a_text_is_refused(tmp_path: Path, most: int) -> None:
    model = save_encoder(tmp_path / "model")
    with pytest.raises(OptionError, match="leave no place for its texts: give at least 5"):
        build("embed", model, tmp_path, max_length=most)
    assert settings(build("embed", model, tmp_path, max_length=5), "generator")["max_length"] == 5


def test_positions_behind_the_padding_token_are_counted(tmp_path: Path) -> None:
    model = save_encoder(tmp_path / "model", "roberta")
    write(model / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    result = build("embed", model, tmp_path)
    assert settings(result, "generator")["max_length"] == CONTEXT


def damage(model: Path, change: str) -> None:
    pooling = model / "1_Pooling" / "config.json"
    if change == "dense":
        kinds = ["Transformer", "Pooling", "Dense"]
        written = [{"type": f"sentence_transformers.models.{k}", "path": ""} for k in kinds]
        write(model / "modules.json", written)
    elif change == "modules":
        write(model / "modules.json", {"no": "list"})
    elif change == "folder":
        kind = "sentence_transformers.models.Transformer"
        write(model / "modules.json", [{"type": kind, "path": "0_Transformer"}])
    elif change == "no pooling":
        pooling.unlink()
    elif change == "two poolings":
        write(pooling, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True})
    elif change == "other pooling":
        write(pooling, {"pooling_mode_weightedmean_tokens": True})
    elif change == "prompts":
        write(model / "config_sentence_transformers.json", {"prompts": {"query": 3}})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("dense", "Transformer, Pooling, Dense"),
        ("modules", "is not a list of modules"),
        ("folder", "in the folder 0_Transformer"),
        ("no pooling", "cannot be read"),
        ("two poolings", "pooling that is not supported"),
        ("other pooling", "pooling that is not supported"),
        ("prompts", "not texts by name"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, change: str, words: str) -> None:
    model = save_encoder(tmp_path / "model", pooling="mean_tokens")
    damage(model, change)
    with pytest.raises(LLMServeError, match=words):
        build("embed", model, tmp_path)


def test_models_of_another_kind_are_refused(tmp_path: Path) -> None:
    encoder = save_encoder(tmp_path / "encoder")
    three = save_classifier(tmp_path / "three", num_labels=3)
    # Of a type that generates text, and without the head for it.
    decoder = Path(shutil.copytree(demo_model_path(), tmp_path / "decoder"))
    config = json.loads((decoder / "config.json").read_text())
    config["architectures"] = ["GPT2ForSequenceClassification"]
    (decoder / "config.json").write_text(json.dumps(config))
    for recipe, model, words, hint in (
        ("hf", decoder, "not a causal language model", "--plugin classify or rerank"),
        ("hf", encoder, "not a causal language model: it is BertModel", "--plugin embed"),
        ("hf", three, "not a causal language model", "--plugin classify or rerank"),
        ("rerank", encoder, "not a model that labels texts: it is BertModel", "--plugin embed"),
        ("embed", three, "not a model that makes embeddings", "--plugin classify or rerank"),
        ("rerank", three, "tells 3 labels apart", "--formatter labels"),
    ):
        with pytest.raises(LLMServeError, match=words) as error:
            build(recipe, model, tmp_path)
        assert error.value.hint == f"build it with {hint}"


def test_components_for_other_answers_are_refused(tmp_path: Path) -> None:
    encoder = save_encoder(tmp_path / "encoder")
    for options, hint in (
        ({"formatter": "text"}, "choose one of embedding"),
        ({"formatter": "scores"}, "choose one of embedding"),
        ({"generator": "classifier"}, "choose one of labels, scores"),
    ):
        with pytest.raises(IncompatibleError) as error:
            build("embed", encoder, tmp_path, **options)
        assert error.value.hint == hint


@pytest.mark.parametrize("name", ["max_tokens", "stream", "chat", "echo"])
def test_options_of_text_are_none_of_these_builds(tmp_path: Path, name: str) -> None:
    with pytest.raises(LLMServeError, match=f"no option '{name}'"):
        build("embed", save_encoder(tmp_path / "encoder"), tmp_path, **{name: 1})


@pytest.mark.parametrize(
    ("config", "sigmoid"),
    [
        ({}, True),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}, True),
    ],
)
def test_scores_are_made_as_the_model_says(
    tmp_path: Path, config: dict[str, Any], sigmoid: bool
) -> None:
    model = save_classifier(tmp_path / "model", num_labels=1, **config)
    assert settings(build("rerank", model, tmp_path), "formatter") == {"sigmoid": sigmoid}
    pair = next(
        e for e in read_config(tmp_path / "repository" / "m").input if e.name == "text_pair"
    )
    assert not pair.optional


def test_what_sentence_transformers_6_saves_goes_before_config_json(tmp_path: Path) -> None:
    model = save_classifier(
        tmp_path / "model", num_labels=1, sbert_ce_default_activation_function="torch.nn.Sigmoid"
    )
    saved = {"activation_fn": "torch.nn.modules.linear.Identity"}
    write(model / "config_sentence_transformers.json", saved)
    assert settings(build("rerank", model, tmp_path), "formatter") == {"sigmoid": False}
    write(model / "config_sentence_transformers.json", {"activation_fn": None})
    built = build("rerank", model, tmp_path, name="n")
    assert settings(built, "formatter") == {"sigmoid": True}


def test_labels_have_the_models_names(tmp_path: Path) -> None:
    names = {0: "no", 1: "perhaps", 2: "yes"}
    model = save_classifier(tmp_path / "model", id2label=names, label2id={})
    formatter = settings(build("classify", model, tmp_path), "formatter")
    assert formatter == {"labels": ["no", "perhaps", "yes"], "several": False}
    several = settings(build("classify", model, tmp_path, name="n", labels="several"), "formatter")
    assert several["several"]


def test_openvino_is_taken_where_it_is_and_computes_on_the_cpu(tmp_path: Path) -> None:
    openvino = find_spec("openvino") and not Path("/dev/nvidiactl").exists()
    recipe = Registry.load().recipe("embed")
    assert recipe.generator == ("encoder-openvino" if openvino else "encoder")
    model = save_encoder(tmp_path / "model")
    with pytest.raises(OptionError) as error:
        build("embed", model, tmp_path, generator="encoder-openvino", device="cuda")
    assert error.value.hint == "choose transformers with --generator encoder"


def test_what_a_model_takes_is_known_before_it_is_converted(tmp_path: Path) -> None:
    model = save_encoder(tmp_path / "model")
    size = read_size(model)

    def needs(generator: str, **options: object) -> Needs:
        return plan_needs("embed", model, options, generator=generator)

    torch = needs("encoder", dtype="float32", device="cpu")
    whole = needs("encoder-openvino", dtype="float32")
    assert torch.weights == whole.weights == whole.mapped == 4 * size.parameters
    assert torch.cache == whole.cache == 0
    small = needs("encoder-openvino", weight_format="int8")
    assert small.disk == 2 * small.weights == 2 * size.parameters
    assert whole.instead == ({"weight_format": "int8"},)
    graph = needs("encoder-openvino", file="onnx/model.onnx")
    assert graph.build == graph.disk == 0
