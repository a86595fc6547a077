"""Building an engine with the version's own tools, and saying how where they are not installed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from llmserve.plugin import BuildContext, ConfigError, IncompatibleError, OptionError
from llmserve_trtllm.target import INFLIGHT, Target
from llmserve_trtllm.versions import FIRST_LLMAPI, Version, container_of

PYTHON = "python3"
"""Stands for the Python that runs this, where the commands are run here."""
_FAMILIES = {
    "baichuan": "baichuan",
    "bloom": "bloom",
    "chatglm": "chatglm",
    "falcon": "falcon",
    "gemma": "gemma",
    "gpt2": "gpt",
    "gpt_bigcode": "gpt",
    "gpt_neox": "gptneox",
    "gptj": "gptj",
    "internlm2": "internlm2",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "mpt": "mpt",
    "opt": "opt",
    "phi": "phi",
    "phi3": "phi",
    "qwen2": "qwen",
}
"""Which folder of TensorRT-LLM's examples converts which family of models."""
_FIRST_CORE = Version(0, 19)
"""From here on those folders lie under ``models/core``."""
_WEIGHT_ONLY = {"int8": "int8", "int4": "int4"}
_CALIBRATED = {"fp8", "int4_awq", "int8_sq"}


def build_or_explain(context: BuildContext, target: Target) -> Path:
    """Return the engine's folder: the one that was given, or one that is built now."""
    asked = str(context.options["engine"])
    if not context.options["build_engine"]:
        if not asked:
            raise OptionError(
                "there is no engine to serve",
                mend="give one with --set engine=DIR, build one with --set build_engine=true, or "
                "serve the model as it is with --set layout=llmapi",
            )
        return Path(asked).expanduser().resolve()
    folder = Path(asked or f"{context.name}-engine").expanduser().resolve()
    kind = str(context.source.config().get("model_type") or "")
    commands = build_commands(target, context.source.path, kind, folder)
    _check_installed(target.version, commands)
    log = folder.with_name(f"{folder.name}.log")
    folder.parent.mkdir(parents=True, exist_ok=True)
    for command in commands:
        run(command, log, context.report)
    return folder


def printed(commands: Sequence[Sequence[str]]) -> str:
    """Return commands as a shell reads them, on one line."""
    return " && ".join(shlex.join(command) for command in commands)


