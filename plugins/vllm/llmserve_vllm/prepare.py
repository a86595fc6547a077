"""Places a model at build time, and returns its settings for the runtime."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from llmserve.plugin import (
    BuildContext,
    Container,
    OptionError,
    allowed,
    check_causal,
    near,
    place_adapters,
    place_instances,
    seeing_files,
    sees_images,
    take_images,
    tokenizer_files,
    weight_files,
)
from llmserve_vllm.options import chosen_args, other_args

IMAGE = "nvcr.io/nvidia/tritonserver:26.08-vllm-python-py3"
"""NVIDIA's newest image with vLLM among those whose Triton llmserve knows."""
BROUGHT = (
    "huggingface-hub", "llguidance", "numpy", "pillow", "safetensors", "tokenizers", "torch",
    "transformers", "vllm",
)  # fmt: skip
"""Packages that the image has for its vLLM: other versions of them may break it."""

# Printed by the Python that would serve the model, without loading anything but names.
_NAMES = """
import dataclasses, json
from vllm.engine.arg_utils import EngineArgs
print(json.dumps([field.name for field in dataclasses.fields(EngineArgs)]))
"""


def prepare(context: BuildContext) -> Mapping[str, Any]:
    source, options = context.source, context.options
    seeing = sees_images(source)
    limits = take_images(context) if seeing else {}
    if not seeing:
        check_causal(source, **allowed(context))
    others = other_args(options)
    _check_names(others, context)
    # One process drives all GPUs; another instance would want the same ones.
    place_instances(context.config, "auto", 1)
    context.container = Container(IMAGE, BROUGHT)
    weights = weight_files(source, pickle=bool(options["pickle"]))
    files = dict.fromkeys([*weights, *(seeing_files if seeing else tokenizer_files)(source)])
    placed = context.place(files, "model")
    place_adapters(context, "llmserve_vllm.generator:VllmGenerator", placed)
    return {
        **placed,
        **limits,
        "dtype": _dtype(str(options["dtype"]), source.config()),
        "device": options["device"],
        "engine_args": {**chosen_args(options), **others},
        "adapter_mb": options["adapter_mb"],
    }


def _dtype(chosen: str, config: Mapping[str, Any]) -> str:
    """Return the type to compute in: to vLLM, auto is 16 bits even if the checkpoint has 32."""
    text = config.get("text_config") or config
    stored = text.get("dtype") or text.get("torch_dtype")
    return "float32" if chosen == "auto" and stored in (None, "float32") else chosen


def _check_names(names: Collection[str], context: BuildContext) -> None:
    """Refuse arguments that the installed vLLM does not have."""
    if not names:
        return
    if find_spec("vllm") is None:
        context.report("vLLM is not installed here: its arguments are checked when it loads them")
        return
    known = _known_arguments()
    for name in names:
        if known and name not in known:
            raise OptionError(f"vLLM {_version()} has no {name}", hint=near(name, known))


def _known_arguments() -> list[str]:
    """Return the arguments of the installed engine; none if it cannot be imported.

    Importing vLLM takes seconds and changes settings of the process, so another process does.
    """
    done = subprocess.run(
        [sys.executable, "-c", _NAMES], capture_output=True, encoding="utf-8", check=False
    )
    lines = done.stdout.strip().splitlines()
    return list(json.loads(lines[-1])) if not done.returncode and lines else []


def _version() -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return ""
