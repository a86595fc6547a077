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
from llmserve_trtllm.target import Target
from llmserve_trtllm.versions import FIRST_LLMAPI, Version, container_of, pairs, sections

PYTHON = "python3"
"""Stands for the Python that runs this, where the commands are run here."""
_FIRST_WITH_CORE_EXAMPLES = Version(0, 19)


def build_or_explain(context: BuildContext, target: Target) -> Path:
    asked = target.options["engine"]
    if not target.options["build_engine"]:
        if not asked:
            raise OptionError(
                "there is no engine to serve",
                mend="give one with --set engine=DIR, build one with --set build_engine=true, or "
                "serve the model as it is with --set layout=llmapi",
            )
        return Path(asked).expanduser().resolve()
    folder = Path(asked or f"{context.name}-engine").expanduser().resolve()
    family = context.source.config().get("model_type") or ""
    commands = build_commands(target, context.source.path, family, folder)
    _check_installed(target.version, commands)
    log = folder.with_name(f"{folder.name}.log")
    folder.parent.mkdir(parents=True, exist_ok=True)
    for command in commands:
        run(command, log, context.report)
    return folder


def run(command: Sequence[str], log: Path, report: Callable[[str], None]) -> None:
    """Run one command; each of its lines goes to the log, the latest to who watches."""
    words = [sys.executable if word == PYTHON else word for word in command]
    report(f"building the engine: {Path(command[0]).name}, log in {log}")
    with log.open("a", encoding="utf-8") as kept:
        kept.write(f"$ {shlex.join(command)}\n")
        try:
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except OSError as error:
            raise ConfigError(
                f"{command[0]} cannot be run: {error.strerror}",
                mend="see that TensorRT-LLM's tools are on PATH",
            ) from None
        with process:
            try:
                for raw in process.stdout or ():
                    line = raw.decode("utf-8", "replace")
                    kept.write(line)
                    if line.strip():
                        report(f"building the engine: {line.strip()[:100]}")
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
        where = container_of(wanted) or f"a place where TensorRT-LLM {wanted} is installed"
        raise ConfigError(
            "TensorRT-LLM is not installed here, so no engine can be built",
            mend=f"run this in {where}: {' && '.join(map(shlex.join, commands))}",
        ) from None
    if not found.same_release(wanted):
        raise IncompatibleError(
            f"TensorRT-LLM {found} is installed here, and the engine is asked for {wanted}",
            mend=f"give --set trtllm_version={found}, or build it where {wanted} is installed",
        )


def build_commands(target: Target, model: Path, model_type: str, engine: Path) -> list[list[str]]:
    values = _values(target.options)
    values |= {"model": str(model), "engine": str(engine)}
    if target.version >= FIRST_LLMAPI:
        # The LLM API builds, and the examples' scripts are not needed.
        return [[PYTHON, "-c", " ".join(sections("commands.txt")["llm api"]).format_map(values)]]
    families = pairs("commands.txt", "families")
    if model_type not in families:
        raise IncompatibleError(
            f"it is not known which of TensorRT-LLM's examples converts {model_type or 'this'}",
            mend="build the engine yourself and give it with --set engine=DIR",
        )
    core = "models/core/" if target.version >= _FIRST_WITH_CORE_EXAMPLES else ""
    values |= {"family": core + families[model_type], "checkpoint": f"{engine}-checkpoint"}
    quantization = values["quantization"]
    how = "weight-only" if quantization in ("int8", "int4") else quantization
    wanted = {target.batching, model_type, how}
    if target.is_first:
        return [_command("first", wanted, values)]
    begin = "convert" if how in ("", "weight-only") else "quantize"
    return [_command(begin, wanted, values), _command("build", wanted, values)]


def _command(step: str, wanted: set[str], values: Mapping[str, Any]) -> list[str]:
    """Return a step's section of the table as a command, with what the wanted engine adds."""
    words = []
    for heading, lines in sections("commands.txt").items():
        first, *adds = heading.split()
        if first == step and wanted.issuperset(adds):
            words += [word.format_map(values) for line in lines for word in line.split()]
    return words


def _values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with which an engine is built, and what follows from them."""
    prompt = options["max_input_len"] or 1024
    both = options["max_seq_len"] or 2 * prompt
    if both <= prompt:
        raise OptionError(
            f"max_input_len {prompt} leaves no room for an answer in max_seq_len {both}",
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
        "max_seq_len": both,
        "max_output_len": both - prompt,
        "world_size": options["tensor_parallel"] * options["pipeline_parallel"],
    }