def run(command: Sequence[str], log: Path, report: Callable[[str], None]) -> None:
    """Run one command; each of its lines goes to the log, the latest to who watches."""
    words = [sys.executable if word == PYTHON else word for word in command]
    report(f"building the engine: {Path(command[0]).name}, log in {log}")
    with log.open("a", encoding="utf-8") as kept:
        kept.write(f"$ {shlex.join(command)}\n")
        try:
            process = subprocess.Popen(
                words,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise ConfigError(
                f"{command[0]} cannot be run: {error.strerror}",
                mend="see that TensorRT-LLM's tools are on PATH",
            ) from None
        with process:
            try:
                for line in process.stdout or ():
                    kept.write(line)
                    if said := line.strip():
                        report(f"building the engine: {said[:100]}")
            except BaseException:
                process.kill()
                raise
    if process.returncode:
        raise ConfigError(
            f"building the engine failed ({Path(command[0]).name} ended with {process.returncode})",
            mend=f"see {log}",
        )


def _check_installed(wanted: Version, commands: Sequence[Sequence[str]]) -> None:
    try:
        found = Version.parse(version("tensorrt-llm").partition("+")[0])
    except PackageNotFoundError:
        image = container_of(wanted)
        where = f"in {image}" if image else f"where TensorRT-LLM {wanted} is installed"
        raise ConfigError(
            "TensorRT-LLM is not installed here, so no engine can be built",
            mend=f"run this {where}: {printed(commands)}",
        ) from None
    if not found.same_release(wanted):
        raise IncompatibleError(
            f"TensorRT-LLM {found} is installed here, and the engine is asked for {wanted}",
            mend=f"give --set trtllm_version={found}, or build it where {wanted} is installed",
        )


def _lengths(options: Mapping[str, Any]) -> dict[str, int]:
    """How long a prompt may be, and a prompt with its answer."""
    prompt = int(options["max_input_len"]) or 1024
    both = int(options["max_seq_len"]) or 2 * prompt
    if both <= prompt:
        raise OptionError(
            f"max_input_len {prompt} leaves no room for an answer in max_seq_len {both}",
            mend="lower the first, or raise the second",
        )
    return {"max_input_len": prompt, "max_seq_len": both}


def _dtype(options: Mapping[str, Any]) -> str:
    asked = str(options["dtype"])
    return "float16" if asked == "auto" else asked


def build_commands(target: Target, model: Path, model_type: str, engine: Path) -> list[list[str]]:
    """Return the commands, in the order in which they are run."""
    options = target.options
    if target.version >= FIRST_LLMAPI:
        return [[PYTHON, "-c", _script(options, model, engine)]]
    family = _FAMILIES.get(model_type)
    if family is None:
        raise IncompatibleError(
            f"it is not known which of TensorRT-LLM's examples converts {model_type or 'this'}",
            mend="build the engine yourself and give it with --set engine=DIR",
        )
    examples = str(options["examples"])
    if target.is_first:
        return _first(target, model, family, engine, examples)
    if target.version >= _FIRST_CORE:
        family = f"models/core/{family}"
    checkpoint = engine.with_name(f"{engine.name}-checkpoint")
    return [
        _convert(options, model, family, checkpoint, examples, model_type),
        _build(target, checkpoint, engine),
    ]


def _first(
    target: Target, model: Path, family: str, engine: Path, examples: str
) -> list[list[str]]:
    """0.5.0 builds in one go, by a script of each family's own."""
    options = target.options
    quantization = str(options["quantization"])
    if quantization and quantization not in _WEIGHT_ONLY:
        raise IncompatibleError(
            f"0.5.0 is built here without {quantization}",
            mend="choose int8 or int4, or build for a later version",
        )
    world = int(options["tensor_parallel"]) * int(options["pipeline_parallel"])
    dtype, lengths = _dtype(options), _lengths(options)
    command = [
        PYTHON, f"{examples}/{family}/build.py", "--model_dir", str(model), "--dtype", dtype,
        "--use_gpt_attention_plugin", dtype, "--use_gemm_plugin", dtype,
        "--max_batch_size", str(options["max_batch_size"]),
        "--max_input_len", str(lengths["max_input_len"]),
        "--max_output_len", str(lengths["max_seq_len"] - lengths["max_input_len"]),
        "--max_beam_width", str(options["max_beam_width"] or 1),
        "--world_size", str(world), "--tp_size", str(options["tensor_parallel"]),
        "--pp_size", str(options["pipeline_parallel"]), "--output_dir", str(engine),
    ]  # fmt: skip
    if target.batching == INFLIGHT:
        command += ["--remove_input_padding", "--use_inflight_batching", "--paged_kv_cache"]
    if quantization:
        command += ["--use_weight_only", "--weight_only_precision", quantization]
    return [command]


def _convert(
    options: Mapping[str, Any], model: Path, family: str, checkpoint: Path, examples: str, kind: str
) -> list[str]:
    quantization = str(options["quantization"])
    parallel = ["--tp_size", str(options["tensor_parallel"])]
    parallel += ["--pp_size", str(options["pipeline_parallel"])]
    ends = ["--model_dir", str(model), "--output_dir", str(checkpoint)]
    ends += ["--dtype", _dtype(options), *parallel]
    if quantization in _CALIBRATED:
        script = f"{examples}/quantization/quantize.py"
        return [PYTHON, script, *ends, "--qformat", quantization]
    command = [PYTHON, f"{examples}/{family}/convert_checkpoint.py", *ends]
    if kind == "gpt2":
        command += ["--gpt_variant", "gpt2"]
    if quantization:
        command += ["--use_weight_only", "--weight_only_precision", _WEIGHT_ONLY[quantization]]
    return command


def _build(target: Target, checkpoint: Path, engine: Path) -> list[str]:
    options = target.options
    world = int(options["tensor_parallel"]) * int(options["pipeline_parallel"])
    dtype, lengths = _dtype(options), _lengths(options)
    command = [
        "trtllm-build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(engine),
        "--gpt_attention_plugin", dtype, "--gemm_plugin", dtype,
        "--max_batch_size", str(options["max_batch_size"]),
        "--max_input_len", str(lengths["max_input_len"]),
        "--max_seq_len", str(lengths["max_seq_len"]),
        "--max_beam_width", str(options["max_beam_width"] or 1),
        "--workers", str(world),
    ]  # fmt: skip
    if target.batching == INFLIGHT:
        command += ["--remove_input_padding", "enable", "--paged_kv_cache", "enable"]
    return command


def _script(options: Mapping[str, Any], model: Path, engine: Path) -> str:
    """From 1.0 on the LLM API builds, and the examples' scripts are not needed."""
    quantization = str(options["quantization"])
    quant = ""
    if quantization:
        names = {"fp8": "FP8", "int4_awq": "W4A16_AWQ", "int8": "W8A16", "int4": "W4A16",
                 "int8_sq": "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"}  # fmt: skip
        quant = f", quant_config=QuantConfig(quant_algo=QuantAlgo.{names[quantization]})"
    limits = ", ".join(
        f"{name}={value}"
        for name, value in {
            "max_batch_size": options["max_batch_size"],
            "max_beam_width": options["max_beam_width"] or 1,
            **_lengths(options),
        }.items()
    )
    return (
        "from tensorrt_llm._tensorrt_engine import LLM; "
        "from tensorrt_llm.llmapi import BuildConfig, QuantAlgo, QuantConfig; "
        f"LLM({str(model)!r}, dtype={_dtype(options)!r}, "
        f"tensor_parallel_size={options['tensor_parallel']}, "
        f"pipeline_parallel_size={options['pipeline_parallel']}, "
        f"build_config=BuildConfig({limits}){quant}).save({str(engine)!r})"
    )
