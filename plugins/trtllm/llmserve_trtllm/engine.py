"""Reads an engine's ``config.json`` and checks whether a build can use the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.plugin import (
    ConfigError,
    IncompatibleError,
    ModelSource,
    OptionError,
    model_vocabulary,
    read_object,
    vocabulary_size,
)
from llmserve_trtllm.target import INFLIGHT
from llmserve_trtllm.versions import Version

TOKENIZER_INFO = "xgrammar_tokenizer_info.json"
_GPUS = re.compile(r"\d+(,\d+)*(;\d+(,\d+)*)*")
_MODES = {
    "MEDUSA": "medusa", "4": "medusa",
    "LOOKAHEAD_DECODING": "lookahead", "8": "lookahead",
    "EXPLICIT_DRAFT_TOKENS": "redrafter", "16": "redrafter",
    "EAGLE": "eagle", "32": "eagle",
}  # fmt: skip
"""The decoding_mode that an engine built for speculation needs; old versions write a number."""
_FIRST_WITH_VERSION = Version(0, 8)
"""Engines built by versions before this one do not contain a version."""
_REBUILD = "rebuild the engine, or name the folder that trtllm-build wrote"


@dataclass(frozen=True)
class BuiltEngine:
    """An engine, as described by its configuration.

    ``version`` is None for engines before 0.8. ``decoding_mode`` is set if the engine was built for
    speculative decoding.
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
        """The number of processes that run the engine, each with its own GPU."""
        return self.tensor_parallel * self.pipeline_parallel


def folder_of(path: str) -> Path:
    return Path(path).expanduser().resolve()


def read_engine(folder: Path) -> BuiltEngine:
    """Read an engine's folder; whatever is missing or wrong is reported in one line."""
    path = folder / "config.json"
    if not path.is_file():
        problem = f"{folder} is not an engine: it has no config.json"
        raise ConfigError(
            problem if folder.is_dir() else f"there is no engine at {folder}",
            hint="name the folder that trtllm-build wrote, or give --set build_engine=true",
        )
    content = read_object(path)
    if "model_type" in content and "build_config" not in content:
        raise ConfigError(
            f"{folder} contains a model and not an engine",
            hint="give it with --model, and the folder that trtllm-build wrote with --engine",
        )
    try:
        engine = _parse_config(folder, content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        is_missing = isinstance(error, KeyError)
        problem = f"it has no {error.args[0]}" if is_missing else "a value in it is malformed"
        raise ConfigError(
            f"{path} is not the configuration of an engine: {problem}", hint=_REBUILD
        ) from None
    # isinstance() would also find the flags, as a bool is an int.
    sizes = {name: size for name, size in vars(engine).items() if type(size) is int}
    problem = ", ".join(f"{name} {size}" for name, size in sizes.items() if size < 1)
    if not problem and engine.max_input_len > engine.max_seq_len:
        problem = f"max_input_len {engine.max_input_len} over max_seq_len {engine.max_seq_len}"
    if problem:
        raise ConfigError(f"{path} has {problem}, which no engine can have", hint=_REBUILD)
    return engine


def _parse_config(folder: Path, content: Mapping[str, Any]) -> BuiltEngine:
    """Parse either form: that of 0.8 and later, or that of 0.5 to 0.7, which has no version."""
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
            f"the engine in {folder} has world_size {world} and tp_size {tensor} times pp_size "
            f"{pipeline}, which no engine can have",
            hint=_REBUILD,
        )
    max_input = int(build["max_input_len"])
    cache = build.get("kv_cache_type")
    is_paged = (
        bool(plugins.get("paged_kv_cache", is_new))
        if cache is None
        else str(cache).rsplit(".", 1)[-1].upper() == "PAGED"
    )
    version = Version.parse(str(content["version"])) if content.get("version") else None
    if version is not None and version < _FIRST_WITH_VERSION:
        # Nothing tells then which of them is wrong, the version or the rest.
        raise ConfigError(
            f"the engine in {folder} has version {version}, and no version before "
            f"{_FIRST_WITH_VERSION} writes one",
            hint=_REBUILD,
        )
    return BuiltEngine(
        folder=folder,
        version=version,
        tensor_parallel=tensor * context,
        pipeline_parallel=pipeline,
        vocab_size=int(model["vocab_size"]),
        max_batch_size=int(build["max_batch_size"]),
        max_input_len=max_input,
        # Before 0.11 the configuration has the answer's length instead of the sum of both.
        max_seq_len=int(build.get("max_seq_len") or max_input + int(build["max_output_len"])),
        max_beam_width=int(build.get("max_beam_width", 1)),
        packed_input=bool(plugins.get("remove_input_padding", is_new)),
        paged_kv_cache=is_paged,
        decoding_mode=_MODES.get(str(build.get("speculative_decoding_mode")).upper(), ""),
    )


