"""The scripted vLLM has the names and arguments of the installed one."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any, get_args

import pytest

from . import scripted

pytest.importorskip("vllm", reason="only `make test-vllm` installs vLLM")


def real(module: str, name: str) -> Any:
    # The plugin's settings, with which it imports vLLM.
    importlib.import_module("llmserve_vllm.library")
    return getattr(importlib.import_module(module), name)


def names_of(function: Any) -> set[str]:
    return {name for name in inspect.signature(function).parameters if name != "self"}


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, content in scripted._MODULES.items() for name in content],
)
def test_every_name_is_there(module: str, name: str) -> None:
    assert real(module, name) is not None


def test_requests_have_the_same_options() -> None:
    params = real("vllm", "SamplingParams")
    assert {field.name for field in dataclasses.fields(scripted.SamplingParams)} <= {
        *params.__struct_fields__
    }
    forms = real("vllm.sampling_params", "StructuredOutputsParams")
    assert {field.name for field in dataclasses.fields(scripted.StructuredOutputsParams)} <= {
        field.name for field in dataclasses.fields(forms)
    }


def test_the_engine_takes_and_returns_the_same() -> None:
    engine = real("vllm.v1.engine.llm_engine", "LLMEngine")
    for name in (
        "add_request", "abort_request", "add_lora", "remove_lora", "step", "from_vllm_config",
    ):  # fmt: skip
        ours, theirs = getattr(scripted.LLMEngine, name), getattr(engine, name)
        assert names_of(ours) <= names_of(theirs), name
    ours, theirs = scripted.Renderer, real("vllm.renderers.base", "BaseRenderer")
    assert names_of(ours.render_cmpl) <= names_of(theirs.render_cmpl)
    for name in ("RequestOutput", "CompletionOutput"):
        fields = {field.name for field in dataclasses.fields(getattr(scripted, name))}
        assert fields <= names_of(real("vllm.outputs", name)), name
    adapters = {field.name for field in dataclasses.fields(scripted.LoRARequest)}
    assert adapters <= {*real("vllm.lora.request", "LoRARequest").__struct_fields__}
    logger = real("vllm.v1.metrics.loggers", "StatLoggerBase")
    assert names_of(scripted.StatLoggerBase.record) == names_of(logger.record)
    stats = {
        field.name for field in dataclasses.fields(real("vllm.v1.metrics.stats", "SchedulerStats"))
    }
    used = {"num_waiting_reqs", "num_skipped_waiting_reqs", "kv_cache_usage", "spec_decoding_stats"}
    assert used <= stats
    guesses = real("vllm.v1.spec_decode.metrics", "SpecDecodingStats")
    assert {"num_draft_tokens", "num_accepted_tokens"} <= {
        field.name for field in dataclasses.fields(guesses)
    }


def test_the_highest_ranks_are_those_that_vllm_takes() -> None:
    from llmserve_vllm.lora_limits import RANKS

    assert get_args(real("vllm.config.lora", "MaxLoRARanks")) == RANKS


def test_the_options_of_a_build_are_arguments_of_the_engine() -> None:
    from llmserve_vllm.options import _OURS, _TAKEN

    known = {
        field.name for field in dataclasses.fields(real("vllm.engine.arg_utils", "EngineArgs"))
    }
    assert {*_TAKEN, *_OURS} <= known


def test_the_scripted_configuration_has_what_is_read_of_a_real_one() -> None:
    config = scripted.EngineArgs().create_engine_config()
    model = real("vllm.config", "ModelConfig")
    for name in vars(config.model_config):
        found = hasattr(model, name) or name in {f.name for f in dataclasses.fields(model)}
        assert found, name
    cache = {field.name for field in dataclasses.fields(real("vllm.config", "CacheConfig"))}
    assert {*vars(config.cache_config)} <= cache
    scheduler = real("vllm.config", "SchedulerConfig")
    assert "max_num_seqs" in {field.name for field in dataclasses.fields(scheduler)}
