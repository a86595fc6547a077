"""What the plugin puts into a repository: the converted model, and what it must know of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmserve.plugin import (
    BuildContext,
    ModelSourceError,
    OptionError,
    PluginError,
    check_causal,
    place_instances,
)

_FOLDER = "openvino"
_MODEL = "openvino_model.xml"
# Only these: the tokenizer is a part of its own, whatever form it has.
_FILES = (_MODEL, "openvino_model.bin")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_PRECISIONS = {"auto": "auto", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_AT_LOAD = (
    "kv_cache", "cache_gb", "max_sequences", "prefix_cache", "dynamic_quantization",
    "prompt_lookup", "threads",
)  # fmt: skip
_CONVERTING = ("weight_format", "int4_group", "int4_ratio", "trust_remote_code")


def prepare(context: BuildContext) -> Mapping[str, Any]:
    """Place a model that is converted already, or convert it."""
    source, options = context.source, context.options
    check_causal(source, trust_remote_code=bool(options["trust_remote_code"]))
    place_instances(context.config, "cpu", 1)
    config = source.config()
    inner = config.get("text_config") or config
    length = next((inner[name] for name in _LENGTHS if isinstance(inner.get(name), int)), None)
    if (source.path / _MODEL).is_file():
        place, window = _place(context), None
    else:
        place, window = _convert(context)
    if window and (length is None or window < length):
        context.report(f"its context is limited to its sliding window of {window} tokens")
        length = window
    own = inner.get("dtype") or inner.get("torch_dtype")
    half = own in ("bfloat16", "float16") or options["weight_format"] != "fp32"
    return {
        **place,
        **{name: options[name] for name in _AT_LOAD},
        "context_length": length,
        "eos_ids": _eos_ids(source.path, config),
        "vocab_size": inner["vocab_size"] if isinstance(inner.get("vocab_size"), int) else 0,
        "precision": _PRECISIONS[str(options["dtype"])],
        "half_weights": half,
    }


def _place(context: BuildContext) -> Mapping[str, Any]:
    source = context.source
    files = [source.path / name for name in _FILES if (source.path / name).is_file()]
    if len(files) < len(_FILES):
        raise ModelSourceError(f"{source.asked} has {_MODEL} without openvino_model.bin")
    if context.options["weight_format"] != "fp32":
        raise OptionError(
            f"{source.asked} is converted already, with weights as they are",
            mend="leave out weight_format, or name the model that it was made from",
        )
    # The engine opens files, so what lies in the hub's cache is copied.
    return context.place(files, _FOLDER, copy=True if source.repo_id else None)


def _convert(context: BuildContext) -> tuple[Mapping[str, Any], int | None]:
    options, source = context.options, context.source
    if options["weight_format"] in ("int8", "int4") and find_spec("nncf") is None:
        raise PluginError(
            f"weight_format={options['weight_format']} needs the package nncf",
            mend="pip install 'llmserve-openvino[compress]'",
        )
    context.report(f"converting {source.asked} to OpenVINO")
    target = context.folder / _FOLDER
    settings = json.dumps({name: options[name] for name in _CONVERTING})
    done = subprocess.run(
        [sys.executable, "-m", "llmserve_openvino.convert", source.path, target, settings],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    facts = target / "facts.json"
    if done.returncode or not facts.is_file():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1][:300] if lines else f"it ended with {done.returncode}"
        raise ModelSourceError(
            f"{source.asked} could not be converted to OpenVINO: {last}",
            mend="serve it with --plugin hf, or convert it with `optimum-cli export openvino` in "
            "an environment of its own and name that folder",
        )
    window: int | None = json.loads(facts.read_text(encoding="utf-8"))["window"]
    facts.unlink()
    return {"path": _FOLDER}, window


def _eos_ids(folder: Path, config: Mapping[str, Any]) -> list[int]:
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    return sorted(eos) if isinstance(eos, list) else [] if eos is None else [eos]
