"""Builds an engine with the version's own tools, or reports the commands if they are missing."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from llmserve.plugin import BuildContext, ConfigError, IncompatibleError, OptionError
from llmserve_trtllm.engine import folder_of
from llmserve_trtllm.target import INFLIGHT, BuildTarget
from llmserve_trtllm.versions import FIRST_LLMAPI, Version

PYTHON = "python3"
"""Placeholder for the running Python, in commands that are run here."""
# The commands that build an engine with the tools of a version. A word in braces is an option or a
# value derived from options (family, checkpoint, world_size). 0.5.0 builds in a single step, with a
# separate script for each model family.
_BUILD_0_5 = """
python3 {examples}/{family}/build.py --model_dir {model} --output_dir {engine} --dtype {dtype}
--use_gpt_attention_plugin {dtype} --use_gemm_plugin {dtype} --max_batch_size {max_batch_size}
--max_input_len {max_input_len} --max_output_len {max_output_len} --max_beam_width {max_beam_width}
--world_size {world_size} --tp_size {tensor_parallel} --pp_size {pipeline_parallel}
"""
_INFLIGHT_0_5 = "--remove_input_padding --use_inflight_batching --paged_kv_cache"
_CONVERT = """
python3 {examples}/{family}/convert_checkpoint.py --model_dir {model} --output_dir {checkpoint}
--dtype {dtype} --tp_size {tensor_parallel} --pp_size {pipeline_parallel}
"""
_QUANTIZE = """
python3 {examples}/quantization/quantize.py --model_dir {model} --output_dir {checkpoint}
--dtype {dtype} --tp_size {tensor_parallel} --pp_size {pipeline_parallel} --qformat {quantization}
"""
_WEIGHT_ONLY = "--use_weight_only --weight_only_precision {quantization}"
_BUILD = """
trtllm-build --checkpoint_dir {checkpoint} --output_dir {engine}
--gpt_attention_plugin {dtype} --gemm_plugin {dtype} --max_batch_size {max_batch_size}
--max_input_len {max_input_len} --max_seq_len {max_seq_len} --max_beam_width {max_beam_width}
--workers {world_size}
"""
_INFLIGHT = "--remove_input_padding enable --paged_kv_cache enable"
# From 1.0 on the LLM API builds the engine with a line of Python.
_LLM_API = (
    "from tensorrt_llm._tensorrt_engine import LLM; "
    "from tensorrt_llm.llmapi import BuildConfig, QuantAlgo, QuantConfig; "
    "LLM({model!r}, dtype={dtype!r}, tensor_parallel_size={tensor_parallel}, "
    "pipeline_parallel_size={pipeline_parallel}, "
    "build_config=BuildConfig(max_batch_size={max_batch_size}, max_beam_width={max_beam_width}, "
    "max_input_len={max_input_len}, max_seq_len={max_seq_len}){quant_config}).save({engine!r})"
)
_ALGORITHMS = {
    "fp8": "FP8",
    "int4_awq": "W4A16_AWQ",
    "int8": "W8A16",
    "int4": "W4A16",
    "int8_sq": "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
}
"""The LLM API's names of the quantizations."""
_FAMILIES = {
    "baichuan": ("baichuan", "models/contrib/baichuan"),
    "bloom": ("bloom", "models/contrib/bloom"),
    "chatglm": ("chatglm", "models/core/glm-4-9b"),
    "falcon": ("falcon", "models/contrib/falcon"),
    "gemma": ("gemma", "models/core/gemma"),
    "gpt2": ("gpt", "models/core/gpt"),
    "gpt_bigcode": ("gpt", "models/core/gpt"),
    "gpt_neox": ("gptneox", "models/contrib/gptneox"),
    "gptj": ("gptj", "models/contrib/gptj"),
    "internlm2": ("internlm2", "models/core/internlm2"),
    "llama": ("llama", "models/core/llama"),
    "mistral": ("llama", "models/core/llama"),
    "mixtral": ("llama", "models/core/llama"),
    "mpt": ("mpt", "models/contrib/mpt"),
    "opt": ("opt", "models/contrib/opt"),
    "phi": ("phi", "models/core/phi"),
    "phi3": ("phi", "models/core/phi"),
    "qwen2": ("qwen", "models/core/qwen"),
}
"""The folder of TensorRT-LLM's examples that converts each family: in 0.5.0, and from 0.19 on."""


