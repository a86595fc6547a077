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
from llmserve_trtllm.target import Target
from llmserve_trtllm.versions import FIRST_LLMAPI, Version, container_of, pairs, sections

PYTHON = "python3"
"""Placeholder for the running Python, in commands that are run here."""
_FIRST_WITH_SORTED_EXAMPLES = Version(0, 19)
"""From this version on the examples are in models/core and models/contrib."""


def build_or_explain(context: BuildContext, target: Target) -> Path:
    engine = target.options["engine"]
    if not target.options["build_engine"]:
        if not engine:
            raise OptionError(
                "there is no engine to serve",
                mend="give one with --set engine=DIR, build one with --set build_engine=true, or "
                "serve the model without an engine with --set layout=llmapi",
            )
        return Path(engine).expanduser().resolve()
    folder = Path(engine or f"{context.name}-engine").expanduser().resolve()
    family = context.source.config().get("model_type") or ""
    commands = build_commands(target, context.source.path, family, folder)
    _check_installed(target.version, commands)
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
                mend="make sure that TensorRT-LLM's tools are on PATH",
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
            mend=f"see {log}",
        )


def _check_installed(required: Version, commands: Sequence[Sequence[str]]) -> None:
    try:
        installed = Version.parse(version("tensorrt-llm").partition("+")[0])
    except PackageNotFoundError:
        place = container_of(required) or f"an environment with TensorRT-LLM {required}"
        raise ConfigError(
            "TensorRT-LLM is not installed here, so no engine can be built",
            mend=f"run this in {place}: {' && '.join(map(shlex.join, commands))}",
        ) from None
    if not installed.same_release(required):
        raise IncompatibleError(
            f"TensorRT-LLM {installed} is installed here, and the engine is for {required}",
            mend=f"give --set trtllm_version={installed}, or build it with {required} installed",
        )


def build_commands(target: Target, model: Path, model_type: str, engine: Path) -> list[list[str]]:
    values = _values(target.options)
    values |= {"model": str(model), "engine": str(engine)}
    if target.version >= FIRST_LLMAPI:
        # The LLM API builds the engine, so the examples' scripts are not needed.
        return [[PYTHON, "-c", " ".join(sections("commands.txt")["llm api"]).format_map(values)]]
    families = {
        family: folders for family, *folders in map(str.split, sections("commands.txt")["families"])
    }
    if model_type not in families:
        raise IncompatibleError(
            f"none of the known TensorRT-LLM examples converts {model_type or 'this model'}",
            mend="build the engine yourself and give it with --set engine=DIR",
        )
    folder = families[model_type][target.version >= _FIRST_WITH_SORTED_EXAMPLES]
    values |= {"family": folder, "checkpoint": f"{engine}-checkpoint"}
    quantization = values["quantization"]
    method = "weight-only" if quantization in ("int8", "int4") else quantization
    features = {target.batching, model_type, method}
    if target.is_0_5:
        return [_command("build-0.5.0", features, values)]
    first_step = "convert" if method in ("", "weight-only") else "quantize"
    return [_command(first_step, features, values), _command("build", features, values)]


def _command(step: str, features: set[str], values: Mapping[str, Any]) -> list[str]:
    """Return the command for a step, with the arguments that the engine's features add."""
    words = []
    for heading, lines in sections("commands.txt").items():
        name, *required = heading.split()
        if name == step and features.issuperset(required):
            words += [word.format_map(values) for line in lines for word in line.split()]
    return words


def _values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for the commands: the options, and values derived from them."""
    prompt = options["max_input_len"] or 1024
    total = options["max_seq_len"] or 2 * prompt
    if total <= prompt:
        raise OptionError(
            f"max_input_len {prompt} leaves no room for an answer in max_seq_len {total}",
            mend="lower the first, or raise the second",
        )
    algorithm = pairs("commands.txt", "quantizations").get(options["quantization"])
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
