"""What an engine says of itself in its ``config.json``, in the form of any version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.errors import ConfigError
from llmserve_trtllm.versions import Version


@dataclass(frozen=True)
class Engine:
    """An engine, as far as its configuration tells; None is what it does not tell."""

    folder: Path
    version: Version | None
    tensor_parallel: int
    pipeline_parallel: int
    vocab_size: int
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_beam_width: int
    packed_input: bool
    paged_kv_cache: bool

    @property
    def world_size(self) -> int:
        """How many processes run it, each with a GPU."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def rank_files(self) -> tuple[str, ...]:
        """The files of its ranks, by the two ways in which versions name them."""
        found = [*self.folder.glob("rank*.engine"), *self.folder.glob("*_rank*.engine")]
        return tuple(sorted({path.name for path in found}))


def read_engine(folder: Path) -> Engine:
    """Read an engine's folder; what it lacks or what is wrong in it is said in one line."""
    if not folder.is_dir():
        raise ConfigError(
            f"there is no engine at {folder}",
            mend="name the folder that trtllm-build wrote, or build one with "
            "--set build_engine=true",
        )
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} is no engine: it has no config.json", mend="name what trtllm-build wrote"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", mend="build the engine again"
        ) from None
    try:
        return (
            _with_mapping(folder, content) if "build_config" in content else _old(folder, content)
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not the configuration of an engine: {type(error).__name__}: {error}",
            mend="build the engine again, or tell which version wrote it",
        ) from None


def _with_mapping(folder: Path, content: Mapping[str, Any]) -> Engine:
    """Read the form of 0.8 and later: what was converted, and how it was built."""
    model, build = content["pretrained_config"], content["build_config"]
    mapping = model.get("mapping") or {}
    plugins = build.get("plugin_config") or {}
    kind = build.get("kv_cache_type")
    max_input = int(build["max_input_len"])
    return Engine(
        folder=folder,
        version=Version.parse(str(content["version"])) if content.get("version") else None,
        tensor_parallel=int(mapping.get("tp_size", 1)),
        pipeline_parallel=int(mapping.get("pp_size", 1)),
        vocab_size=int(model["vocab_size"]),
        max_batch_size=int(build["max_batch_size"]),
        max_input_len=max_input,
        # Before 0.11 the answer's length stood there, and not the sum of both.
        max_seq_len=int(build.get("max_seq_len") or max_input + int(build["max_output_len"])),
        max_beam_width=int(build.get("max_beam_width", 1)),
        packed_input=bool(plugins.get("remove_input_padding", True)),
        paged_kv_cache=(
            str(kind).rsplit(".", 1)[-1].upper() == "PAGED"
            if kind is not None
            else bool(plugins.get("paged_kv_cache", True))
        ),
    )


def _old(folder: Path, content: Mapping[str, Any]) -> Engine:
    """Read the form of 0.5 to 0.7, which names no version."""
    build, plugins = content["builder_config"], content["plugin_config"]
    max_input = int(build["max_input_len"])
    return Engine(
        folder=folder,
        version=None,
        tensor_parallel=int(build.get("tensor_parallel", 1)),
        pipeline_parallel=int(build.get("pipeline_parallel", 1)),
        vocab_size=int(build["vocab_size"]),
        max_batch_size=int(build["max_batch_size"]),
        max_input_len=max_input,
        max_seq_len=max_input + int(build["max_output_len"]),
        max_beam_width=int(build.get("max_beam_width", 1)),
        packed_input=bool(plugins.get("remove_input_padding", False)),
        paged_kv_cache=bool(plugins.get("paged_kv_cache", False)),
    )