def build_or_explain(context: BuildContext, target: BuildTarget) -> Path:
    engine = target.options["engine"]
    if not target.options["build_engine"]:
        if not engine:
            raise OptionError(
                "there is no engine to serve",
                hint="give one with --set engine=DIR, build one with --set build_engine=true, or "
                "serve the model without an engine with --set layout=llmapi",
            )
        return folder_of(engine)
    folder = folder_of(engine or f"{context.name}-engine")
    family = context.source.config().get("model_type") or ""
    commands = build_commands(target, context.source.path, family, folder)
    _check_installed(target, commands)
    log = folder.with_name(f"{folder.name}.log")
    folder.parent.mkdir(parents=True, exist_ok=True)
    for command in commands:
        run(command, log, context.report)
    return folder


def run(command: Sequence[str], log: Path, report: Callable[[str], None]) -> None:
    """Run one command; its whole output goes to the log, and each line to ``report``."""
    words = [sys.executable if word == PYTHON else word for word in command]
    report(f"building the engine: {Path(command[0]).name}, log in {log}")
    with log.open("a", encoding="utf-8") as log_file:
        log_file.write(f"$ {shlex.join(command)}\n")
        try:
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except OSError as error:
            raise ConfigError(
                f"{command[0]} cannot be run: {error.strerror}",
                hint="make sure that TensorRT-LLM's tools are on PATH",
            ) from None
        with process:
            try:
                for raw in process.stdout or ():
                    line = raw.decode("utf-8", "replace")
                    log_file.write(line)
                    if line.strip():
                        report(f"building the engine: {line.strip()[:100]}")
            except BaseException:
                process.kill()
                raise
    if process.returncode:
        raise ConfigError(
            f"building the engine failed ({Path(command[0]).name} returned {process.returncode})",
            hint=f"see {log}",
        )


def _check_installed(target: BuildTarget, commands: Sequence[Sequence[str]]) -> None:
    required = target.version
    try:
        installed = Version.parse(version("tensorrt-llm").partition("+")[0])
    except PackageNotFoundError:
        place = target.image or f"an environment with TensorRT-LLM {required}"
        raise ConfigError(
            "TensorRT-LLM is not installed here, so no engine can be built",
            hint=f"run this in {place}: {' && '.join(map(shlex.join, commands))}",
        ) from None
    if not installed.same_release(required):
        raise IncompatibleError(
            f"TensorRT-LLM {installed} is installed here, and the engine is for {required}",
            hint=f"give --set trtllm_version={installed}, or build it with {required} installed",
        )


def build_commands(
    target: BuildTarget, model: Path, model_type: str, engine: Path
) -> list[list[str]]:
    values = _values(target.options)
    values |= {"model": str(model), "engine": str(engine)}
    if target.version >= FIRST_LLMAPI:
        # The examples' scripts are not needed.
        return [[PYTHON, "-c", _LLM_API.format_map(values)]]
    if model_type not in _FAMILIES:
        raise IncompatibleError(
            f"none of the known TensorRT-LLM examples converts {model_type or 'this model'}",
            hint="build the engine yourself and give it with --set engine=DIR",
        )
    family = _FAMILIES[model_type][not target.is_0_5]
    values |= {"family": family, "checkpoint": f"{engine}-checkpoint"}
    in_flight = target.batching == INFLIGHT
    weight_only = values["quantization"] in ("int8", "int4")
    weights = _WEIGHT_ONLY if weight_only else ""
    if target.is_0_5:
        return [_command(values, _BUILD_0_5, _INFLIGHT_0_5 if in_flight else "", weights)]
    first = _command(values, _QUANTIZE)
    if weight_only or not values["quantization"]:
        variant = "--gpt_variant gpt2" if model_type == "gpt2" else ""
        first = _command(values, _CONVERT, variant, weights)
    return [first, _command(values, _BUILD, _INFLIGHT if in_flight else "")]


def _command(values: Mapping[str, Any], *parts: str) -> list[str]:
    """Fill in the values word by word, as they may contain spaces."""
    return [word.format_map(values) for part in parts for word in part.split()]


def _values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for the commands: the options, and values derived from them."""
    prompt = options["max_input_len"] or 1024
    total = options["max_seq_len"] or 2 * prompt
    if total <= prompt:
        raise OptionError(
            f"max_input_len {prompt} leaves no room for an answer in max_seq_len {total}",
            hint="lower the first, or raise the second",
        )
    algorithm = _ALGORITHMS.get(options["quantization"])
    config = f", quant_config=QuantConfig(quant_algo=QuantAlgo.{algorithm})" if algorithm else ""
    return {
        **options,
        "quant_config": config,
        "dtype": "float16" if options["dtype"] == "auto" else options["dtype"],
        "max_beam_width": options["max_beam_width"] or 1,
        "max_input_len": prompt,
        "max_seq_len": total,
        "max_output_len": total - prompt,
        "world_size": options["tensor_parallel"] * options["pipeline_parallel"],
    }
