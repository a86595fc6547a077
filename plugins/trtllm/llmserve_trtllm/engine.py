"""What an engine says of itself in its ``config.json``, and whether a build can use it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.plugin import ConfigError, IncompatibleError, ModelSource, OptionError
from llmserve.repository.source import read_object
from llmserve_trtllm.target import INFLIGHT
from llmserve_trtllm.versions import Version

_GPUS = re.compile(r"\d+(,\d+)*(;\d+(,\d+)*)*")
_WITHOUT_VERSION = Version(0, 8)
"""Engines of versions before this one name no version."""
_SPECULATIVE = {
    "MEDUSA": "medusa", "4": "medusa",
    "LOOKAHEAD_DECODING": "lookahead", "8": "lookahead",
    "EXPLICIT_DRAFT_TOKENS": "redrafter", "16": "redrafter",
    "EAGLE": "eagle", "32": "eagle",
}  # fmt: skip
"""The decoding_mode that an engine built for speculation needs; old versions write a number."""


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
    decoding_mode: str = ""
    """The one that the engine was built for, if it was built to speculate."""

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
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not the configuration of an engine", mend=_REBUILD)
    if "model_type" in content and "build_config" not in content:
        raise ConfigError(
            f"{folder} holds a model and no engine",
            mend="give it with --model, and the folder that trtllm-build wrote with --engine",
        )
    try:
        engine = (
            _with_mapping(folder, content) if "build_config" in content else _old(folder, content)
        )
    except KeyError as error:
        what = f"it says no {error.args[0]}"
    except (TypeError, ValueError, AttributeError):
        what = "something in it has another form"
    else:
        _check_lengths(path, engine)
        return engine
    raise ConfigError(f"{path} is not the configuration of an engine: {what}", mend=_REBUILD)


_REBUILD = "build the engine again, or name the folder that trtllm-build wrote"


def _check_lengths(path: Path, engine: Engine) -> None:
    for name in ("tensor_parallel", "pipeline_parallel", "max_batch_size", "max_input_len",
                 "max_seq_len", "max_beam_width", "vocab_size"):  # fmt: skip
        if getattr(engine, name) < 1:
            raise ConfigError(
                f"{path} says {name} {getattr(engine, name)}, which no engine has", mend=_REBUILD
            )
    if engine.max_input_len > engine.max_seq_len:
        raise ConfigError(
            f"{path} says max_input_len {engine.max_input_len}, over its max_seq_len "
            f"{engine.max_seq_len}",
            mend=_REBUILD,
        )


def _with_mapping(folder: Path, content: Mapping[str, Any]) -> Engine:
    """Read the form of 0.8 and later: what was converted, and how it was built."""
    model, build = content["pretrained_config"], content["build_config"]
    mapping = model.get("mapping") or {}
    plugins = build.get("plugin_config") or {}
    kind = build.get("kv_cache_type")
    max_input = int(build["max_input_len"])
    parallel = [int(mapping.get(f"{kind}_size", 1)) for kind in ("tp", "pp", "cp")]
    world = int(mapping.get("world_size", parallel[0] * parallel[1] * parallel[2]))
    if world != parallel[0] * parallel[1] * parallel[2]:
        raise ConfigError(
            f"the engine in {folder} says world_size {world} and tp_size {parallel[0]} times "
            f"pp_size {parallel[1]}, which no engine has",
            mend=_REBUILD,
        )
    return Engine(
        folder=folder,
        version=Version.parse(str(content["version"])) if content.get("version") else None,
        tensor_parallel=parallel[0] * parallel[2],
        pipeline_parallel=parallel[1],
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
        decoding_mode=_SPECULATIVE.get(str(build.get("speculative_decoding_mode")).upper(), ""),
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
    if int(options["max_beam_width"] or 1) > engine.max_beam_width:
        raise IncompatibleError(
            f"max_beam_width {options['max_beam_width']} is over the engine's "
            f"{engine.max_beam_width}",
            mend="ask for fewer beams, or build the engine for more",
        )
    _check_gpus(engine, str(options["gpu_device_ids"]), str(options["multi_gpu"]))
    _check_decoding(engine, options)
    files = engine.rank_files
    if files and len(files) != engine.world_size:
        raise ConfigError(
            f"{engine.folder} holds {len(files)} of the {engine.world_size} parts of its engine",
            mend="copy all of them, or build the engine again",
        )


def _check_gpus(engine: Engine, given: str, mode: str) -> None:
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
    if ";" in given and engine.world_size > 1 and mode == "leader":
        raise IncompatibleError(
            f"gpu_device_ids {given} are several instances of {engine.world_size} processes each, "
            "and in leader mode a server has one",
            mend="give --multi-gpu orchestrator, or start a server for each instance",
        )


def _check_decoding(engine: Engine, options: Mapping[str, Any]) -> None:
    """Refuse what the backend would pass over, or stop at when it loads."""
    mode = str(options["decoding_mode"])
    if engine.decoding_mode and mode != engine.decoding_mode:
        raise IncompatibleError(
            f"the engine in {engine.folder} was built for decoding_mode {engine.decoding_mode}, "
            f"and this is for {mode or 'none'}",
            mend=f"give --decoding-mode {engine.decoding_mode}",
        )
    sizes = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
    missing = [name for name in sizes if not options[name]]
    if mode == "lookahead" and missing:
        raise IncompatibleError(
            f"decoding_mode lookahead needs {', '.join(missing)}", mend="give all of its sizes"
        )
    guided = [name for name in _GUIDED if options[name]]
    if len(guided) == 1:
        raise IncompatibleError(
            f"{guided[0]} has no effect without the other of {' and '.join(_GUIDED)}",
            mend="give both, or neither",
        )


_GUIDED = ("guided_decoding_backend", "xgrammar_tokenizer_info_path")


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


def vocabulary_of(source: ModelSource) -> int:
    """Return the size of the model's vocabulary, 0 where it does not say."""
    config = source.config()
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else 0)
    return size if isinstance(size, int) else 0


def largest_id(source: ModelSource) -> int:
    """Return the largest id that the tokenizer makes, -1 where its files do not tell."""
    path = source.path / "tokenizer.json"
    if not path.is_file():
        return -1
    content = read_object(path)
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    added = [t.get("id") for t in content.get("added_tokens") or [] if isinstance(t, dict)]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab or ()))
    return max((i for i in (*ids, *added) if isinstance(i, int)), default=-1)


def ends_of(source: ModelSource) -> tuple[list[int], int | None]:
    """Return the ids that end an answer, and the one for padding, if the model names it."""
    found: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        path = source.path / name
        if path.is_file():
            found |= {k: v for k, v in read_object(path).items() if v is not None}
    eos = found.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [eos]
    pad = found.get("pad_token_id")
    return [e for e in ends if isinstance(e, int)], pad if isinstance(
        pad, int
    ) and pad >= 0 else None
