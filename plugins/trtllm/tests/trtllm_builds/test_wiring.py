"""Tests of the wiring between the models in each kind of build, and that all builds would load.

If a change alters the configurations in ``golden`` on purpose, run this file with ``REWRITE=1``
and review the difference.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import llmserve
from llmserve.errors import LLMServeError
from llmserve.plugin import check_repository
from llmserve.testing import read_config, run
from llmserve.testing.tiny_adapters import save_adapter
from llmserve.testing.tiny_models import make_model
from llmserve_trtllm.refusals import refused_requests
from llmserve_trtllm.versions import CONTAINERS, Version, container_of, unread

from .building import DEFAULTS, ENGINES, build, cases, engine_of, steps
from .conftest import Built

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("0.5.0", {"batching": "static"}),
    ("0.5.0", {"decoupled": True}),
    ("0.19.0", {"decoupled": False, "bls": True}),
    ("0.19.0", {}),
    ("1.2.1", {}),
    ("1.2.1", {"stream_through": "ensemble", "bls": True}),
    ("1.2.1", {"decoupled": False, "prompt_embedding_table_data_type": "TYPE_BF16"}),
    ("1.2.1", {"prompt_embedding_table_data_type": "TYPE_FP32"}),
    ("1.2.1", {"layout": "llmapi"}),
    ("1.2.1", {"layout": "llmapi", "batching": "static", "decoupled": True}),
    ("1.2.1", {"layout": "llmapi", "max_batch_size": 0}),
    ("1.2.1", {"layout": "llmapi", "max_batch_size": 0, "decoupled": False}),
]


@pytest.mark.parametrize(("version", "options"), VARIANTS)
def test_all_builds_pass_the_check(tmp_path: Path, version: str, options: dict[str, Any]) -> None:
    build(tmp_path, version, **options)
    # As in the tutorial, the same repository also contains a model in PyTorch.
    if version == "0.5.0":
        repository = tmp_path / version
        llmserve.build("hf", "demo", name="llama_python", output=repository, layout="tutorial")
    assert check_repository(tmp_path / version) == []


def test_a_streaming_ensemble_uses_the_bls_model(built: Built) -> None:
    configs = built("1.2.1", bls_instance_count=6)
    assert list(steps(configs)) == ["tensorrt_llm_bls"]
    assert configs["tensorrt_llm"].model_transaction_policy.decoupled
    assert configs["tensorrt_llm_bls"].model_transaction_policy.decoupled
    assert [group.count for group in configs["tensorrt_llm_bls"].instance_group] == [6]
    exchange = configs["ensemble"].parameters["llmserve.exchange"].string_value
    assert exchange == "stream"


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 64), ({"max_batch_size": 48}, 48),
     ({"layout": "llmapi"}, 16), ({"layout": "llmapi", "max_batch_size": 24}, 24),
     ({"batching": "static", "layout": "llmapi", "decoupled": True}, 32)],
)  # fmt: skip
def test_each_request_of_the_engines_batch_has_an_instance_of_the_bls_model(
    built: Built, options: dict[str, Any], count: int
) -> None:
    configs = built("1.2.1", **options)
    assert [group.count for group in configs["tensorrt_llm_bls"].instance_group] == [count]
    assert configs["tensorrt_llm"].max_batch_size == count


def test_processes_that_nobody_asked_for_are_bounded(tmp_path: Path) -> None:
    engine = engine_of(tmp_path / "engine", "1.2.1", {"build_config.max_batch_size": 2048})
    done = run(
        "build", "--plugin", "trtllm", "--model", "demo", "--name", "ensemble",
        "--output", str(tmp_path / "r"), "--engine", str(engine), "--verbose",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sizes = {
        name: read_config(tmp_path / "r" / name)
        for name in ("ensemble", "tensorrt_llm", "tensorrt_llm_bls")
    }
    assert sizes["ensemble"].max_batch_size == sizes["tensorrt_llm"].max_batch_size == 2048
    assert [group.count for group in sizes["tensorrt_llm_bls"].instance_group] == [64]
    assert "2048 requests at once, and 64 of them through tensorrt_llm_bls" in done.stderr


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_llm_apis_model_can_be_unbatched_like_nvidias(built: Built, decoupled: bool) -> None:
    configs = built("1.2.1", layout="llmapi", max_batch_size=0, decoupled=decoupled)
    assert list(steps(configs)) == ["tensorrt_llm_bls"]
    sizes = {name: config.max_batch_size for name, config in configs.items()}
    inside = dict.fromkeys(("preprocessing", "tensorrt_llm", "postprocessing"), 16)
    assert sizes == {"ensemble": 0, "tensorrt_llm_bls": 0, **inside}
    for name in ("tensorrt_llm", "tensorrt_llm_bls"):
        assert configs[name].model_transaction_policy.decoupled == decoupled
    assert [group.count for group in configs["tensorrt_llm_bls"].instance_group] == [16]
    dims = {tensor.name: list(tensor.dims) for tensor in configs["ensemble"].input}
    assert (dims["text_input"], dims["sampling_param_max_tokens"]) == ([-1], [1])


def test_in_nvidias_wiring_no_tensor_bypasses_a_decoupled_engine(built: Built) -> None:
    configs = built("1.2.1", stream_through="ensemble")
    wired = steps(configs)
    assert list(wired) == ["preprocessing", "tensorrt_llm", "postprocessing"]
    engine_outputs = set(wired["tensorrt_llm"].output_map.values())
    assert set(wired["postprocessing"].input_map.values()) <= engine_outputs
    # Through preprocessing, which also reads it from request parameters.
    assert wired["preprocessing"].output_map["OUT_STREAM"] == "_OUT_STREAM"
    assert wired["tensorrt_llm"].input_map["streaming"] == "_OUT_STREAM"
    assert "finish_reason" not in {tensor.name for tensor in configs["ensemble"].output}


@pytest.mark.parametrize(
    ("version", "options", "refused"),
    [
        ("0.5.0", {}, ["bad_words", "presence_penalty"]),
        ("0.5.0", {"decoupled": True}, ["bad_words", "presence_penalty", "stop_words"]),
        ("0.19.0", {}, []),
    ],
)
def test_requests_that_a_version_cannot_run_are_refused(
    built: Built, version: str, options: dict[str, Any], refused: list[str]
) -> None:
    assert sorted(refused_requests({**DEFAULTS, **options}, Version.parse(version))) == refused
    # What is refused is read by a model that refuses it, and does not reach the engine directly.
    configs = built(version, **options)
    wired = steps(configs)
    for name in refused if "preprocessing" in wired else ():
        assert name in wired["preprocessing"].input_map.values()
        assert name not in wired["tensorrt_llm"].input_map.values()


def test_0_5_0_streams_as_in_nvidias_template(built: Built) -> None:
    wired = steps(built("0.5.0", decoupled=True))
    assert list(wired) == ["preprocessing", "tensorrt_llm", "postprocessing"]
    assert wired["tensorrt_llm"].input_map["streaming"] == "_OUT_STREAM"
    assert dict(wired["postprocessing"].input_map) == {"TOKENS_BATCH": "_TOKENS_BATCH"}


@pytest.mark.parametrize(
    ("version", "options", "streams"),
    [("0.5.0", {}, False), ("0.19.0", {}, True), ("0.19.0", {"decoupled": False}, False),
     ("0.19.0", {"batching": "static"}, False)],
)  # fmt: skip
def test_in_flight_batching_streams_by_default(
    built: Built, version: str, options: dict[str, Any], streams: bool
) -> None:
    engine = built(version, **options)["tensorrt_llm"]
    assert engine.model_transaction_policy.decoupled == streams


def test_parts_are_named_after_the_build_unless_it_has_nvidias_name(tmp_path: Path) -> None:
    engine = str(ENGINES / "1.2")
    llmserve.build("trtllm", "demo", output=tmp_path, engine=engine, decoupled=False)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        "demo", "demo_preprocessing", "demo_tensorrt_llm", "demo_postprocessing",
    }  # fmt: skip


# No container is known for versions older than 1.0 and newer than 0.21.
@pytest.mark.parametrize(("version", "image"), [("0.19.0", "25.05"), ("0.22.0", "")])
def test_the_container_is_that_of_the_version(tmp_path: Path, version: str, image: str) -> None:
    build(tmp_path, version)
    expected = f"nvcr.io/nvidia/tritonserver:{image}-trtllm-python-py3" if image else "${IMAGE}"
    for folder in (tmp_path / version, tmp_path / version / "ensemble"):
        text = (folder / "Dockerfile").read_text()
        assert f"FROM {expected}" in text
        assert all(word in text for word in ("--no-deps", "llmserve-trtllm==", "pluggy=="))
        assert "transformers==" not in text


@pytest.mark.parametrize("tag", CONTAINERS)
def test_the_container_that_is_named_is_the_one_that_is_used(tag: str) -> None:
    expected = f"nvcr.io/nvidia/tritonserver:{tag}-trtllm-python-py3"
    for name in (tag, f"{tag}-trtllm-python-py3", expected):
        assert container_of(CONTAINERS[tag], name) == expected


@pytest.mark.parametrize(
    ("container", "version", "image"),
    [
        ("25.09", "", "nvcr.io/nvidia/tritonserver:25.09-trtllm-python-py3"),
        ("26.03", "1.2.1", "nvcr.io/nvidia/tritonserver:26.03-trtllm-python-py3"),
        ("example.com/team/engine:25.09-2", "", "example.com/team/engine:25.09-2"),
        # Patches of a release may have another TensorRT, so the exact one comes first.
        ("", "1.0.0", "nvcr.io/nvidia/tritonserver:25.10-trtllm-python-py3"),
        ("", "1.0.3", "nvcr.io/nvidia/tritonserver:25.11-trtllm-python-py3"),
        ("", "1.2.0", "nvcr.io/nvidia/tritonserver:26.03-trtllm-python-py3"),
        ("", "1.2.5", "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"),
    ],
)
def test_both_dockerfiles_are_based_on_the_container_that_was_chosen(
    tmp_path: Path, container: str, version: str, image: str
) -> None:
    options: dict[str, Any] = {"layout": "llmapi", "container": container}
    options["trtllm_version"] = version
    result = llmserve.build("trtllm", "demo", name="e", output=tmp_path / "r", **options)
    assert result.manifest.image == image
    for folder in (tmp_path / "r", tmp_path / "r" / "e"):
        assert f"FROM {image}\n" in (folder / "Dockerfile").read_text()


@pytest.mark.parametrize(
    "container",
    [
        "26.08",
        "99.01",
        "nvcr.io/nvidia/tritonserver:25.09-py3",
        "25.09-vllm-python-py3",
        "x y:25.09",
    ],
)  # fmt: skip
def test_a_container_without_tensorrt_llm_is_refused_by_its_name(
    tmp_path: Path, container: str
) -> None:
    with pytest.raises(LLMServeError, match=re.escape(repr(container))):
        llmserve.build(
            "trtllm", "demo", output=tmp_path / "r", layout="llmapi", container=container
        )
    assert not (tmp_path / "r").exists()


def test_an_image_of_a_later_version_is_no_triton_that_cannot_be_closed(tmp_path: Path) -> None:
    done = run(
        "build", "--plugin", "trtllm", "--model", "demo", "--name", "e", "--output", str(tmp_path),
        "--layout", "llmapi", "--trtllm-version", "1.3.0", "--verbose",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for folder in (tmp_path, tmp_path / "e"):
        text = (folder / "Dockerfile").read_text()
        assert "FROM ${IMAGE}" in text
        assert "--http-restricted-api" in text
        assert "--http-address" not in text
    assert "--network host" not in done.stdout
    assert "nothing of NVIDIA's files after TensorRT-LLM 1.2.0 was read" in done.stderr


@pytest.mark.parametrize(
    ("options", "triton"),
    [
        ({}, ""),
        ({"container": "25.11"}, ""),
        ({"container": "25.10"}, "Triton 25.10"),
        ({"trtllm_version": "1.3.0"}, "Triton 25.08"),
    ],
)
def test_the_steps_of_an_ensemble_are_bounded_where_triton_can(
    tmp_path: Path, options: dict[str, Any], triton: str
) -> None:
    both: dict[str, Any] = {"layout": "llmapi", "stream_through": "ensemble", **options}
    both["max_inflight_requests"] = 9
    if triton:
        with pytest.raises(LLMServeError, match=f"{triton} may have no max_inflight_requests"):
            llmserve.build("trtllm", "demo", output=tmp_path / "r", **both)
        return
    result = llmserve.build("trtllm", "demo", output=tmp_path / "r", **both)
    assert read_config(result.folder).ensemble_scheduling.max_inflight_requests == 9


@pytest.mark.parametrize(
    ("version", "known"), [("0.5", True), ("0.19", True), ("0.20", False), ("1.0", False),
                           ("1.1", False), ("1.2.1", True), ("1.3", False)],
)  # fmt: skip
def test_versions_whose_files_nobody_read_say_so(version: str, known: bool) -> None:
    assert (unread(Version.parse(version)) == "") == known


@pytest.mark.parametrize(("version", "options", "message"), cases("refused builds"))
def test_invalid_builds_are_refused_and_nothing_is_written(
    tmp_path: Path, version: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LLMServeError, match=message) as caught:
        build(tmp_path, version, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / version).exists()


@pytest.mark.parametrize(
    ("version", "options", "message"),
    [
        ("1.2.1", {}, "an engine takes no adapters by name.*layout=llmapi"),
        ("1.0.3", {"layout": "llmapi"}, r"1\.0\.3 cannot load an adapter again.*1\.1\.0 or later"),
        # TensorRT-LLM would leave out what an adapter adds, without a word.
        ("1.2.1", {"layout": "llmapi"}, "may leave out what adapters add to gpt2 models.*merge"),
    ],
)
def test_adapters_that_would_be_left_out_are_refused(
    tmp_path: Path, version: str, options: dict[str, Any], message: str
) -> None:
    folder = save_adapter(tmp_path / "one", make_model("gpt2"), targets=("c_attn",))
    with pytest.raises(LLMServeError, match=message):
        build(tmp_path, version, adapters=f"sql={folder}", **options)
    assert not (tmp_path / version).exists()


@pytest.mark.parametrize(
    ("version", "options", "takes"),
    [("1.2.1", {"layout": "llmapi"}, True), ("1.0.3", {"layout": "llmapi"}, False),
     ("1.2.1", {}, False), ("1.2.1", {"stream_through": "ensemble"}, False),
     ("1.2.1", {"layout": "llmapi", "stream_through": "ensemble"}, True)],
)  # fmt: skip
def test_a_model_has_the_input_for_adapters_if_it_takes_any(
    built: Built, version: str, options: dict[str, Any], takes: bool
) -> None:
    configs = built(version, **options)
    having = {
        name
        for name, config in configs.items()
        if {"adapter", "ADAPTER"} & {tensor.name for tensor in config.input}
    }
    expected = {"ensemble", "preprocessing", "tensorrt_llm"} & configs.keys() if takes else set()
    assert having - {"tensorrt_llm_bls"} == expected
    assert ("tensorrt_llm_bls" in having) == (takes and "tensorrt_llm_bls" in configs)
    wired = steps(configs)
    if takes and "preprocessing" in wired:
        assert wired["preprocessing"].input_map["ADAPTER"] == "adapter"
        assert wired["preprocessing"].output_map["OUT_ADAPTER"] == "_OUT_ADAPTER"
        assert wired["tensorrt_llm"].input_map["adapter"] == "_OUT_ADAPTER"


def test_each_kind_of_batching_has_its_own_parameters(built: Built) -> None:
    def values(**options: Any) -> list[str]:
        parameters = built("0.19.0", decoupled=False, **options)["tensorrt_llm"].parameters
        return [
            parameters[key].string_value for key in ("gpt_model_type", "batch_scheduler_policy")
        ]

    assert values(batching="static") == ["V1", "guaranteed_no_evict"]
    assert values(scheduler="max_utilization") == ["inflight_fused_batching", "max_utilization"]


GOLDEN = Path(__file__).with_name("golden")
ENGINE_AT: dict[str, Any] = {"engine_at": "/engines/demo"}
BUILDS: dict[str, tuple[str, dict[str, Any]]] = {
    "0.5.0-static": ("0.5.0", {**ENGINE_AT, "batching": "static"}),
    "0.19": ("0.19.0", {**ENGINE_AT, "decoupled": False}),
    "1.2-decoupled": ("1.2.1", ENGINE_AT),
    "1.2-llmapi-static": ("1.2.1", {"layout": "llmapi", "batching": "static"}),
}


@pytest.mark.parametrize("name", BUILDS)
def test_golden_files_match_the_build(tmp_path: Path, name: str) -> None:
    version, options = BUILDS[name]
    configs = build(tmp_path, version, **options)
    if os.environ.get("REWRITE"):
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        for model in configs:
            (GOLDEN / name / model).mkdir(parents=True)
            text = compared(tmp_path / version / model)
            (GOLDEN / name / model / "config.pbtxt").write_text(text, encoding="utf-8")
    assert {path.name for path in (GOLDEN / name).iterdir()} == configs.keys()
    for model in configs:
        assert compared(tmp_path / version / model) == compared(GOLDEN / name / model)


def compared(model: Path) -> str:
    """Return a configuration without the fingerprint, which depends on versions of packages."""
    text = (model / "config.pbtxt").read_text(encoding="utf-8")
    return re.sub(r'(?<=")fp_[a-z0-9-]+', "", text)
