"""What an engine says of itself in its ``config.json``, and whether a build can use it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.plugin import ConfigError, IncompatibleError, ModelSource, OptionError, read_object
from llmserve.repository.source_files import model_vocabulary, vocabulary_size
from llmserve_trtllm.target import INFLIGHT
from llmserve_trtllm.versions import Version, pairs

TOKENIZER_INFO = "xgrammar_tokenizer_info.json"
_GPUS = re.compile(r"\d+(,\d+)*(;\d+(,\d+)*)*")
_FIRST_WITH_VERSION = Version(0, 8)
"""Engines of versions before this one name no version."""
_REBUILD = "build the engine again, or name the folder that trtllm-build wrote"


@dataclass(frozen=True)
class Engine:
    """An engine, as far as its configuration tells.

    ``version`` is None in those before 0.8. ``decoding_mode`` is the one that the engine was built
    for, if it was built to speculate.
    """

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
    decoding_mode: str = ""

    @property
    def world_size(self) -> int:
        """How many processes run it, each with a GPU."""
        return self.tensor_parallel * self.pipeline_parallel


def read_engine(folder: Path) -> Engine:
    """Read an engine's folder; what it lacks or what is wrong in it is said in one line."""
    path = folder / "config.json"
    if not path.is_file():
        what = f"{folder} is no engine: it has no config.json"
        raise ConfigError(
            what if folder.is_dir() else f"there is no engine at {folder}",
            mend="name the folder that trtllm-build wrote, or give --set build_engine=true",
        )
    content = read_object(path)
    if "model_type" in content and "build_config" not in content:
        raise ConfigError(
            f"{folder} holds a model and no engine",
            mend="give it with --model, and the folder that trtllm-build wrote with --engine",
        )
    try:
        engine = _engine_of(folder, content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        lacks = isinstance(error, KeyError)
        what = f"it says no {error.args[0]}" if lacks else "something in it has another form"
        raise ConfigError(
            f"{path} is not the configuration of an engine: {what}", mend=_REBUILD
        ) from None
    # A switch is a number too, to Python.
    sizes = {name: size for name, size in vars(engine).items() if type(size) is int}
    what = ", ".join(f"{name} {size}" for name, size in sizes.items() if size < 1)
    if not what and engine.max_input_len > engine.max_seq_len:
        what = f"max_input_len {engine.max_input_len} over max_seq_len {engine.max_seq_len}"
    if what:
        raise ConfigError(f"{path} says {what}, which no engine has", mend=_REBUILD)
    return engine


def _engine_of(folder: Path, content: Mapping[str, Any]) -> Engine:
    """Read either form: that of 0.8 and later, or that of 0.5 to 0.7, which names no version."""
    is_new = "build_config" in content
    build = content["build_config" if is_new else "builder_config"]
    model = content["pretrained_config"] if is_new else build
    plugins = (build if is_new else content).get("plugin_config") or {}
    mapping = model.get("mapping") or {
        "tp_size": build.get("tensor_parallel", 1),
        "pp_size": build.get("pipeline_parallel", 1),
    }
    tensor, pipeline, context = (int(mapping.get(f"{kind}_size", 1)) for kind in ("tp", "pp", "cp"))
    world = int(mapping.get("world_size", tensor * pipeline * context))
    if world != tensor * pipeline * context:
        raise ConfigError(
            f"the engine in {folder} says world_size {world} and tp_size {tensor} times pp_size "
            f"{pipeline}, which no engine has",
            mend=_REBUILD,
        )
    max_input = int(build["max_input_len"])
    cache = build.get("kv_cache_type")
    is_paged = (
        bool(plugins.get("paged_kv_cache", is_new))
        if cache is None
        else str(cache).rsplit(".", 1)[-1].upper() == "PAGED"
    )
    modes = pairs("options.txt", "speculative")
    return Engine(
        folder=folder,
        version=Version.parse(str(content["version"])) if content.get("version") else None,
        tensor_parallel=tensor * context,
        pipeline_parallel=pipeline,
        vocab_size=int(model["vocab_size"]),
        max_batch_size=int(build["max_batch_size"]),
        max_input_len=max_input,
        # Before 0.11 the answer's length stood there, and not the sum of both.
        max_seq_len=int(build.get("max_seq_len") or max_input + int(build["max_output_len"])),
        max_beam_width=int(build.get("max_beam_width", 1)),
        packed_input=bool(plugins.get("remove_input_padding", is_new)),
        paged_kv_cache=is_paged,
        decoding_mode=modes.get(str(build.get("speculative_decoding_mode")).upper(), ""),
    )


def check_engine(
    engine: Engine, version: Version, *, batching: str, options: Mapping[str, Any]
) -> None:
    """Refuse an engine that the version or the build cannot run, naming both sides."""
    _check_version(engine, version)
    needed = (
        (engine.packed_input, "packed input", "remove_input_padding"),
        (engine.paged_kv_cache, "a paged KV cache", "paged_kv_cache"),
    )
    for has, what, flag in needed:
        if batching == INFLIGHT and not has:
            raise IncompatibleError(
                f"in-flight batching needs an engine with {what}, and {engine.folder} was "
                f"built without ({flag})",
                mend="build the engine again with it, or use --batching static",
            )
    for name in ("max_batch_size", "max_beam_width"):
        asked, most = options[name] or 1, getattr(engine, name)
        if asked > most:
            raise IncompatibleError(
                f"{name} {asked} is over the engine's {most}",
                mend=f"give --{name.replace('_', '-')} {most} or less, or build it for more",
            )
    _check_gpus(engine, options["gpu_device_ids"], options["multi_gpu"])
    mode = options["decoding_mode"]
    if engine.decoding_mode and mode != engine.decoding_mode:
        raise IncompatibleError(
            f"the engine in {engine.folder} was built for decoding_mode {engine.decoding_mode}, "
            f"and this is for {mode or 'none'}",
            mend=f"give --decoding-mode {engine.decoding_mode}",
        )
    files = {*engine.folder.glob("rank*.engine"), *engine.folder.glob("*_rank*.engine")}
    if files and len(files) != engine.world_size:
        raise ConfigError(
            f"{engine.folder} holds {len(files)} of the {engine.world_size} parts of its engine",
            mend="copy all of them, or build the engine again",
        )


def _check_version(engine: Engine, version: Version) -> None:
    mend = f"build the engine again with {version}"
    if engine.version is None:
        fits, by = version < _FIRST_WITH_VERSION, f"a TensorRT-LLM before {_FIRST_WITH_VERSION}"
    else:
        fits, by = engine.version.same_release(version), f"TensorRT-LLM {engine.version}"
        mend = f"give --set trtllm_version={engine.version}, or {mend}"
    if not fits:
        raise IncompatibleError(
            f"the engine in {engine.folder} was built by {by}, and this is for {version}", mend=mend
        )


def _check_gpus(engine: Engine, given: str, mode: str) -> None:
    """Refuse GPUs that are written otherwise, or not as many as the engine has processes."""
    if given and not _GPUS.fullmatch(given):
        raise OptionError(
            f"gpu_device_ids cannot be {given!r}", mend="write numbers, as in 0,1 or 0,1;2,3"
        )
    for instance in given.split(";") if given else ():
        gpus = instance.split(",")
        if len(gpus) != engine.world_size or len(set(gpus)) != len(gpus):
            raise IncompatibleError(
                f"gpu_device_ids names the GPUs {instance} for an instance, and the engine in "
                f"{engine.folder} runs in {engine.world_size} processes with a GPU each",
                mend="name as many as that, each once; a semicolon begins another instance",
            )
    if ";" in given and engine.world_size > 1 and mode == "leader":
        raise IncompatibleError(
            f"gpu_device_ids {given} are several instances of {engine.world_size} processes each, "
            "and in leader mode a server has one",
            mend="give --multi-gpu orchestrator, or start a server for each instance",
        )


def check_vocabulary(engine: Engine, source: ModelSource) -> None:
    """Refuse a tokenizer whose ids the engine has no rows for; an engine may be padded."""
    words, vocabulary = vocabulary_size(source.path), model_vocabulary(source)
    what = ""
    if words and words > engine.vocab_size:
        what = f"the tokenizer has {words} words"
    # Vocabularies are padded to a multiple of what shares them, and never to half as much again.
    elif vocabulary and engine.vocab_size > vocabulary * 1.5:
        what = f"the model has a vocabulary of {vocabulary}"
    if what:
        raise IncompatibleError(
            f"{what}, and the engine in {engine.folder} has a vocabulary of {engine.vocab_size}",
            mend="give --model the model that the engine was built from",
        )


def write_tokenizer_info(source: ModelSource, folder: Path) -> None:
    """Write what the engine's guided decoding has to know of the tokenizer, beside the engine.

    It is what NVIDIA's examples/generate_xgrammar_tokenizer_info.py writes.
    """
    tokenizer = read_object(source.path / "tokenizer.json")
    words = tokenizer["model"].get("vocab")
    if isinstance(words, list):
        words = {word: number for number, (word, _) in enumerate(words)}
    ids = {**words, **{added["content"]: added["id"] for added in tokenizer["added_tokens"]}}
    info = {
        "encoded_vocab": sorted(ids, key=ids.__getitem__),
        "tokenizer_str": json.dumps(tokenizer, ensure_ascii=False),
        "stop_token_ids": ends_of(source)["eos_ids"],
    }
    try:
        (folder / TOKENIZER_INFO).write_text(json.dumps(info), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{TOKENIZER_INFO} cannot be written into {folder}: {error.strerror}",
            mend="give one with --xgrammar-tokenizer-info-path",
        ) from None


def ends_of(source: ModelSource) -> dict[str, Any]:
    """Return the ids that end an answer, and the one for padding, if the model names it."""
    found: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        path = source.path / name
        if path.is_file():
            found |= {key: value for key, value in read_object(path).items() if value is not None}
    eos, pad = found.get("eos_token_id"), found.get("pad_token_id")
    ends = eos if isinstance(eos, list) else [eos]
    return {
        "eos_ids": [end for end in ends if isinstance(end, int)],
        "pad_id": pad if isinstance(pad, int) and pad >= 0 else None,
    }
