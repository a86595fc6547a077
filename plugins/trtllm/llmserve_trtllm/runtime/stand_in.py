"""What answers the engine's tensors where there is no TensorRT-LLM, if it is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from llmserve.errors import PluginError
from llmserve.roles import Backend


def load_stand_in(name: str, settings: Mapping[str, Any], folder: Path) -> Any:
    """Return a ``TritonPythonModel`` of the installed backend ``tensorrtllm``."""
    from llmserve.registry import Registry

    try:
        backend = Registry.load().get(Backend, "tensorrtllm")
    except PluginError as error:
        raise RuntimeError(
            f"there is nothing to stand in for TensorRT-LLM: {error}; "
            "pip install llmserve-standins brings it"
        ) from None
    spec = spec_from_file_location(f"{__name__}_model", backend.folder / "model.py")
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{backend.folder} has no model.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    model.initialize({"model_name": name, "model_config": json.dumps(_config(settings, folder))})
    return model


def _config(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration that an engine would have."""
    source = {key: settings[key] for key in ("id", "revision", "path") if key in settings}
    if "path" in source:
        source["path"] = str(folder / source["path"])
    parameters = {
        "gpt_model_path": str(folder),
        "gpt_model_type": "V1" if settings["batching"] == "static" else "inflight_fused_batching",
        "exclude_input_in_output": "true",
        "max_tokens_in_paged_kv_cache": str(settings["kv_cache"].get("max_tokens", "")),
        "llmserve.stand_in": json.dumps(source),
    }
    return {
        "max_batch_size": settings["max_batch_size"],
        "model_transaction_policy": {"decoupled": settings["streams"]},
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
        "output": [
            {"name": name, "data_type": f"TYPE_{kind}", "dims": dims}
            for name, (kind, dims) in settings["outputs"].items()
        ],
    }
