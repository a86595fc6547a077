"""A graph in ONNX's form that Triton's own backend runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import llmserve
from llmserve.errors import LLMServeError
from llmserve.plugin import check_repository
from llmserve.testing import read_config
from llmserve.testing.tiny_encoders import CONTEXT, save_classifier, save_encoder, save_graph
from llmserve_embed.graph import POOLINGS, GraphNetwork
from llmserve_embed.network import TorchNetwork, logits, pooled


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = save_encoder(tmp_path_factory.mktemp("graph") / "model")
    save_graph(model)
    (model / "model.safetensors").unlink()
    return model


def build(model: Path, folder: Path, recipe: str = "embed", **options: Any) -> Any:
    options.setdefault("generator", "encoder-onnx" if recipe == "embed" else "classifier-onnx")
    return llmserve.build(recipe, str(model), name="m", output=folder / "repository", **options)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_poolings_are_those_of_torch(pooling: str) -> None:
    states = np.random.default_rng(3).normal(size=(4, 7, 5)).astype(np.float32)
    mask = (np.arange(7) < np.array([[7], [1], [3], [6]])).astype(np.int64)
    output = SimpleNamespace(last_hidden_state=torch.from_numpy(states))
    expected = pooled(pooling)(output, torch.from_numpy(mask)).numpy()
    found = POOLINGS[pooling](states, mask)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_graph_is_a_model_beside_the_one_that_answers(encoder: Path, tmp_path: Path) -> None:
    build(encoder, tmp_path, device="cuda:1")
    repository = tmp_path / "repository"
    assert {path.parent.name for path in repository.glob("*/config.pbtxt")} == {
        "m", "m_graph"
    }  # fmt: skip
    config = read_config(repository / "m_graph")
    assert (config.backend, config.default_model_filename) == ("onnxruntime", "model.onnx")
    assert (repository / "m_graph" / "1" / "model.onnx").is_file()
    assert [(tensor.name, [*tensor.dims]) for tensor in config.output] == [
        ("last_hidden_state", [-1, 32])
    ]
    assert [*config.instance_group[0].gpus] == [1]
    assert config.max_batch_size == read_config(repository / "m").max_batch_size == 256
    assert read_config(repository / "m").parameters["llmserve.task"].string_value == "embed"
    manifest = json.loads((repository / "m" / "llmserve.json").read_text())
    assert (manifest["parts"], manifest["backends"]) == (["m_graph"], ["onnxruntime"])
    settings = manifest["components"]["generator"]["settings"]
    assert settings["graph"] == {
        "model": "m_graph",
        "device": "cuda:1",
        "inputs": dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), "int64"),
        "output": "last_hidden_state",
    }
    assert settings["max_length"] == CONTEXT
    assert not check_repository(repository, quick=True)


def test_without_a_batch_dimension_the_graph_has_one_of_its_own(
    encoder: Path, tmp_path: Path
) -> None:
    build(encoder, tmp_path, max_batch_size=0)
    config = read_config(tmp_path / "repository" / "m_graph")
    assert {(each.name, tuple(each.dims)) for each in (*config.input, *config.output)} == {
        ("input_ids", (-1, -1)),
        ("attention_mask", (-1, -1)),
        ("token_type_ids", (-1, -1)),
        ("last_hidden_state", (-1, -1, 32)),
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"file": "onnx/other.onnx"}, "has no file 'onnx/other.onnx' in ONNX's form"),
        ({"file": "model.xml"}, "has no file 'model.xml' in ONNX's form"),
        ({"file": ""}, "has no file '' in ONNX's form"),
        ({"device": "tpu"}, "device cannot be 'tpu'"),
        # Before a large file is copied.
        ({"device": "tpu", "file": "onnx/damaged.onnx"}, "device cannot be 'tpu'"),
        ({"file": "onnx/damaged.onnx"}, "onnx/damaged.onnx of .* cannot be read"),
    ],
)
def test_what_cannot_be_built_is_refused(
    encoder: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    (encoder / "onnx" / "damaged.onnx").write_bytes(b"no graph")
    with pytest.raises(LLMServeError, match=words) as error:
        build(encoder, tmp_path, **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "repository").exists()


def tensor(name: str, kind: str, *shape: Any) -> Any:
    return SimpleNamespace(name=name, type=f"tensor({kind})", shape=[*shape])


IDS = tensor("input_ids", "int64", "batch", "tokens")
MASK = tensor("attention_mask", "int64", None, None)
STATES = tensor("last_hidden_state", "float", "batch", "tokens", 8)
POOLED = tensor("pooler_output", "float", "batch", 8)
LOGITS = tensor("logits", "float", "batch", 3)


@pytest.mark.parametrize(
    ("inputs", "outputs", "pools", "words"),
    [
        ([IDS, MASK, tensor("pixels", "float", 1)], [STATES], True, "it reads pixels"),
        ([IDS], [STATES], True, "it does not read attention_mask"),
        ([IDS, tensor("attention_mask", "int64", 1, 128)], [STATES], True, "of one shape only"),
        ([IDS, tensor("attention_mask", "bool", None, None)], [STATES], True, r"type tensor\(bool"),
        ([IDS, MASK], [LOGITS], True, "no output of vectors of tokens"),
        ([IDS, MASK], [STATES, POOLED], False, "no output of logits"),
    ],
)
def test_a_graph_for_something_else_is_refused(
    inputs: list[Any], outputs: list[Any], pools: bool, words: str
) -> None:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    from llmserve_embed.native import declare

    session = SimpleNamespace(get_inputs=lambda: inputs, get_outputs=lambda: outputs)
    with pytest.raises(ValueError, match=words):
        declare(ModelConfig(), session, pools=pools)


def test_the_output_that_is_named_logits_goes_before_others() -> None:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    from llmserve_embed.native import declare

    config = ModelConfig(max_batch_size=8)
    session = SimpleNamespace(
        get_inputs=lambda: [IDS, tensor("attention_mask", "int32", None, None)],
        get_outputs=lambda: [POOLED, STATES, LOGITS],
    )
    assert declare(config, session, pools=False) == {
        "inputs": {"input_ids": "int64", "attention_mask": "int32"},
        "output": "logits",
    }
    assert [(each.name, [*each.dims]) for each in config.output] == [("logits", [3])]


def test_what_the_graph_reports_fails_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    class Request:
        def __init__(self, **fields: Any) -> None:
            sent.append(fields)

        def exec(self) -> Any:
            error = SimpleNamespace(message=lambda: "out of memory")
            return SimpleNamespace(has_error=lambda: True, error=lambda: error)

    backend = SimpleNamespace(
        InferenceRequest=Request,
        Tensor=lambda name, rows: (name, rows.dtype.name),
        PreferredMemory=lambda kind: kind,
        TRITONSERVER_MEMORY_CPU=0,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    graph = {
        "model": "m_graph", "device": "cpu", "output": "logits",
        "inputs": {"input_ids": "int64", "attention_mask": "int32"},
    }  # fmt: skip
    network = GraphNetwork({"padding": 0, "graph": graph})
    rows = np.ones((2, 3), np.int64)
    with pytest.raises(Exception, match="out of memory"):
        network(rows, rows, rows)
    assert sent[0]["inputs"] == [("input_ids", "int64"), ("attention_mask", "int32")]


def test_a_classifier_has_logits_and_no_pooling(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "model", num_labels=3)
    save_graph(model)
    build(model, tmp_path, "classify")
    config = read_config(tmp_path / "repository" / "m_graph")
    assert [(each.name, [*each.dims]) for each in config.output] == [("logits", [3])]


def test_a_pass_on_a_gpu_costs_what_it_costs_torch_there() -> None:
    graph = {"model": "m_graph", "inputs": {}, "output": "logits"}
    model: Any = SimpleNamespace(
        device=torch.device("meta"), forward=lambda: None,
        config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(), model_type="bert"),
    )  # fmt: skip
    costs = {
        device: GraphNetwork({"padding": 0, "graph": {**graph, "device": device}}).pass_cost
        for device in ("cpu", "cuda", "cuda:1")
    }
    on_gpu = TorchNetwork(model, logits, 0).pass_cost
    assert costs == {"cpu": 64, "cuda": on_gpu, "cuda:1": on_gpu}
    assert on_gpu > 1000