def check_engine(
    engine: BuiltEngine, version: Version, *, batching: str, options: Mapping[str, Any]
) -> None:
    """Refuse an engine that does not fit the version or the build, naming both sides."""
    _check_version(engine, version)
    requirements = (
        (engine.packed_input, "packed input", "remove_input_padding"),
        (engine.paged_kv_cache, "a paged KV cache", "paged_kv_cache"),
    )
    for is_met, feature, flag in requirements:
        if batching == INFLIGHT and not is_met:
            raise IncompatibleError(
                f"in-flight batching needs an engine with {feature}, and {engine.folder} was "
                f"built without it ({flag})",
                hint="rebuild the engine with it, or use --batching static",
            )
    for name in ("max_batch_size", "max_beam_width"):
        value, limit = options[name] or 1, getattr(engine, name)
        if value > limit:
            raise IncompatibleError(
                f"{name} {value} exceeds the engine's {limit}",
                hint=f"give --{name.replace('_', '-')} {limit} or less, or rebuild it for more",
            )
    _check_gpus(engine, options["gpu_device_ids"], options["multi_gpu"])
    mode = options["decoding_mode"]
    if engine.decoding_mode and mode != engine.decoding_mode:
        raise IncompatibleError(
            f"the engine in {engine.folder} was built for decoding_mode {engine.decoding_mode}, "
            f"and this build is for {mode or 'none'}",
            hint=f"give --decoding-mode {engine.decoding_mode}",
        )
    files = {*engine.folder.glob("rank*.engine"), *engine.folder.glob("*_rank*.engine")}
    if files and len(files) != engine.world_size:
        raise ConfigError(
            f"{engine.folder} contains {len(files)} of the {engine.world_size} parts of its engine",
            hint="copy all of them, or rebuild the engine",
        )


def _check_version(engine: BuiltEngine, version: Version) -> None:
    hint = f"rebuild the engine with {version}"
    if engine.version is None:
        fits, release = version < _FIRST_WITH_VERSION, f"older than {_FIRST_WITH_VERSION}"
    else:
        fits, release = engine.version.same_release(version), str(engine.version)
        hint = f"give --set trtllm_version={engine.version}, or {hint}"
    if not fits:
        what = f"the engine in {engine.folder} is for TensorRT-LLM {release}"
        raise IncompatibleError(f"{what}, and this build is for {version}", hint=hint)


def _check_gpus(engine: BuiltEngine, gpu_ids: str, mode: str) -> None:
    """Refuse malformed GPU lists, and lists that do not match the engine's number of processes."""
    if gpu_ids and not _GPUS.fullmatch(gpu_ids):
        raise OptionError(
            f"gpu_device_ids cannot be {gpu_ids!r}", hint="write numbers, as in 0,1 or 0,1;2,3"
        )
    for instance in gpu_ids.split(";") if gpu_ids else ():
        gpus = instance.split(",")
        if len(gpus) != engine.world_size or len(set(gpus)) != len(gpus):
            raise IncompatibleError(
                f"gpu_device_ids names the GPUs {instance} for an instance, and the engine in "
                f"{engine.folder} runs in {engine.world_size} processes with a GPU each",
                hint="name a different GPU for each process; a semicolon starts another instance",
            )
    if ";" in gpu_ids and engine.world_size > 1 and mode == "leader":
        raise IncompatibleError(
            f"gpu_device_ids {gpu_ids} are several instances of {engine.world_size} processes each"
            ", and in leader mode a server has only one",
            hint="give --multi-gpu orchestrator, or start a server for each instance",
        )


def check_vocabulary(engine: BuiltEngine, source: ModelSource) -> None:
    """Refuse a tokenizer with more ids than the engine; the engine's vocabulary may be padded."""
    tokens, vocabulary = vocabulary_size(source.path), model_vocabulary(source)
    problem = ""
    if tokens and tokens > engine.vocab_size:
        problem = f"the tokenizer has {tokens} tokens"
    # Vocabularies are padded to a multiple of the number of GPUs, which never adds half as much.
    elif vocabulary and engine.vocab_size > vocabulary * 1.5:
        problem = f"the model has a vocabulary of {vocabulary}"
    if problem:
        raise IncompatibleError(
            f"{problem}, and the engine in {engine.folder} has a vocabulary of {engine.vocab_size}",
            hint="give --model the model that the engine was built from",
        )


def write_tokenizer_info(source: ModelSource, folder: Path) -> None:
    """Write the description of the tokenizer for guided decoding into the engine's folder.

    Its content is that of NVIDIA's examples/generate_xgrammar_tokenizer_info.py.
    """
    tokenizer = read_object(source.path / "tokenizer.json")
    vocabulary = tokenizer["model"].get("vocab")
    if isinstance(vocabulary, list):
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    ids = {**vocabulary, **{added["content"]: added["id"] for added in tokenizer["added_tokens"]}}
    info = {
        "encoded_vocab": sorted(ids, key=ids.__getitem__),
        "tokenizer_str": json.dumps(tokenizer, ensure_ascii=False),
        "stop_token_ids": source.end_ids(),
    }
    try:
        (folder / TOKENIZER_INFO).write_text(json.dumps(info), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{TOKENIZER_INFO} cannot be written into {folder}: {error.strerror}",
            hint="give one with --xgrammar-tokenizer-info-path",
        ) from None


def special_ids(source: ModelSource) -> dict[str, Any]:
    """Return the ids that end an answer, and the padding id, if the model has one."""
    config: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        path = source.path / name
        if path.is_file():
            config |= {key: value for key, value in read_object(path).items() if value is not None}
    pad = config.get("pad_token_id")
    return {
        "eos_ids": source.end_ids(),
        "pad_id": pad if isinstance(pad, int) and pad >= 0 else None,
    }
