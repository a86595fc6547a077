"""From a model of Hugging Face transformers to OpenVINO's form, by optimum-intel."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from llmserve.errors import ModelSourceError, PluginError

_EXPORT = "optimum.commands.optimum_cli"


def convert(source: Path, target: Path, *, weight_format: str, trust_remote_code: bool) -> None:
    """Write ``openvino_model.xml`` and its like into ``target``.

    In a process of its own: it takes several times the model's memory, which comes back with
    its end, and it prints a lot that is nobody's concern while it goes well.
    """
    if find_spec("optimum") is None or find_spec("optimum.intel") is None:
        raise PluginError(
            f"{source.name} is not in OpenVINO's form, and optimum-intel, which converts, is not "
            "installed",
            mend="pip install 'llmserve-openvino[convert]', or name a folder that "
            "`optimum-cli export openvino` wrote",
        )
    command = [
        sys.executable, "-m", _EXPORT, "export", "openvino", "--model", str(source),
        "--task", "text-generation-with-past", "--weight-format", weight_format,
    ]  # fmt: skip
    if trust_remote_code:
        command.append("--trust-remote-code")
    done = subprocess.run(
        [*command, str(target)], capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode or not (target / "openvino_model.xml").is_file():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        told = lines[-1][:300] if lines else f"it ended with {done.returncode}"
        raise ModelSourceError(
            f"{source.name} could not be converted to OpenVINO: {told}", mend=_mend()
        )


def _mend() -> str:
    """Say what helps; most often it is that optimum-intel has brought a torchvision for GPUs."""
    if find_spec("torchvision") is not None:
        command = [sys.executable, "-c", "import torchvision"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return "torchvision does not fit this torch, so take it away: pip uninstall torchvision"
    return "serve it with --plugin hf, or convert it with optimum-cli and name that folder"
