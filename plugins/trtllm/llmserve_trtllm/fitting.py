"""Whether an engine, a version, the wishes of a build and the model's tokenizer fit together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmserve.errors import ConfigError, IncompatibleError, OptionError
from llmserve_trtllm.batching import INFLIGHT
from llmserve_trtllm.engine import Engine
from llmserve_trtllm.versions import Version

_GPUS = re.compile(r"\d+(,\d+)*(;\d+(,\d+)*)*")
_WITHOUT_VERSION = Version(0, 8)
"""Engines of versions before this one name no version."""


def check_engine(
    engine: Engine, version: Version, *, batching: str, options: Mapping[str, Any]
) -> None:
    """Refuse an engine that the version or the build cannot run, naming both sides."""
    _check_version(engine, version)
    if batching == INFLIGHT:
        for has, what, flag in (
            (engine.packed_input, "packed input", "remove_input_padding"),
            (engine.paged_kv_cache, "a paged KV cache", "paged_kv_cache"),
        ):
            if not has:
                raise IncompatibleError(
                    f"in-flight batching needs an engine with {what}, and {engine.folder} was "
                    f"built without ({flag})",
                    mend="build the engine again with it, or use --batching static",
                )
    if int(options["max_batch_size"]) > engine.max_batch_size:
        raise IncompatibleError(
            f"max_batch_size {options['max_batch_size']} is over the engine's "
            f"{engine.max_batch_size}",
            mend=f"give --max-batch-size {engine.max_batch_size} or less",
        )
    if int(options["max_beam_width"]) > engine.max_beam_width:
        raise IncompatibleError(
            f"max_beam_width {options['max_beam_width']} is over the engine's "
            f"{engine.max_beam_width}",
            mend="ask for fewer beams, or build the engine for more",
        )
    _check_gpus(engine, str(options.get("gpu_device_ids", "")))
    files = engine.rank_files
    if files and len(files) != engine.world_size:
        raise ConfigError(
            f"{engine.folder} holds {len(files)} of the {engine.world_size} parts of its engine",
            mend="copy all of them, or build the engine again",
        )


def _check_gpus(engine: Engine, given: str) -> None:
    """Refuse GPUs that are written otherwise, or not as many as the engine has processes."""
    if not given:
        return
    if not _GPUS.fullmatch(given):
        raise OptionError(
            f"gpu_device_ids cannot be {given!r}", mend="write numbers, as in 0,1 or 0,1;2,3"
        )
    for instance in given.split(";"):
        gpus = instance.split(",")
        if len(gpus) != engine.world_size or len(set(gpus)) != len(gpus):
            raise IncompatibleError(
                f"gpu_device_ids names the GPUs {instance} for an instance, and the engine in "
                f"{engine.folder} runs in {engine.world_size} processes with a GPU each",
                mend="name as many as that, each once; a semicolon begins another instance",
            )


def _check_version(engine: Engine, version: Version) -> None:
    if engine.version is None:
        if version >= _WITHOUT_VERSION:
            raise IncompatibleError(
                f"the engine in {engine.folder} was built by a TensorRT-LLM before "
                f"{_WITHOUT_VERSION}, and this is for {version}",
                mend=f"build the engine again with {version}",
            )
    elif not engine.version.same_release(version):
        raise IncompatibleError(
            f"the engine in {engine.folder} was built by TensorRT-LLM {engine.version}, and this "
            f"is for {version}",
            mend=f"give --set trtllm_version={engine.version}, or build the engine again with "
            f"{version}",
        )


def check_vocabulary(engine: Engine, vocabulary: int, largest: int) -> None:
    """Refuse a tokenizer whose ids the engine has no rows for; an engine may be padded.

    ``vocabulary`` is the model's own size, ``largest`` the tokenizer's largest id.
    """
    if largest >= engine.vocab_size:
        raise IncompatibleError(
            f"the tokenizer has ids up to {largest}, and the engine in {engine.folder} a "
            f"vocabulary of {engine.vocab_size}",
            mend="give --model the model that the engine was built from",
        )
    # Vocabularies are padded to a multiple of what shares them, and never to half as much again.
    if vocabulary and engine.vocab_size > vocabulary * 1.5:
        raise IncompatibleError(
            f"the model has a vocabulary of {vocabulary}, and the engine in {engine.folder} one of "
            f"{engine.vocab_size}",
            mend="give --model the model that the engine was built from",
        )
