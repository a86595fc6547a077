"""Building an engine where TensorRT-LLM is installed, and saying how where it is not."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llmserve.builder.context import BuildContext
from llmserve.errors import ConfigError, IncompatibleError, OptionError
from llmserve_trtllm.commands import PYTHON, build_commands
from llmserve_trtllm.models.target import Target
from llmserve_trtllm.versions import Version, container_of


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
