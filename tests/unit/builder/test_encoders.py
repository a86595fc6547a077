"""What is read of a model that makes embeddings, without a build."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.builder.causal import CLASSIFIER, ENCODER, check_kind
from llmserve.builder.encoders import encoder_layout, max_length, prepare_labels
from llmserve.builder.source import ModelSource
from llmserve.errors import ModelSourceError


def source(folder: Path, /, **files: Any) -> ModelSource:
    """Return a model of these files, each with its content; names have no suffix."""
    files.setdefault("config", {"architectures": ["BertModel"]})
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return ModelSource("model", folder)


def modules(*kinds: tuple[str, str]) -> list[dict[str, str]]:
    return [{"type": kind, "path": path} for kind, path in kinds]


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "last"),
        ({"architectures": ["Qwen2ForCausalLM"], "is_causal": True}, "last"),
        ({"architectures": ["Qwen2ForCausalLM"], "is_causal": False}, "mean"),
        ({"architectures": ["Qwen2Model"]}, "mean"),
        ({}, "mean"),
    ],
)
def test_a_decoder_without_modules_is_pooled_at_its_last_token(
    tmp_path: Path, config: dict[str, Any], pooling: str
) -> None:
    assert encoder_layout(source(tmp_path, config=config)).pooling == pooling


def test_a_decoder_with_modules_is_pooled_as_they_say(tmp_path: Path) -> None:
    model = source(
        tmp_path,
        config={"architectures": ["Qwen2ForCausalLM"]},
        modules=modules(
            ("sentence_transformers.models.Transformer", ""),
            ("sentence_transformers.models.Pooling", "1_Pooling"),
        ),
    )
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    assert encoder_layout(model).pooling == "mean"


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "xlnet"])
def test_texts_are_read_as_the_file_of_any_family_says(tmp_path: Path, family: str) -> None:
    named = {f"sentence_{family}_config": {"max_seq_length": 40, "do_lower_case": True}}
    layout = encoder_layout(source(tmp_path, **named))
    assert (layout.max_length, layout.lowercase) == (40, True)


@pytest.mark.parametrize(
    ("named", "tokenizers", "positions", "limit"),
    [
        (40, 20, 512, 40),
        (20, 40, 512, 20),
        (None, 40, 512, 40),
        (None, 1e30, 512, 512),
        # The model has no more positions, whatever is said.
        (600, 20, 512, 512),
        (None, None, None, None),
    ],
)
def test_the_limit_of_sentence_transformers_goes_before_the_tokenizers(
    tmp_path: Path, named: Any, tokenizers: Any, positions: Any, limit: int | None
) -> None:
    model = source(
        tmp_path,
        config={"architectures": ["BertModel"], "max_position_embeddings": positions},
        sentence_bert_config={"max_seq_length": named},
        tokenizer_config={"model_max_length": tokenizers},
    )
    assert max_length(model) == limit


TRANSFORMER = ("sentence_transformers.models.Transformer", "")


@pytest.mark.parametrize(
    "kinds",
    [
        [("custom_st.Transformer", ""), ("sentence_transformers.models.Pooling", "1_Pooling")],
        [TRANSFORMER, ("mine.sentence_transformers.Pooling", "1_Pooling")],
    ],
)
def test_modules_of_its_own_are_none_of_the_usual_ones(tmp_path: Path, kinds: Any) -> None:
    with pytest.raises(ModelSourceError, match=r"only Transformer, Pooling and Normalize are"):
        encoder_layout(source(tmp_path, modules=modules(*kinds)))


def test_the_modules_of_sentence_transformers_6_are_the_usual_ones(tmp_path: Path) -> None:
    names = (
        "sentence_transformers.base.modules.transformer.Transformer",
        "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        "sentence_transformers.base.modules.normalize.Normalize",
    )
    kinds = zip(names, ("", "1_Pooling", "2_Normalize"), strict=True)
    model = source(tmp_path, modules=modules(*kinds))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    layout = encoder_layout(model)
    assert (layout.pooling, layout.normalize) == ("cls", True)


@pytest.mark.parametrize("path", ["..", "../beside", "a/../../beside", "/absolute"])
def test_a_pooling_outside_the_model_is_refused(tmp_path: Path, path: str) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "config.json").write_text('{"pooling_mode": "cls"}')
    (tmp_path / "config.json").write_text('{"pooling_mode": "cls"}')
    (tmp_path / "model").mkdir()
    pooling = ("sentence_transformers.models.Pooling", path)
    with pytest.raises(ModelSourceError, match="outside the model's folder"):
        encoder_layout(source(tmp_path / "model", modules=modules(TRANSFORMER, pooling)))


def test_the_pooling_of_a_folder_in_a_folder_is_read_there(tmp_path: Path) -> None:
    for folder, pooling in (("b", "max"), ("a/b", "cls")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    named = ("sentence_transformers.models.Pooling", "a/b")
    model = source(tmp_path, modules=modules(TRANSFORMER, named))
    assert encoder_layout(model).pooling == "cls"


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["T5EncoderModel"], "is_encoder_decoder": False},
        {"architectures": ["T5Model"], "is_encoder_decoder": True},
        {"model_type": "t5", "is_encoder_decoder": True},
    ],
)
def test_a_model_with_an_encoder_and_a_decoder_makes_no_embeddings(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    with pytest.raises(ModelSourceError, match="has an encoder and a decoder"):
        check_kind(source(tmp_path, config=config), ENCODER, trust_remote_code=False)


def test_a_model_with_an_encoder_and_a_decoder_can_tell_classes_apart(tmp_path: Path) -> None:
    config = {"architectures": ["BartForSequenceClassification"], "is_encoder_decoder": True}
    check_kind(source(tmp_path, config=config), CLASSIFIER, trust_remote_code=False)


def labels(folder: Path, chosen: str, **config: Any) -> Any:
    model = source(folder, config=config)
    context: Any = SimpleNamespace(source=model, model="model", options={"labels": chosen})
    return prepare_labels(context)


def test_a_regression_has_no_probabilities_unless_it_is_chosen(tmp_path: Path) -> None:
    config = {"problem_type": "regression", "num_labels": 1}
    with pytest.raises(ModelSourceError, match="problem_type is regression") as error:
        labels(tmp_path, "auto", **config)
    assert "--plugin rerank --set activation=none" in str(error.value.hint)
    assert labels(tmp_path, "several", **config) == {"labels": ["LABEL_0"], "several": True}
    assert labels(tmp_path, "one", **config) == {"labels": ["LABEL_0"], "several": False}
